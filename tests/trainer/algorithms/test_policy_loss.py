"""Claims about the loss, held against values worked out by hand, a finite difference and torch's own distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agents.model.linear_logprobs import _summary
from trainer.algorithms.policy_loss import (
    POLICY_LOSSES,
    PolicyTerms,
    gspo,
    k3_kl,
    likelihood,
    log_ratio,
    ppo,
    reference_kl,
)
from trainer.config.algorithm import AlgorithmConfig, KLEstimatorName, PolicyLossName
from trainer.types import ModelTokens


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens_of(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, sample_N: Sequence[int] = ()) -> ModelTokens:
    """Return tokens of one sample, or of those in `sample_N`, with what a policy loss reads."""
    nothing, samples = torch.zeros_like(old_N), torch.tensor(sample_N or [0] * len(old_N))
    num_samples = int(samples.max()) + 1
    return ModelTokens(logprobs_N, nothing, old_N, nothing, None, advantages_N, nothing, samples, num_samples)


def ppo_of_one(logprob: Tensor, old: Tensor, advantage: float, config: AlgorithmConfig) -> PolicyTerms:
    return ppo(tokens_of(logprob, old, tensor(advantage)), config)


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
def test_ppo_is_the_value_worked_out_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    old = tensor(-1.3)
    new = (old + math.log(ratio)).requires_grad_()
    terms = ppo_of_one(new, old, advantage, AlgorithmConfig())
    terms.loss_N.sum().backward()
    assert terms.loss_N.item() == pytest.approx(loss, abs=1e-12)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert terms.clipped_N.item() is clipped
    assert terms.ratio_N.item() == pytest.approx(ratio) and not terms.ratio_N.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (4.0, -2.0, 6.0, 0.0, True),  # 3 times |A| in place of 4 times
        (2.9, -2.0, 5.8, 5.8, False),
        (0.5, -2.0, 1.6, 0.0, True),  # the other bounds hold as before
        (4.0, 2.0, -2.56, 0.0, True),  # a good token is not touched
        (4.0, 0.5, -0.64, 0.0, True),  # nor is one that is only a little good
        (0.5, 2.0, -1.0, -1.0, False),
        (4.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_dual_clip_bounds_the_loss_of_a_bad_token(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    new = tensor(-0.1).requires_grad_()
    terms = ppo_of_one(new, new.detach() - math.log(ratio), advantage, AlgorithmConfig(dual_clip=3))
    terms.loss_N.sum().backward()
    assert terms.loss_N.item() == pytest.approx(loss, abs=1e-12)
    assert new.grad is not None and new.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert terms.clipped_N.item() is clipped


def test_a_bad_token_whose_loss_is_exactly_the_most_is_not_clipped() -> None:
    ratio_of_three = torch.tensor([3.0]).log()
    terms = ppo_of_one(ratio_of_three, torch.zeros(1), -1.0, AlgorithmConfig(dual_clip=float(ratio_of_three.exp())))
    assert terms.clipped_N.tolist() == [False]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_clipped_tokens_are_told_as_booleans(name: PolicyLossName) -> None:
    zero = torch.zeros(1)
    terms = POLICY_LOSSES[name](tokens_of(zero, zero, zero), AlgorithmConfig())
    assert (terms.clipped_N.dtype, terms.clipped_N.tolist()) == (torch.bool, [False])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reference_kl_has_the_type_of_the_log_probs(estimator: KLEstimatorName, dtype: torch.dtype) -> None:
    assert reference_kl(torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), estimator).dtype == dtype


@pytest.mark.parametrize(
    ("ratios", "advantage", "loss", "gradient", "clipped"),
    [
        # The square root of 1.44 * 1 is 1.2; the derivative by each log-prob is -1.2 A.
        ((1.44, 1.0), 1.0, -1.2, -1.2, False),
        ((1.44, 1.0), -1.0, 1.2, 1.2, False),
        ((4.0, 0.64), 1.0, -1.28, 0.0, True),  # 1.6: past 1.28
        ((4.0, 0.25), 1.0, -1.0, -1.0, False),  # tokens far off whose ratios make up for each other are not clipped
        ((0.36, 1.0), -1.0, 0.8, 0.0, True),  # 0.6: below 0.8
    ],
)
def test_gspo_clips_the_geometric_mean_of_a_samples_ratios(
    ratios: tuple[float, float], advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    """With another sample of one token before it, which must not matter."""
    new = tensor(-0.4, -0.7, -1.9).requires_grad_()
    old = new.detach() - tensor(7.0, *ratios).log()
    terms = gspo(tokens_of(new, old, tensor(1, advantage, advantage), [0, 1, 1]), AlgorithmConfig())
    terms.loss_N[1:].sum().backward()
    assert terms.loss_N.tolist() == pytest.approx([-1.28, loss, loss], abs=1e-12)
    assert new.grad is not None and new.grad.tolist() == pytest.approx([0, gradient, gradient], abs=1e-12)
    assert terms.clipped_N.tolist() == [True, clipped, clipped]


def test_the_likelihood_is_weighed_by_the_advantage_and_never_clipped() -> None:
    new = tensor(-0.7, -0.7, -2.5, -3.0).requires_grad_()
    old = new.detach() - tensor(1.0, 9.0, 0.1, 1.0).log()
    terms = likelihood(tokens_of(new, old, tensor(2, 1, -1, 0)), AlgorithmConfig())
    terms.loss_N.sum().backward()
    assert terms.loss_N.tolist() == pytest.approx([1.4, 0.7, -2.5, 0.0])
    assert new.grad is not None and new.grad.tolist() == [-2, -1, 1, 0]
    assert not terms.clipped_N.any() and not terms.ratio_N.requires_grad
    assert terms.ratio_N.tolist() == pytest.approx([1, 9, 0.1, 1])


def test_likelihood_and_ppo_have_one_gradient_on_the_first_update_of_a_step() -> None:
    advantages = tensor(1.0, -0.5, 2.0)

    def gradient(loss: PolicyLossName) -> list[float]:
        new = tensor(-0.4, -1.7, -0.1).requires_grad_()
        POLICY_LOSSES[loss](tokens_of(new, new.detach(), advantages), AlgorithmConfig()).loss_N.sum().backward()
        assert new.grad is not None
        return new.grad.tolist()

    assert gradient("likelihood") == gradient("ppo") == [-1.0, 0.5, -2.0]


def test_log_ratios_are_held_within_20_nats() -> None:
    now = torch.tensor([0.0, -300.0, -1.0], requires_grad=True)
    bounded = log_ratio(now, torch.tensor([-300.0, 0.0, -1.5]))
    bounded.sum().backward()
    assert bounded.tolist() == [20.0, -20.0, 0.5]
    assert now.grad is not None and now.grad.tolist() == [0.0, 0.0, 1.0]
    for loss in POLICY_LOSSES.values():
        far = loss(tokens_of(now, now.detach() - 500, -torch.ones(3)), AlgorithmConfig())
        assert far.loss_N.isfinite().all() and far.ratio_N.tolist() == pytest.approx([math.exp(20)] * 3)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # The policy gives the token twice the reference's probability.
        ("k1", 0.6931471806, 1.0),
        ("k2", 0.2402265070, 0.6931471806),  # ln 2 squared / 2; ln 2
        ("k3", 0.1931471806, 0.5),  # 1/2 - 1 + ln 2; 1 - 1/2
    ],
)
def test_reference_kl_is_the_value_worked_out_by_hand(
    estimator: KLEstimatorName, value: float, gradient: float
) -> None:
    policy = tensor(-0.5).requires_grad_()
    kl = reference_kl(policy, policy.detach() - math.log(2), estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, rel=1e-9)
    assert policy.grad is not None and policy.grad.item() == pytest.approx(gradient, rel=1e-9)


def test_which_estimates_are_unbiased_in_value_and_which_in_gradient() -> None:
    """Exact means over a policy of three tokens, by the logits of the policy."""
    logits = tensor(0.3, -0.2, 0.5).requires_grad_()
    reference = tensor(0.5, 0.3, 0.2).log()
    policy = logits.log_softmax(-1)
    probs = policy.detach().exp()
    forward = (policy.exp() * (policy - reference)).sum()  # KL(policy || reference)
    backward = (reference.exp() * (reference - policy)).sum()

    def slope(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    means = {name: (probs * reference_kl(policy, reference, name)).sum() for name in ("k1", "k2", "k3")}
    assert means["k1"].item() == pytest.approx(forward.item(), rel=1e-12)
    assert means["k3"].item() == pytest.approx(forward.item(), rel=1e-12)
    assert means["k2"].item() != pytest.approx(forward.item(), rel=1e-3)
    torch.testing.assert_close(slope(means["k1"]), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(slope(means["k2"]), slope(forward))
    torch.testing.assert_close(slope(means["k3"]), slope(backward))


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


def entropy(logprobs_NV: Tensor) -> Tensor:
    return _summary(logprobs_NV, torch.zeros(len(logprobs_NV), dtype=torch.int64))[1]


@given(seed=st.integers(0, 1000), suppressed=st.sets(st.integers(0, 9), max_size=8))
def test_entropy_is_that_of_the_distribution_without_its_impossible_entries(seed: int, suppressed: set[int]) -> None:
    logits = 3 * torch.randn(4, 10, generator=torch.Generator().manual_seed(seed))
    masked = logits.index_fill(-1, torch.tensor(sorted(suppressed), dtype=torch.int64), -math.inf)
    kept = [place for place in range(10) if place not in suppressed]
    expected = torch.distributions.Categorical(logits=logits[:, kept]).entropy()
    torch.testing.assert_close(entropy(masked.log_softmax(-1)), expected)


def test_entropy_of_a_uniform_and_of_a_certain_choice() -> None:
    assert entropy(torch.full((1, 8), 1 / 8).log()).item() == pytest.approx(math.log(8))
    assert entropy(torch.tensor([[0.0, -math.inf, -math.inf]])).item() == 0.0


def test_the_gradient_by_the_logits_equals_its_finite_difference() -> None:
    """Through temperature and suppressed ids, on both sides of the clip."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(6, 7, dtype=torch.float64, generator=generator).requires_grad_()
    targets_N = torch.tensor([0, 1, 2, 3, 4, 0])
    advantages_N = tensor(1.0, -0.5, 2.0, -1.5, 0.7, 0.0)

    def logprobs(logits: Tensor) -> Tensor:
        masked = (logits / 0.7).index_fill(-1, torch.tensor([5, 6]), -math.inf)
        return masked.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]

    ratios = tensor(1.1, 0.6, 1.6, 1.4, 0.95, 2.0)  # free, clipped below, clipped above, free, free, no advantage
    old_N = logprobs(logits_NV).detach() - ratios.log()

    def terms(logits: Tensor) -> PolicyTerms:
        return ppo(tokens_of(logprobs(logits), old_N, advantages_N), AlgorithmConfig())

    def likelihoods(logits: Tensor) -> Tensor:
        return likelihood(tokens_of(logprobs(logits), old_N, advantages_N), AlgorithmConfig()).loss_N

    assert terms(logits_NV).clipped_N.tolist() == [False, True, True, False, False, False]
    assert torch.autograd.gradcheck(lambda logits: terms(logits).loss_N, logits_NV)
    assert torch.autograd.gradcheck(likelihoods, logits_NV)
