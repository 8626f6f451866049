"""Claims about the gap between rollout and trainer: hand-computed figures, and sums that do not depend on the split."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.learner.logprob_stats import LogprobStats, LogprobSums

pairs = st.lists(
    st.tuples(st.floats(-20, 0), st.floats(-3, 3), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=60
)


def counted(rows: list[tuple[float, float, int]], num_turns: int) -> LogprobSums:
    """Count tokens given as (trainer log-prob, d, turn)."""
    gaps = LogprobSums(num_turns, "cpu")
    trainer = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    difference = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    gaps.add(trainer, trainer - difference, torch.tensor([row[2] for row in rows], dtype=torch.long))
    return gaps


def alone(gaps: LogprobSums) -> LogprobStats:
    return gaps.stats(gaps.sums, gaps.largest)


def test_figures_of_four_tokens_in_two_turns() -> None:
    stats = alone(counted([(-1.0, 0.0, 1), (-1.0, 0.2, 1), (-2.0, -0.5, 2), (-2.0, 0.1, 2)], num_turns=3))
    k3 = [math.exp(d) - 1 - d for d in (0.0, 0.2, -0.5, 0.1)]
    assert stats.num_tokens == 4
    assert stats.kl == pytest.approx(sum(k3) / 4)
    assert stats.kl_by_turn == pytest.approx((sum(k3[:2]) / 2, sum(k3[2:]) / 2, 0.0))
    assert (stats.mean, stats.max) == pytest.approx((0.2, 0.5))
    assert stats.mult_prob_error == pytest.approx((1 + math.exp(0.2) + math.exp(0.5) + math.exp(0.1)) / 4)


def test_no_tokens_have_no_gap() -> None:
    assert alone(counted([], num_turns=1)) == LogprobStats(0, 0.0, (0.0,), 0.0, 0.0, 0.0, 1.0)


@given(rows=pairs)
def test_ranks_add_up_to_what_one_rank_would_have_seen(rows: list[tuple[float, float, int, int]]) -> None:
    tokens = [row[:3] for row in rows]
    ranks = [counted([row[:3] for row in rows if row[3] == rank], num_turns=4) for rank in range(3)]
    sums = [sum(column) for column in zip(*(gaps.sums for gaps in ranks), strict=True)]
    together, whole = ranks[0].stats(sums, max(gaps.largest for gaps in ranks)), alone(counted(tokens, num_turns=4))
    assert together.kl_by_turn == pytest.approx(whole.kl_by_turn, abs=1e-12)
    assert (together.num_tokens, together.p99, together.max) == (whole.num_tokens, whole.p99, whole.max)
    assert (together.kl, together.mean) == pytest.approx((whole.kl, whole.mean), abs=1e-12)
    assert together.mult_prob_error == pytest.approx(whole.mult_prob_error)


@pytest.mark.parametrize("spread", [1e-6, 0.01, 1.0])
def test_p99_is_at_most_a_bin_above_the_true_one(spread: float) -> None:
    rng = np.random.default_rng(0)
    gaps = rng.normal(0, spread, 5000)
    p99 = alone(counted([(-1.0, float(d), 1) for d in gaps], num_turns=1)).p99
    exact = float(np.sort(np.abs(gaps))[math.ceil(0.99 * 5000) - 1])
    assert exact * (1 - 1e-9) <= p99 <= exact * 10**0.01 * (1 + 1e-9)


def test_a_gap_that_is_not_a_number_is_counted_and_shows() -> None:
    stats = alone(counted([(-1.0, 0.0, 1), (float("nan"), 0.0, 1)], num_turns=1))
    assert stats.num_tokens == 2 and math.isnan(stats.kl)
