"""Claims about scores made chunk by chunk: the log-softmax and entropy of all logits, in value and gradient.

Legend: N places, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agents.model import linear_logprobs
from agents.model.linear_logprobs import float32_product, law_logits, linear_scores
from agents.types import SamplingDistribution

N, H, V = 13, 6, 50
PLAIN = SamplingDistribution()
LAWS = {
    "plain": PLAIN,
    "temperature": SamplingDistribution(0.7),
    "suppressed": SamplingDistribution(suppressed_ids=(0, 3, 49)),
    "both": SamplingDistribution(1.6, (5, 6, 7)),
}


@pytest.fixture(params=LAWS)
def distribution(request: pytest.FixtureRequest) -> SamplingDistribution:
    return LAWS[request.param]


def inputs(seed: int = 0, scale: float = 1.5) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weights and targets that nothing here suppresses, and place 0 once all but certain."""
    rng = torch.Generator().manual_seed(seed)
    hidden_NH = scale * torch.randn(N, H, generator=rng)
    hidden_NH[0] *= 20
    weight_VH = torch.randn(V, H, generator=rng)
    targets_N = torch.randint(10, 40, (N,), generator=rng)
    return hidden_NH.requires_grad_(), weight_VH.requires_grad_(), targets_N


def exact(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, distribution: SamplingDistribution
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies from all logits at once, in float64; sums run over what is not suppressed."""
    kept = [v for v in range(len(weight_VH)) if v not in distribution.suppressed_ids]
    logprobs_NK = (hidden_NH.double() @ weight_VH.double().T / distribution.temperature)[:, kept].log_softmax(-1)
    column_N = torch.tensor([kept.index(int(target)) for target in targets_N])
    chosen_N = logprobs_NK.gather(-1, column_N[:, None])[:, 0]
    return chosen_N, -(logprobs_NK.exp() * logprobs_NK).sum(-1)


def weighted(logprobs_N: Tensor, entropy_N: Tensor, logprob_weight: float, entropy_weight: float) -> Tensor:
    """Return a sum in which every place has its own weight, of either sign."""
    weights_N = torch.linspace(-1, 2, len(logprobs_N), dtype=logprobs_N.dtype)
    return (logprob_weight * weights_N * logprobs_N + entropy_weight * weights_N.flip(0) * entropy_N).sum()


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("places", [1, 4, 13, 1000])
def test_scores_are_those_of_all_logits(
    distribution: SamplingDistribution, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logprobs, "CHUNK_VALUES", places * V)
    tensors = inputs()
    logprobs_N, entropy_N = linear_scores(*tensors, distribution)
    expected = exact(*tensors, distribution)
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    torch.testing.assert_close(logprobs_N.double(), expected[0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(entropy_N.double(), expected[1], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("loss", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.4)], ids=["log-prob", "entropy", "both"])
@pytest.mark.parametrize("places", [1, 4, 1000])
def test_gradients_are_those_of_all_logits(
    distribution: SamplingDistribution, places: int, loss: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logprobs, "CHUNK_VALUES", places * V)
    tensors = inputs()
    got = torch.autograd.grad(weighted(*linear_scores(*tensors, distribution), *loss), tensors[:2])
    expected = torch.autograd.grad(weighted(*exact(*tensors, distribution), *loss), tensors[:2])
    for ours, theirs in zip(got, expected, strict=True):
        assert relative(ours, theirs) < 1e-5
    assert all(not got[1][token].any() for token in distribution.suppressed_ids)


def test_gradients_are_finite_differences() -> None:
    """Central differences of the formula in float64, one element of each tensor at a time."""
    distribution = LAWS["both"]
    tensors = inputs(seed=3)
    got = torch.autograd.grad(weighted(*linear_scores(*tensors, distribution), 0.7, -0.4), tensors[:2])
    doubles = [tensor.detach().double() for tensor in tensors[:2]]
    step = 1e-5
    for number, gradient in enumerate(got):
        for index in range(0, gradient.numel(), 7):
            ends = []
            for sign in (1, -1):
                moved = [double.clone() for double in doubles]
                moved[number].view(-1)[index] += sign * step
                ends.append(float(weighted(*exact(*moved, tensors[2], distribution), 0.7, -0.4)))  # type: ignore[misc]
            slope = (ends[0] - ends[1]) / (2 * step)
            assert float(gradient.flatten()[index]) == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_a_distribution_of_two_tokens_is_the_formula_by_hand() -> None:
    """Logits 0 and log 3: probabilities 1/4 and 3/4; d log p_1 / d z = (-1/4, 1/4)."""
    hidden_NH = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight_VH = torch.tensor([[0.0, 5.0], [3.0, -2.0]]).clone()
    weight_VH[1, 0] = torch.tensor(3.0).log()
    logprobs_N, entropy_N = linear_scores(hidden_NH, weight_VH, torch.tensor([1]), PLAIN)
    assert logprobs_N.exp().item() == pytest.approx(0.75)
    assert entropy_N.item() == pytest.approx(0.5623351446)
    (gradient,) = torch.autograd.grad(logprobs_N.sum(), hidden_NH)
    assert gradient[0].tolist() == pytest.approx([0.25 * 1.0986123, -0.25 * 5 + 0.25 * -2])


def test_no_places_have_no_scores_and_gradients_of_zero() -> None:
    _, weight_VH, _ = inputs()
    hidden_NH = torch.zeros(0, H, requires_grad=True)
    logprobs_N, entropy_N = linear_scores(hidden_NH, weight_VH, torch.zeros(0, dtype=torch.long), PLAIN)
    assert logprobs_N.shape == entropy_N.shape == (0,)
    gradients = torch.autograd.grad(logprobs_N.sum() + entropy_N.sum(), (hidden_NH, weight_VH))
    assert gradients[0].shape == (0, H) and torch.equal(gradients[1], torch.zeros(V, H))


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_tensor_without_a_gradient_costs_none(wanted: int) -> None:
    tensors = inputs()
    tensors[1 - wanted].requires_grad_(False)
    logprobs_N, _ = linear_scores(*tensors, PLAIN)
    logprobs_N.sum().backward()
    grads = [tensors[0].grad, tensors[1].grad]
    assert grads[1 - wanted] is None
    expected = torch.autograd.grad(exact(*tensors, PLAIN)[0].sum(), tensors[wanted])[0]
    assert grads[wanted] is not None and relative(grads[wanted], expected) < 1e-5  # type: ignore[arg-type]


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


@pytest.mark.parametrize("places", [1, 8])
def test_the_logits_of_all_places_never_exist_at_once(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    many, vocabulary = 64, 512
    monkeypatch.setattr(linear_logprobs, "CHUNK_VALUES", places * vocabulary)
    rng = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(many, H, generator=rng, requires_grad=True)
    weight_VH = torch.randn(vocabulary, H, generator=rng, requires_grad=True)
    targets_N = torch.randint(0, vocabulary, (many,), generator=rng)
    with Largest() as largest:
        logprobs_N, entropy_N = linear_scores(hidden_NH, weight_VH, targets_N, LAWS["both"])
        (logprobs_N.sum() + entropy_N.sum()).backward()
    assert hidden_NH.grad is not None and weight_VH.grad is not None
    assert largest.numel == max(places * vocabulary, weight_VH.numel())
    with Largest() as largest:
        (hidden_NH @ weight_VH.T).log_softmax(-1)
    assert largest.numel == many * vocabulary  # what is measured would show


def test_logits_far_apart_leave_scores_and_gradients_finite() -> None:
    hidden_NH = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    weight_VH = torch.tensor([[1.0], [2.0], [-3.0], [0.5]], requires_grad=True)
    distribution = SamplingDistribution(suppressed_ids=(3,))
    logprobs_N, entropy_N = linear_scores(hidden_NH, weight_VH, torch.tensor([1, 2, 0]), distribution)
    assert logprobs_N.tolist() == pytest.approx([0, 0, -1.0986123])
    assert entropy_N.tolist() == pytest.approx([0, 0, 1.0986123])
    gradients = torch.autograd.grad(logprobs_N.sum() + entropy_N.sum(), (hidden_NH, weight_VH))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_law_divides_by_the_temperature_and_suppresses() -> None:
    logits_CV = law_logits(torch.tensor([[1.0, 2.0, 3.0]]), SamplingDistribution(0.5, (1,)))
    assert logits_CV.tolist() == [[2.0, -torch.inf, 6.0]]


def test_a_product_of_bfloat16_is_added_up_in_float32() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 300, generator=rng).bfloat16(), torch.randn(300, 30, generator=rng).bfloat16()
    expected = a.double() @ b.double()
    assert float32_product(a, b).dtype == torch.float32
    assert relative(float32_product(a, b), expected) < 1e-6
    assert relative(a @ b, expected) > 1e-4


def test_in_bfloat16_scores_are_those_of_its_values_in_float32() -> None:
    """Inputs rounded to bfloat16 once; only the gradient is rounded again."""
    hidden_NH, weight_VH, targets_N = inputs()
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden_NH, weight_VH)]
    got = linear_scores(*half, targets_N, LAWS["temperature"])  # type: ignore[misc]
    expected = exact(*half, targets_N, LAWS["temperature"])  # type: ignore[misc]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)
    gradients = torch.autograd.grad(weighted(*got, 0.7, -0.4), half)
    for ours, theirs in zip(gradients, torch.autograd.grad(weighted(*expected, 0.7, -0.4), half), strict=True):
        assert ours.dtype == torch.bfloat16 and relative(ours, theirs) < 0.01


def sets(targets_N: Tensor) -> Tensor:
    """Return five ids for each place, the target's among them, some more than once."""
    rng = torch.Generator().manual_seed(7)
    return torch.cat([targets_N[:, None], torch.randint(8, 40, (N, 3), generator=rng), targets_N[:, None]], dim=-1)


def exact_in_sets(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, in float64, of each place among the distinct ids of its set alone."""
    places = []
    for hidden_H, target, kept_K in zip(hidden_NH, targets_N, sets(targets_N), strict=True):
        ids = sorted(set(kept_K.tolist()))
        logprobs_K = (weight_VH[ids].double() @ hidden_H.double() / LAWS["both"].temperature).log_softmax(-1)
        places.append((logprobs_K[ids.index(int(target))], -(logprobs_K.exp() * logprobs_K).sum()))
    logprobs, entropies = zip(*places, strict=True)
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("places", [1, 4, 1000])
def test_scores_and_gradients_in_sets_are_those_of_their_ids_alone(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logprobs, "CHUNK_VALUES", places * V)
    tensors = inputs()
    kept_NK = sets(tensors[2])
    scores = linear_scores(*tensors, LAWS["both"], kept_NK=kept_NK)
    expected = exact_in_sets(*tensors)
    for got, wanted in zip(scores, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=2e-5)
    gradients = torch.autograd.grad(weighted(*scores, 0.7, -0.4), tensors[:2])
    for ours, theirs in zip(gradients, torch.autograd.grad(weighted(*expected, 0.7, -0.4), tensors[:2]), strict=True):
        assert relative(ours, theirs) < 1e-5
    never = [token for token in range(V) if token not in kept_NK]
    assert never and not gradients[1][never].any()


def test_gradients_in_sets_are_finite_differences() -> None:
    tensors = inputs(seed=3)
    kept_NK = sets(tensors[2])
    scores = linear_scores(*tensors, LAWS["both"], kept_NK=kept_NK)
    gradients = torch.autograd.grad(weighted(*scores, 0.7, -0.4), tensors[:2])
    doubles = [tensor.detach().double() for tensor in tensors[:2]]
    step = 1e-5
    for number, gradient in enumerate(gradients):
        for index in range(0, gradient.numel(), 7):
            ends = []
            for sign in (1, -1):
                moved = [double.clone() for double in doubles]
                moved[number].view(-1)[index] += sign * step
                ends.append(float(weighted(*exact_in_sets(*moved, tensors[2]), 0.7, -0.4)))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert float(gradient.flatten()[index]) == pytest.approx(slope, rel=1e-4, abs=1e-4)
