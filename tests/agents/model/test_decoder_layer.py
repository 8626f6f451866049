"""Claims about our own layers of a decoder: outputs and gradients are those of Transformers' layers and of torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn import functional as F

from agents.model import decoder_layer
from agents.model.architectures import ARCHITECTURES
from agents.model.decoder_layer import attend_once
from agents.model.policy import PolicyModel
from tests.trainer.steps import Case, Difference, Variant, take_variant
from trainer.config.learner import LearnerConfig


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_one_query_a_row_attends_as_torch_does(key_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 1, 8)
    store = torch.randn(2, 3, key_heads, 20, 8)
    keys, values = store[:, :, :, :13]
    seen = torch.rand(3, 13) < 0.6
    seen[:, -1] = True
    repeated = [x.repeat_interleave(4 // key_heads, dim=1) for x in (keys, values)]
    expected = F.scaled_dot_product_attention(query, repeated[0], repeated[1], seen[:, None, None], scale=0.3)
    got = attend_once(query.transpose(1, 2), keys, values, ~seen[:, None, None], 0.3)
    torch.testing.assert_close(got, expected.transpose(1, 2).flatten(2), rtol=0, atol=1e-6)


def test_the_derivatives_of_norm_and_rotation_are_those_of_their_values() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4, 6), (6,)))
    norm = SimpleNamespace(weight=weight, variance_epsilon=0.1)
    angles = torch.randn(2, 3, 3, dtype=torch.float64)
    rotary = decoder_layer.signed_rotary(*(f(torch.cat([angles, angles], dim=-1)) for f in (torch.cos, torch.sin)))
    assert torch.autograd.gradcheck(lambda x, _: decoder_layer._normed(norm, x), (x, weight))
    assert torch.autograd.gradcheck(decoder_layer._Rotated.apply, (x, *rotary))
    expected = F.rms_norm(x, (6,), weight, 0.1)
    torch.testing.assert_close(decoder_layer._normed(norm, x), expected, rtol=0, atol=1e-7)
    with torch.no_grad():
        torch.testing.assert_close(decoder_layer._normed(norm, x), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_learner_on_a_cpu_trains_with_own_layers_as_with_transformers(
    model_type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows of several samples and of one, with images where the network takes them, half of the blocks recomputed."""
    case = Case.write(tmp_path / model_type, model_type)
    variant = Variant(max_tokens=100, config=LearnerConfig(recompute=0.5))
    calls: list[bool] = []
    original = decoder_layer.layer_output
    monkeypatch.setattr(decoder_layer, "layer_output", lambda *args: (calls.append(True), original(*args))[1])
    got = take_variant(case, variant)
    joins_axes = model_type == "qwen2_5_vl" and Version(transformers.__version__) < Version("5.13")
    assert bool(calls) != joins_axes  # such layers are left to Transformers
    monkeypatch.setattr(PolicyModel, "use_own_layers", lambda self: None)
    calls.clear()
    expected = take_variant(case, variant)
    assert not calls
    difference = Difference.between(got, expected)
    assert difference.loss < 1e-5 and difference.worst_gradient < 1e-4, difference
