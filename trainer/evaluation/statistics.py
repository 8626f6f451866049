"""Confidence intervals and tests for means over problems, as pure functions.

The unit is the problem, because several samples of one problem are not independent: if one is right, others probably
are too. So resampling (the bootstrap) draws whole problems.

Legend: P problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: The most draws in memory at once.
MAX_DRAWS = 4_000_000


@dataclass(frozen=True)
class Intervals:
    """How to make intervals: the share that should contain the true value, and the bootstrap's resamples and seed.

    `reward_bounds` are the least and the greatest reward, infinite where they are unknown.
    """

    confidence: float = 0.95
    resamples: int = 10_000
    seed: int = 0
    reward_bounds: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and the interval around it.

    `method` says how the interval was made; "constant" means that the value is the same in every problem.

    Example: 96 of 256 problems right are `Estimate(0.375, 0.318, 0.436, 256, "wilson")`.
    """

    value: float
    low: float
    high: float
    num_problems: int
    method: Literal["wilson", "bootstrap", "constant"]

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(num_right: int, num: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the score interval of a share of independent trials (Wilson, JASA 22 (1927), 209-212).

    With the observed share p and the normal quantile z: `(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`.

    >>> [round(bound, 4) for bound in wilson(0, 10)]
    [0.0, 0.2775]
    """
    # Both tails: the middle share is inside.
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = num_right / num
    middle = p + z**2 / (2 * num)
    reach = z * math.sqrt(p * (1 - p) / num + z**2 / (4 * num**2))
    low, high = ((middle + side * reach) / (1 + z**2 / num) for side in (-1, 1))
    return (low if num_right else 0.0), (high if num_right < num else 1.0)  # exact without rounding errors


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Return the probability that k of `num` samples, drawn without replacement, contain a right one.

    It is an unbiased estimate of that probability for k new samples: `1 - C(n-c, k) / C(n, k)` (arXiv 2107.03374,
    eq. 1).

    >>> pass_at_k(num=4, num_right=1, k=2)
    0.5
    """
    # Whole numbers until the division, so that large samples lose nothing.
    ways = math.comb(num, k)
    return (ways - math.comb(num - num_right, k)) / ways


def bootstrap(values_P: ArrayLike, how: Intervals, weights_P: ArrayLike = 1.0) -> tuple[float, float]:
    """Return the percentile interval of a mean, or weighted mean, over problems.

    Each resample draws all P problems with replacement; the interval lies between quantiles of the resamples' means
    (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3).
    """
    values = np.asarray(values_P, dtype=np.float64)
    weights = np.full_like(values, weights_P)
    # Seeded anew for each figure: one figure more must not change the others.
    rng = np.random.default_rng(how.seed)
    num = len(values)
    # In chunks: all resamples of a large set at once would take gigabytes.
    at_once = max(1, MAX_DRAWS // num)
    means = [
        _means(values * weights, weights, rng.integers(num, size=(min(at_once, how.resamples - start), num)))
        for start in range(0, how.resamples, at_once)
    ]
    tail = (1 - how.confidence) / 2
    # A resample may miss every problem of weight above 0.
    low, high = np.nanquantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _means(sums_P: NDArray[np.float64], weights_P: NDArray[np.float64], drawn: NDArray[np.int64]) -> NDArray:
    """Return the mean of every resample; NaN if all its problems have weight 0."""
    totals = weights_P[drawn].sum(axis=1)
    return np.divide(sums_P[drawn].sum(axis=1), totals, out=np.full_like(totals, np.nan), where=totals > 0)


def estimate_mean(
    values_P: Sequence[float],
    how: Intervals,
    bounds: tuple[float, float] = (0.0, 1.0),
    weights_P: ArrayLike = 1.0,
) -> Estimate:
    """Return a mean over problems, weighted if weights are given, with its bootstrap interval.

    If all values equal v, all resamples do too, and the bootstrap would give an interval of width 0. Then the interval
    is `v + u (low - v)` to `v + u (high - v)`: at most a share `u` of all problems has another value, within `bounds`,
    where `u` is the upper Wilson bound of 0 in P. For shares of 0 or 1, this is Wilson's interval over problems.
    """
    values = np.asarray(values_P, dtype=np.float64)
    weights = np.full_like(values, weights_P)
    # What has weight 0 adds nothing to any mean, whatever its value.
    seen = values[weights > 0].tolist()
    assert seen, f"a mean needs a value, got {len(values)} of weight 0"
    if min(seen) == max(seen):
        value = seen[0]
        # The bound for something that was never seen in so many problems.
        most = wilson(0, len(seen), how.confidence)[1]
        low, high = (value + most * (bound - value) for bound in bounds)
        return Estimate(value, low, high, len(seen), "constant")
    value = float(np.average(values, weights=weights))
    return Estimate(value, *bootstrap(values, how, weights), len(seen), "bootstrap")


def estimate_pass(num_right_P: Sequence[int], num_samples: int, k: int, how: Intervals) -> Estimate:
    """Return the mean over problems of `pass_at_k`: Wilson's interval for one sample, else bootstrap."""
    if num_samples == 1:
        num_right = sum(num_right_P)
        num = len(num_right_P)
        return Estimate(num_right / num, *wilson(num_right, num, how.confidence), num, "wilson")
    return estimate_mean([pass_at_k(num_samples, right, k) for right in num_right_P], how)
