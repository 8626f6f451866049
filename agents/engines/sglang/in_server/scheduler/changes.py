"""Makes the changes, as SGLang imports this module."""

# pyright: reportMissingImports=false
from __future__ import annotations

from sglang.srt.layers import logits_processor

from agents.engines.sglang.in_server.scheduler import output_layer

output_layer.install(logits_processor)
