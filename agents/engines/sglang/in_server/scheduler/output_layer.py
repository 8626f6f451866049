"""Lets SGLang multiply by the output layer as the learner does: terms of bfloat16, sums in float32.

With `--enable-fp32-lm-head`, SGLang casts the whole layer to float32 in every step, and multiplies without tensor
cores. The terms are the same, since a product of two bfloat16 values is exact in float32. From 0.5.18 on
SGLang does the same itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from agents.model.linear_logprobs import float32_product

#: Those of the method that is replaced.
_PARAMETERS = ("self", "hidden_states", "lm_head", "embedding_bias")


def install(logits_processor: Any) -> None:
    """Change SGLang's module of that name. Layers with adapters, quantized ones and float32 stay SGLang's.

    So do all layers of a release without the function that tells which are quantized, or with other parameters.
    """
    theirs = logits_processor.LogitsProcessor._compute_lm_head
    is_quantized = getattr(logits_processor, "should_apply_lm_head_quant_method", None)
    if is_quantized is None or tuple(inspect.signature(theirs).parameters) != _PARAMETERS:
        return

    def compute(self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None) -> Tensor:
        method = getattr(lm_head, "quant_method", None)
        weight = getattr(lm_head, "weight", None)
        if (
            self.use_fp32_lm_head
            and isinstance(weight, Tensor)
            and weight.dtype == hidden_states.dtype != torch.float32
            and not hasattr(lm_head, "set_lora")
            and not is_quantized(lm_head, method)
        ):
            return float32_product(hidden_states, weight.T)
        return theirs(self, hidden_states, lm_head, embedding_bias)

    logits_processor.LogitsProcessor._compute_lm_head = compute
