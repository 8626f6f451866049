"""Claims about the objective, held against values worked out by hand and finite differences."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from envs.config.cli import leaves
from tests.paths import DOCS
from tests.trainer.algorithms.algorithm_cases import CASES, Case, hand_tokens
from trainer.algorithms.advantages import ADVANTAGES, TURN_ADVANTAGES
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.algorithms.importance_sampling import CORRECTIONS
from trainer.algorithms.objective import objective
from trainer.algorithms.policy_loss import POLICY_LOSSES
from trainer.config.algorithm import AdvantageName, AggregationName, AlgorithmConfig, CorrectionName, PolicyLossName
from trainer.config.run import RunConfig
from trainer.types import ModelTokens

CONFIGS = {case.name: case.config for case in CASES} | {
    "all at once": AlgorithmConfig(dual_clip=2, kl_coef=0.3, entropy_coef=0.2, kl_estimator="k2"),
    "gspo, mis, dual clip": AlgorithmConfig(policy_loss="gspo", correction="mis", dual_clip=1.5, correction_low=0.01),
}


def random_tokens(seed: int, lengths: tuple[int, ...]) -> ModelTokens:
    """Random tokens, weighted equally within each sample; log-probs and entropies are leaves."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)

    def noise(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    sample_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    now, old = -noise().abs(), noise(0.5)
    return ModelTokens(
        logprobs_N=now.clone().requires_grad_(),
        entropy_N=noise().abs().requires_grad_(),
        old_logprobs_N=now + old,
        rollout_logprobs_N=now + old + noise(0.5),
        ref_logprobs_N=now + noise(0.5),
        advantages_N=torch.randn(len(lengths), generator=generator, dtype=torch.float64)[sample_N],
        weights_N=torch.rand(len(lengths), generator=generator, dtype=torch.float64)[sample_N],
        sample_N=sample_N,
        num_samples=len(lengths),
    )


def of_sample(tokens: ModelTokens, number: int) -> ModelTokens:
    """Return one sample's tokens alone."""
    kept = tokens.sample_N == number
    parts = {f.name: getattr(tokens, f.name)[kept] for f in fields(tokens) if f.name.endswith("_N")}
    return ModelTokens(**parts | {"sample_N": parts["sample_N"] - number}, num_samples=1)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True, materialize_grads=True)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradient_are_those_worked_out_by_hand(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    tokens = hand_tokens(case.config, dtype)
    loss = objective(tokens, case.config).loss
    assert loss.item() == pytest.approx(case.loss, rel=tolerance, abs=tolerance)
    assert gradient(loss, tokens.logprobs_N).tolist() == pytest.approx(case.gradient, rel=tolerance, abs=tolerance)


def test_the_entropy_bonus_pulls_each_entropy_up_by_its_weight() -> None:
    config = AlgorithmConfig(entropy_coef=0.1)
    tokens = hand_tokens(config)
    # 0.1 / 5 tokens
    assert gradient(objective(tokens, config).loss, tokens.entropy_N).tolist() == pytest.approx([-0.02] * 5)


@pytest.mark.parametrize(
    ("config", "sums"),
    [
        # Clipped: tokens 0 and 4. Ratios 1.5 + 0.5 + 1 + 4 + 0.25. Weights 1 + 2 + 0.25 + 1 + 1.6, one of them cut.
        (AlgorithmConfig(), (2, 7.25, 5.85, 1)),
        (AlgorithmConfig(correction="none", dual_clip=3), (3, 7.25, 5, 0)),
        (AlgorithmConfig(correction="icepop"), (2, 7.25, 6.6, 1)),  # 1 + 3 + 0 + 1 + 1.6
        (AlgorithmConfig(correction="mis"), (2, 7.25, 6, 3)),  # 3 + 3
        (AlgorithmConfig(policy_loss="gspo", correction="none"), (0, 3**0.5 + 3, 5, 0)),
    ],
)
def test_the_sums_are_those_counted_by_hand(config: AlgorithmConfig, sums: tuple[float, ...]) -> None:
    got = objective(hand_tokens(config), config).sums
    names = ("clip_frac", "ratio_mean", "correction_mean", "correction_clipped_frac")
    assert tuple(got[name].item() for name in names) == pytest.approx(sums)
    assert got["ref_kl"].item() == pytest.approx(1.1362943611)  # 2 ln 2 - 0.25
    assert all(value.dtype == torch.float64 and not value.requires_grad for value in got.values())


def test_a_reference_is_measured_without_a_coefficient_and_not_missed_without_one() -> None:
    config = AlgorithmConfig()
    tokens = hand_tokens(config)
    alone = objective(replace(tokens, ref_logprobs_N=None), config)
    assert "ref_kl" not in alone.sums
    assert objective(tokens, config).loss.item() == alone.loss.item()
    with pytest.raises(AssertionError, match=r"kl_coef 0\.1 without a reference"):
        objective(replace(tokens, ref_logprobs_N=None), AlgorithmConfig(kl_coef=0.1))


# GSPO's derivative by a token's log-prob is the sample's ratio, and the finite difference is the ratio over the length,
# summed over the sample's equally weighted tokens: the same number.
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_equals_its_finite_difference(config: AlgorithmConfig, seed: int) -> None:
    tokens = random_tokens(seed, (3, 1, 4))

    def loss(logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
        return objective(replace(tokens, logprobs_N=logprobs_N, entropy_N=entropy_N), config).loss

    assert torch.autograd.gradcheck(loss, (tokens.logprobs_N, tokens.entropy_N))


@given(
    name=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple),
)
def test_losses_gradients_and_sums_of_single_samples_add_up_to_those_of_all(
    name: str, seed: int, lengths: tuple[int, ...]
) -> None:
    config, tokens = CONFIGS[name], random_tokens(seed, lengths)
    whole = objective(tokens, config)
    parts = [objective(of_sample(tokens, number), config) for number in range(len(lengths))]
    loss = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(loss, whole.loss)
    for leaf in (tokens.logprobs_N, tokens.entropy_N):
        torch.testing.assert_close(gradient(loss, leaf), gradient(whole.loss, leaf))
    for key, value in whole.sums.items():
        torch.testing.assert_close(torch.stack([part.sums[key] for part in parts]).sum(), value)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("num_samples", [0, 2])
def test_no_tokens_give_a_loss_of_zero_that_can_be_differentiated(config: AlgorithmConfig, num_samples: int) -> None:
    tokens = replace(random_tokens(0, (0,)), num_samples=num_samples)
    result = objective(tokens, config)
    result.loss.backward()
    assert result.loss.item() == 0
    assert tokens.logprobs_N.grad is not None and tokens.logprobs_N.grad.shape == (0,)
    assert all(value.item() == 0 for value in result.sums.values())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_only_the_present_network_gets_a_gradient(config: AlgorithmConfig) -> None:
    tokens = random_tokens(0, (2, 3))
    assert tokens.ref_logprobs_N is not None
    others = [tokens.old_logprobs_N, tokens.rollout_logprobs_N, tokens.ref_logprobs_N]
    for other in others:
        other.requires_grad_()
    objective(tokens, config).loss.backward()
    assert [other.grad for other in others] == [None] * 3


def test_present_log_probs_as_the_old_ones_are_the_first_update() -> None:
    config = AlgorithmConfig(correction="none")
    tokens = hand_tokens(config)
    loss = objective(replace(tokens, old_logprobs_N=tokens.logprobs_N), config).loss
    # All ratios 1: the derivative is -A / 5.
    assert gradient(loss, tokens.logprobs_N).tolist() == pytest.approx([-0.2, -0.2, 0.4, 0.4, 0.4])


def test_a_coefficient_of_zero_keeps_what_is_not_a_number_out() -> None:
    config = AlgorithmConfig(correction="none")
    tokens = hand_tokens(config)
    broken = torch.full((5,), torch.nan, dtype=torch.float64, requires_grad=True)
    loss = objective(replace(tokens, entropy_N=broken, ref_logprobs_N=broken.detach()), config).loss
    assert loss.item() == pytest.approx(9.82 / 5)
    assert gradient(loss, tokens.logprobs_N).isfinite().all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_log_probs_that_are_far_apart_give_finite_losses_and_gradients_in_float32(config: AlgorithmConfig) -> None:
    tokens = hand_tokens(config, torch.float32)
    apart = torch.tensor([200.0, -200.0, 200.0, -200.0, 90.0])
    now = tokens.logprobs_N
    tokens = replace(
        tokens,
        old_logprobs_N=now.detach() + apart,
        rollout_logprobs_N=now.detach() - apart,
        ref_logprobs_N=now.detach() + apart,
    )
    loss = objective(tokens, config).loss
    assert loss.isfinite() and gradient(loss, now).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"dual_clip": 1.0}, "must be above 1, or 0 for none"),
        ({"dual_clip": 0.5}, "must be above 1, or 0 for none"),
        ({"loss_constant": 64}, "needs --aggregation constant"),
        ({"correction_low": 2.0, "correction_high": 2.0}, "must be above correction_low 2"),
        ({"correction_low": 6.0}, "must be above correction_low 6"),
        ({"policy_loss": "ppg"}, "'ppo', 'gspo' or 'likelihood'"),
        ({"clip_high": math.inf}, "finite number"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        AlgorithmConfig(**settings)


def test_every_name_that_a_flag_takes_has_its_function_and_no_other() -> None:
    assert set(get_args(AdvantageName)) == ADVANTAGES.keys() | TURN_ADVANTAGES.keys()
    assert set(get_args(PolicyLossName)) == POLICY_LOSSES.keys()
    assert set(get_args(AggregationName)) == AGGREGATIONS.keys()
    assert set(get_args(CorrectionName)) == CORRECTIONS.keys()


def test_every_flag_and_name_of_the_page_on_algorithms_is_one_of_the_command_and_the_other_way_round() -> None:
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z0-9-]+", page))
    fields = {path[-1]: path for path, _ in leaves(RunConfig)}
    known = {"--" + name.replace("_", "-") for name in fields}
    assert {flag.replace("--no-", "--") for flag in named} <= known
    for name, path in fields.items():
        if path[0] == "algorithm":
            assert name in page or name.replace("_", "-") in page, name
    for mapping in (ADVANTAGES, TURN_ADVANTAGES, POLICY_LOSSES, AGGREGATIONS, CORRECTIONS):
        assert all(f"`{name}`" in page for name in mapping)


def test_a_network_that_is_broken_shows_in_the_loss() -> None:
    config = AlgorithmConfig()
    broken = torch.tensor([-1.0, torch.nan, -1.0, -1.0, -1.0], dtype=torch.float64)
    assert objective(hand_tokens(config, logprobs_N=broken), config).loss.isnan()
