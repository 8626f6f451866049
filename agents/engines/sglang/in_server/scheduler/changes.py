"""Makes the changes, as SGLang imports this module."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import sglang
from sglang.srt.models import qwen2_5_vl, qwen3_vl

from agents.engines.sglang.in_server.scheduler import levels, tower_graphs
from agents.engines.sglang.releases import Release

# With another release SGLang ignores this module.
if doubt := Release.of({"version": sglang.__version__}).doubt:
    raise ImportError(doubt)

for model in (qwen2_5_vl.Qwen2_5_VLForConditionalGeneration, qwen3_vl.Qwen3VLForConditionalGeneration):
    levels.install(model)
tower_graphs.install(qwen3_vl)
