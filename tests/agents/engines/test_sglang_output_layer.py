"""Claims about the output layer of SGLang's servers: it is multiplied as the learner multiplies it, or is SGLang's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agents.engines.sglang.in_server.scheduler.output_layer import install
from agents.model.linear_logprobs import float32_product

THEIRS = "computed by SGLang"


def logits_of(layer: Any, hidden_NH: torch.Tensor, is_float32: bool = True, is_quantized: bool = False) -> Any:
    """Ask a processor of logits whose own method answers with a word."""

    class LogitsProcessor:
        use_fp32_lm_head = is_float32

        def _compute_lm_head(self, hidden_states: Any, lm_head: Any, embedding_bias: Any = None) -> Any:
            return THEIRS

    install(SimpleNamespace(LogitsProcessor=LogitsProcessor, should_apply_lm_head_quant_method=lambda *_: is_quantized))
    return LogitsProcessor()._compute_lm_head(hidden_NH, layer, None)


def test_logits_are_those_of_the_learner() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH = (torch.randn(n, 64, generator=generator).bfloat16() for n in (3, 500))
    logits_NV = logits_of(SimpleNamespace(weight=weight_VH), hidden_NH)
    assert logits_NV.dtype == torch.float32
    assert torch.equal(logits_NV, float32_product(hidden_NH, weight_VH.T))
    assert (logits_NV - hidden_NH.double() @ weight_VH.double().T).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("layer", "settings"),
    [
        ({}, {"is_float32": False}),
        ({}, {"is_quantized": True}),
        ({"set_lora": None, "apply_lora": None}, {}),
        ({"weight": torch.ones(5, 4)}, {}),
        ({"weight": None}, {}),
    ],
    ids=["bfloat16 is asked for", "quantized", "with adapters", "of another dtype", "without a weight"],
)
def test_another_layer_stays_sglangs(layer: dict[str, Any], settings: dict[str, bool]) -> None:
    hidden_NH = torch.ones(2, 4).bfloat16()
    assert (
        logits_of(SimpleNamespace(**{"weight": torch.ones(5, 4).bfloat16(), **layer}), hidden_NH, **settings) is THEIRS
    )


def test_a_network_in_float32_is_left_alone() -> None:
    assert logits_of(SimpleNamespace(weight=torch.ones(5, 4)), torch.ones(2, 4)) is THEIRS


def test_a_release_that_does_not_tell_which_layers_are_quantized_is_left_alone() -> None:
    class LogitsProcessor:
        def _compute_lm_head(self, hidden_states: Any, lm_head: Any, embedding_bias: Any = None) -> Any:
            return THEIRS

    own = LogitsProcessor._compute_lm_head
    install(SimpleNamespace(LogitsProcessor=LogitsProcessor))
    assert LogitsProcessor._compute_lm_head is own


def test_a_release_that_calls_it_with_something_else_is_left_alone() -> None:
    """0.5.23 gives a place for the logits."""

    class LogitsProcessor:
        use_fp32_lm_head = True

        def _compute_lm_head(
            self, hidden_states: Any, lm_head: Any, embedding_bias: Any = None, *, out: Any = None
        ) -> Any:
            return THEIRS

    install(SimpleNamespace(LogitsProcessor=LogitsProcessor, should_apply_lm_head_quant_method=lambda *_: False))
    layer = SimpleNamespace(weight=torch.ones(5, 4).bfloat16())
    assert LogitsProcessor()._compute_lm_head(torch.ones(2, 4).bfloat16(), layer, out=None) is THEIRS
