"""Claims about intervals and tests: values worked out by hand or by brute force, and coverage on simulated data."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.evaluation.statistics import (
    Intervals,
    bootstrap,
    estimate_mean,
    estimate_pass,
    pass_at_k,
    wilson,
)

QUICK = Intervals(resamples=1000)


def test_wilson_by_hand() -> None:
    # n = 10, z = 1.959964, z^2 = 3.841459. For 0 right: 0 to z^2 / (n + z^2) = 0.277533.
    assert wilson(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    # For 3 right: (0.3 + 0.192073 -+ 1.959964 sqrt(0.021 + 0.00960365)) / 1.3841459.
    assert wilson(3, 10) == pytest.approx((0.107789, 0.603222), abs=1e-5)
    low, high = wilson(10, 10)
    assert (low, high) == (pytest.approx(1 - 0.277533, abs=1e-6), 1.0)


def test_wilson_is_where_the_score_test_is_on_the_edge() -> None:
    """The bounds are the shares p0 at which |p - p0| = z sqrt(p0 (1 - p0) / n), which defines the interval."""
    for right, num, confidence, z in [(1, 7, 0.9, 1.644854), (40, 400, 0.95, 1.959964), (399, 400, 0.99, 2.575829)]:
        for bound in wilson(right, num, confidence):
            assert abs(right / num - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / num), rel=1e-5)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(case: tuple[int, int, int]) -> None:
    num, right, k = case
    subsets = list(itertools.combinations([True] * right + [False] * (num - right), k))
    assert pass_at_k(num, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_the_product_form_of_its_paper_at_any_size(num: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    product = math.prod(1 - k / i for i in range(num - right + 1, num + 1)) if num - right >= k else 0.0
    assert pass_at_k(num, right, k) == pytest.approx(1 - product, abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of 5 samples of chance 0.3, its mean is 1 - 0.7^k; that of 1 - (1 - c/n)^k is not."""
    chances = [math.comb(5, c) * 0.3**c * 0.7 ** (5 - c) for c in range(6)]
    for k in (1, 2, 3, 5):
        assert sum(p * pass_at_k(5, c, k) for c, p in enumerate(chances)) == pytest.approx(1 - 0.7**k)
    assert sum(p * (1 - (1 - c / 5) ** 2) for c, p in enumerate(chances)) != pytest.approx(1 - 0.7**2, abs=0.01)


def test_the_bootstrap_draws_whole_problems() -> None:
    """Four samples that always agree say as much as one: the interval is that of 100 problems, not of 400 samples."""
    shares = [1.0] * 30 + [0.0] * 70
    low, high = bootstrap(shares, Intervals())
    spread = 1.96 * math.sqrt(0.3 * 0.7 / 100)
    assert (low, high) == pytest.approx((0.3 - spread, 0.3 + spread), abs=0.015)
    assert estimate_pass([4] * 30 + [0] * 70, 4, 1, Intervals()).low == pytest.approx(low)


def test_the_bootstrap_repeats_and_its_seed_matters() -> None:
    values = np.random.default_rng(0).random(50)
    assert bootstrap(values, QUICK) == bootstrap(values, QUICK)
    assert bootstrap(values, QUICK) != bootstrap(values, Intervals(resamples=1000, seed=1))


def test_the_bootstrap_does_not_depend_on_what_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random(40)
    whole = bootstrap(values, QUICK)
    monkeypatch.setattr("trainer.evaluation.statistics.MAX_DRAWS", 7 * 40)
    assert bootstrap(values, QUICK) == pytest.approx(whole, abs=1e-12)


def test_the_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    """80 problems whose chances differ, 4 samples each: of 300 such evaluations, 95 % of intervals hold the mean."""
    rng, num_held = np.random.default_rng(0), 0
    for _ in range(300):
        chances = rng.beta(0.5, 1.5, 80)  # mean 0.25
        estimate = estimate_pass(rng.binomial(4, chances).tolist(), 4, 1, Intervals(resamples=400))
        num_held += estimate.low <= 0.25 <= estimate.high
    assert 0.91 <= num_held / 300 <= 0.98


def test_a_figure_that_is_the_same_in_every_problem_is_not_certain() -> None:
    none = estimate_pass([0] * 20, 4, 1, QUICK)
    assert (none.value, none.low, none.high, none.method) == (0.0, 0.0, wilson(0, 20)[1], "constant")
    every = estimate_pass([4] * 20, 4, 1, QUICK)
    assert (every.low, every.high) == pytest.approx(wilson(20, 20))
    equal = estimate_mean([0.0] * 20, QUICK, bounds=(-1.0, 1.0))
    assert (equal.low, equal.high) == pytest.approx((-none.high, none.high))


def test_a_weighted_mean_is_that_of_all_episodes() -> None:
    estimate = estimate_mean([1.0, 0.0, 0.5], QUICK, weights_P=[3, 1, 0])
    assert (estimate.value, estimate.num_problems) == (0.75, 2)
    assert estimate.low == 0.0 and estimate.high == 1.0


def test_resamples_without_any_weight_are_left_out() -> None:
    estimate = estimate_mean([1.0, 0.0, 9.0, 9.0], QUICK, weights_P=[1, 1, 0, 0])
    assert np.isfinite([estimate.low, estimate.high]).all()


def test_a_share_of_single_samples_has_wilsons_interval() -> None:
    estimate = estimate_pass([1] * 96 + [0] * 160, 1, 1, QUICK)
    assert (estimate.method, str(estimate)) == ("wilson", "0.375 [0.318, 0.436]")


def test_pass_at_1_is_accuracy() -> None:
    counts = [0, 1, 2, 4, 4]
    assert estimate_pass(counts, 4, 1, QUICK) == estimate_mean([count / 4 for count in counts], QUICK)
    assert estimate_pass(counts, 4, 4, QUICK).value == 0.8
