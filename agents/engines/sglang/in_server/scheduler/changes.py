"""Makes the changes, as SGLang imports this module."""

# pyright: reportMissingImports=false
from __future__ import annotations

from sglang.srt.layers import logits_processor
from sglang.srt.mem_cache import radix_cache
from sglang.srt.models import qwen3_vl

from agents.engines.sglang.in_server.scheduler import eviction, output_layer, tower_graphs

output_layer.install(logits_processor)
tower_graphs.install(qwen3_vl)
eviction.install(radix_cache)
