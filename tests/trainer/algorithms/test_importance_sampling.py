"""Claims about the weights of rollout tokens, held against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from envs.config.plugins import give
from envs.errors import UserError
from trainer.algorithms.importance_sampling import CORRECTIONS, find_correction
from trainer.algorithms.policy_loss import PolicyTerms, find_policy_loss
from trainer.config.algorithm import AlgorithmConfig
from trainer.types import ModelTokens

INF, NAN = math.inf, math.nan
SAMPLE_N = (0, 0, 1, 1, 1)


def correct(
    name: str, gaps: list[float], settings: dict[str, float] | None = None, sample_N: Sequence[int] = SAMPLE_N
) -> tuple[Tensor, Tensor]:
    """Return weights and clipped tokens for gaps of trainer less engine log-prob."""
    config = AlgorithmConfig.model_validate({"correction": name, **(settings or {})})
    rollout_N = torch.full((len(gaps),), -1.5, dtype=torch.float64)
    samples = torch.tensor(sample_N, dtype=torch.int64)
    old_N = rollout_N + torch.tensor(gaps, dtype=torch.float64)
    nothing, num_samples = torch.zeros_like(old_N), int(samples.max()) + 1 if sample_N else 0
    tokens = ModelTokens(nothing, nothing, old_N, rollout_N, None, nothing, nothing, samples, num_samples)
    return CORRECTIONS[config.correction](tokens, config)


@pytest.mark.parametrize(
    ("name", "settings", "weights", "clipped"),
    [
        ("none", {}, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("tis", {}, [1, 2, 0.25, 1, 1.6], [0, 1, 0, 0, 0]),
        ("tis", {"correction_cap": 0.5}, [0.5, 0.5, 0.25, 0.5, 0.5], [1, 1, 0, 1, 1]),
        ("icepop", {}, [1, 3, 0, 1, 1.6], [0, 0, 1, 0, 0]),
        ("icepop", {"correction_low": 0.2, "correction_high": 1.5}, [1, 0, 0.25, 1, 0], [0, 1, 0, 0, 1]),
        ("mis", {}, [3, 3, 0, 0, 0], [0, 0, 1, 1, 1]),  # 1 * 3 and 0.25 * 1 * 1.6 = 0.4, below 0.5
        ("mis", {"correction_low": 0.0, "correction_high": 2.0}, [0, 0, 0.4, 0.4, 0.4], [1, 1, 0, 0, 0]),
    ],
)
def test_weights_are_those_worked_out_by_hand(
    name: str, settings: dict[str, float], weights: list[float], clipped: list[int]
) -> None:
    weight_N, clipped_N = correct(name, [math.log(r) for r in (1, 3, 0.25, 1, 1.6)], settings)
    assert weight_N.tolist() == pytest.approx(weights, rel=1e-12)
    assert clipped_N.int().tolist() == clipped


@pytest.mark.parametrize(
    ("name", "weights", "clipped"),
    [
        ("tis", [2, 1, 0, 0, 1], [1, 0, 1, 0, 0]),
        ("icepop", [0, 1, 0, 0, 1], [1, 0, 1, 1, 0]),
        ("mis", [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]),
    ],
)
def test_gaps_that_are_no_numbers_or_infinite_give_weights_that_are_numbers(
    name: str, weights: list[float], clipped: list[int]
) -> None:
    weight_N, clipped_N = correct(name, [INF, 0.0, NAN, -INF, 0.0])
    assert weight_N.tolist() == weights
    assert clipped_N.int().tolist() == clipped


@pytest.mark.parametrize("name", ["icepop", "mis"])
@pytest.mark.parametrize("bounds", [(0.5, 1.0), (1.0, 5.0)])
def test_a_ratio_at_a_bound_is_kept(name: str, bounds: tuple[float, float]) -> None:
    weight_N, clipped_N = correct(name, [0.0] * 5, {"correction_low": bounds[0], "correction_high": bounds[1]})
    assert (weight_N.tolist(), clipped_N.tolist()) == ([1.0] * 5, [False] * 5)


def test_a_ratio_at_the_cap_is_not_clipped() -> None:
    weight_N, clipped_N = correct("tis", [0.0] * 5, {"correction_cap": 1.0})
    assert (weight_N.tolist(), clipped_N.tolist()) == ([1.0] * 5, [False] * 5)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_clipped_tokens_are_told_as_booleans(name: str) -> None:
    assert correct(name, [0.0] * 5)[1].dtype == torch.bool


def test_one_unscored_token_takes_its_own_sample_out_and_no_other() -> None:
    assert correct("mis", [0.0, 0.0, NAN, 0.0, 0.0])[0].tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_no_tokens_give_no_weights(name: str) -> None:
    weight_N, clipped_N = correct(name, [], sample_N=())
    assert weight_N.shape == clipped_N.shape == (0,)


@given(
    name=st.sampled_from(sorted(CORRECTIONS)),
    gaps=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=5, max_size=5),
)
def test_weights_are_numbers_within_the_bounds_whatever_the_gaps(name: str, gaps: list[float]) -> None:
    weight_N, clipped_N = correct(name, gaps)
    most = {"none": 1.0, "tis": 2.0, "icepop": 5.0, "mis": 5.0}[name]
    assert ((weight_N >= 0) & (weight_N <= most)).all()
    if name in ("icepop", "mis"):
        assert ((weight_N == 0) == clipped_N).all()


def tokens_of(count: int) -> ModelTokens:
    """Tokens of one sample, whose log-probs have a gradient."""
    logprobs_N = torch.full((count,), -1.0, requires_grad=True)
    rest_N = torch.full((count,), -2.0)
    samples_N = torch.zeros(count, dtype=torch.int64)
    return ModelTokens(logprobs_N, rest_N, rest_N, rest_N, None, rest_N, rest_N, samples_N, 1)


def test_the_weights_of_a_users_correction_are_constants() -> None:
    def ratio(tokens: ModelTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
        weight_N = (tokens.logprobs_N - tokens.rollout_logprobs_N).exp()
        return weight_N, weight_N > config.correction_cap

    weight_N, clipped_N = find_correction(give(ratio))(tokens_of(2), AlgorithmConfig())
    assert weight_N.tolist() == pytest.approx([math.e] * 2) and clipped_N.tolist() == [True, True]
    assert not weight_N.requires_grad


@pytest.mark.parametrize("clipped", [torch.zeros(1), torch.zeros(2, 1), torch.zeros(()), False])
def test_what_a_users_algorithm_clipped_has_a_value_for_each_token(clipped: object) -> None:
    def correction(tokens: ModelTokens, _: AlgorithmConfig) -> tuple[Tensor, object]:
        return torch.ones_like(tokens.logprobs_N), clipped

    def loss(tokens: ModelTokens, _: AlgorithmConfig) -> PolicyTerms:
        return PolicyTerms(-tokens.logprobs_N, clipped, tokens.logprobs_N.exp())  # type: ignore[arg-type]

    for find, own in ((find_correction, correction), (find_policy_loss, loss)):
        with pytest.raises(UserError, match="2 tokens need a tensor of that shape"):
            find(give(own))(tokens_of(2), AlgorithmConfig())
