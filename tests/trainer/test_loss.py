"""Claims about the loss, held against values worked out by hand, a finite difference and torch's own distributions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agents.logprobs import sampling_logprobs
from trainer.loss import clipped_loss, entropy, k3_kl


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # The derivative of -rho A by the log-prob is -rho A; a clipped token has none.
        (1.0, 2.0, -2.0, -2.0, False),
        (1.2, 2.0, -2.4, -2.4, False),
        (1.5, 2.0, -2.56, 0.0, True),  # past 1 + 0.28 with a gain: held at the bound
        (0.5, 2.0, -1.0, -1.0, False),  # a loss of probability of a good token is never forgiven
        (1.0, -2.0, 2.0, 2.0, False),
        (0.9, -2.0, 1.8, 1.8, False),
        (0.5, -2.0, 1.6, 0.0, True),  # past 1 - 0.2 with a gain
        (1.5, -2.0, 3.0, 3.0, False),  # a bad token that became likelier is never forgiven
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_clipped_loss_is_the_value_worked_out_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    old = tensor(-1.3)
    new = (old + math.log(ratio)).requires_grad_()
    loss_N, clipped_N = clipped_loss(new, old, tensor(advantage), 0.2, 0.28)
    loss_N.sum().backward()
    assert loss_N.item() == pytest.approx(loss, abs=1e-12)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert clipped_N.item() is clipped


@pytest.mark.parametrize(
    ("gap", "k3"),
    [(0.0, 0.0), (math.log(2), 1 - math.log(2)), (math.log(0.5), math.log(2) - 0.5), (1e-4, 5.00016667e-9)],
)
def test_k3_is_the_ratio_less_one_less_its_logarithm(gap: float, k3: float) -> None:
    assert k3_kl(tensor(-0.7 + gap), tensor(-0.7)).item() == pytest.approx(k3, rel=1e-6, abs=1e-20)


def test_k3_of_float32_logprobs_does_not_drown_in_rounding() -> None:
    rollout = torch.tensor([-5.0])
    trainer = torch.nextafter(rollout, torch.tensor([0.0]))  # the smallest gap that float32 can hold, about 5e-7
    gap = (trainer.double() - rollout.double()).item()
    assert k3_kl(trainer, rollout).item() == pytest.approx(gap**2 / 2, rel=1e-3)


@given(gap=st.floats(-20, 20))
def test_k3_is_never_negative(gap: float) -> None:
    assert k3_kl(tensor(gap), tensor(0.0)).item() >= 0


def test_k3_averages_to_the_kl_of_rollout_from_trainer() -> None:
    rollout, trainer = tensor(0.5, 0.3, 0.2).log(), tensor(0.4, 0.4, 0.2).log()
    kl = (rollout.exp() * (rollout - trainer)).sum()
    assert (rollout.exp() * k3_kl(trainer, rollout)).sum().item() == pytest.approx(kl.item(), rel=1e-12)


@given(seed=st.integers(0, 1000), suppressed=st.sets(st.integers(0, 9), max_size=8))
def test_entropy_is_that_of_the_distribution_without_its_impossible_entries(seed: int, suppressed: set[int]) -> None:
    logits = 3 * torch.randn(4, 10, generator=torch.Generator().manual_seed(seed))
    logprobs = sampling_logprobs(logits, 1.0, tuple(suppressed))
    kept = [place for place in range(10) if place not in suppressed]
    expected = torch.distributions.Categorical(logits=logits[:, kept]).entropy()
    torch.testing.assert_close(entropy(logprobs), expected)


def test_entropy_of_a_uniform_and_of_a_certain_choice() -> None:
    assert entropy(torch.full((1, 8), 1 / 8).log()).item() == pytest.approx(math.log(8))
    assert entropy(torch.tensor([[0.0, -math.inf, -math.inf]])).item() == 0.0


def test_the_gradient_of_the_whole_loss_equals_its_finite_difference() -> None:
    """From logits to the weighted sum over tokens, with temperature, suppressed ids and both sides of the clip."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(6, 7, dtype=torch.float64, generator=generator)
    targets_N = torch.tensor([0, 1, 2, 3, 4, 0])
    advantages_N = tensor(1.0, -0.5, 2.0, -1.5, 0.7, 0.0)
    weights_N = tensor(0.1, 0.2, 0.1, 0.3, 0.2, 0.1)

    def logprobs(logits: Tensor) -> Tensor:
        # As `sampling_logprobs`, which works in float32, too coarse for differences.
        masked = (logits / 0.7).index_fill(-1, torch.tensor([5, 6]), -math.inf)
        return masked.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]

    torch.testing.assert_close(
        logprobs(logits_NV).float(), sampling_logprobs(logits_NV, 0.7, (5, 6)).gather(-1, targets_N[:, None])[:, 0]
    )
    ratios = tensor(1.1, 0.6, 1.6, 1.4, 0.95, 2.0)  # free, clipped below, clipped above, free, free, no advantage
    old_N = logprobs(logits_NV) - ratios.log()

    def loss(logits: Tensor) -> Tensor:
        return (clipped_loss(logprobs(logits), old_N, advantages_N, 0.2, 0.28)[0] * weights_N).sum()

    assert clipped_loss(logprobs(logits_NV), old_N, advantages_N, 0.2, 0.28)[1].tolist() == [
        False, True, True, False, False, False,
    ]  # fmt: skip
    variable = logits_NV.clone().requires_grad_()
    loss(variable).backward()
    assert variable.grad is not None
    step = 1e-6
    for place in range(logits_NV.numel()):
        nudge = torch.zeros(logits_NV.numel(), dtype=torch.float64)
        nudge[place] = step
        nudge = nudge.view_as(logits_NV)
        difference = (loss(logits_NV + nudge) - loss(logits_NV - nudge)) / (2 * step)
        assert variable.grad.flatten()[place].item() == pytest.approx(difference.item(), abs=1e-8)
