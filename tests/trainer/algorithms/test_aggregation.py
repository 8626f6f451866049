"""Claims about the weights of tokens, held against values worked out by hand and against means taken step by step."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.aggregation import AGGREGATIONS, token_weights
from trainer.config.algorithm import AggregationName


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [0.1, 0.1, 0.1]),  # 1 / (2 + 3 + 5)
        ("seq-mean-token-mean", [1 / 6, 1 / 9, 1 / 15]),  # 1 / (3 * 2), 1 / (3 * 3), 1 / (3 * 5)
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("constant", [1 / 24, 1 / 24, 1 / 24]),  # 1 / (3 * 8)
    ],
)
def test_weights_are_those_worked_out_by_hand(mode: AggregationName, weights: list[float]) -> None:
    assert token_weights([2, 3, 5], mode, 8).tolist() == pytest.approx(weights, rel=1e-14)


@pytest.mark.parametrize("mode", get_args(AggregationName))
def test_samples_without_tokens_weigh_nothing_and_are_not_counted(mode: AggregationName) -> None:
    weights = token_weights([0, 2, 0, 3, 5], mode, 8)
    assert weights[[0, 2]].tolist() == [0, 0]
    assert weights[[1, 3, 4]].tolist() == token_weights([2, 3, 5], mode, 8).tolist()


@pytest.mark.parametrize("mode", get_args(AggregationName))
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_a_step_without_tokens_has_weights_of_zero(mode: AggregationName, lengths: list[int]) -> None:
    assert token_weights(lengths, mode, 8).tolist() == [0.0] * len(lengths)


@pytest.mark.parametrize("constant", [0, -1])
def test_a_constant_that_cannot_be_divided_by_is_refused(constant: int) -> None:
    with pytest.raises(ValueError, match=f"positive number of tokens, got {constant}"):
        token_weights([1], "constant", constant)


def test_the_smallest_constant_is_one() -> None:
    assert token_weights([2, 3], "constant", 1).tolist() == [0.5, 0.5]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=10), seed=st.integers(0, 1000))
def test_the_weighted_sum_is_the_mean_that_the_mode_names(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    losses = [random.normal(size=length) for length in lengths]
    means: dict[AggregationName, float] = {
        "token-mean": float(np.concatenate(losses).mean()),
        "seq-mean-token-mean": float(np.mean([loss.mean() for loss in losses])),
        "seq-mean-token-sum": float(np.mean([loss.sum() for loss in losses])),
        "constant": float(np.mean([loss.sum() / 7 for loss in losses])),
    }
    assert means.keys() == AGGREGATIONS.keys()
    for mode, mean in means.items():
        weighted = sum(w * loss.sum() for w, loss in zip(token_weights(lengths, mode, 7), losses, strict=True))
        assert weighted == pytest.approx(mean, rel=1e-9, abs=1e-12), mode
