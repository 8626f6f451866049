"""Makes the changes, as SGLang imports this module."""

# pyright: reportMissingImports=false
from __future__ import annotations

from sglang.srt.layers import logits_processor
from sglang.srt.managers import prefill_delayer
from sglang.srt.mem_cache import radix_cache
from sglang.srt.models import qwen2_5_vl, qwen3_vl

from agents.engines.sglang.in_server.scheduler import eviction, levels, one_rank, output_layer, tower_graphs

for model in (qwen2_5_vl.Qwen2_5_VLForConditionalGeneration, qwen3_vl.Qwen3VLForConditionalGeneration):
    levels.install(model)
output_layer.install(logits_processor)
tower_graphs.install(qwen3_vl)
eviction.install(radix_cache)
one_rank.install(prefill_delayer)
