"""How sure figures over problems are: pure functions of numbers, the same for the same arguments.

Legend of the shape suffixes: P problems.

What is counted are problems, for several samples of one problem are not independent: knowing that one is right says
much about the others. So resampling (the bootstrap) draws whole problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: Draws that are held in memory at once.
MAX_DRAWS = 4_000_000


@dataclass(frozen=True)
class Intervals:
    """How intervals are made: what share of them is to hold the truth, and the bootstrap's resamples and seed."""

    confidence: float = 0.95
    resamples: int = 10_000
    seed: int = 0


@dataclass(frozen=True)
class Estimate:
    """A figure over problems, and the interval around it.

    Example: 96 of 256 problems right are `Estimate(0.375, 0.318, 0.436, 256, "wilson")`. `method` is how the interval
    came about; "constant" is that of a figure which is the same in every problem.
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

    With p the share seen, z the normal quantile: `(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`.

    >>> [round(bound, 4) for bound in wilson(0, 10)]
    [0.0, 0.2775]
    """
    z, p = NormalDist().inv_cdf((1 + confidence) / 2), num_right / num
    middle = p + z**2 / (2 * num)
    reach = z * math.sqrt(p * (1 - p) / num + z**2 / (4 * num**2))
    low, high = ((middle + side * reach) / (1 + z**2 / num) for side in (-1, 1))
    return (low if num_right else 0.0), (high if num_right < num else 1.0)  # exact there, but for rounding


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Return the chance that k of `num` samples, drawn without putting back, hold a right one.

    An unbiased estimate of the chance that k fresh samples do: `1 - C(n-c, k) / C(n, k)` (arXiv 2107.03374, eq. 1).

    >>> pass_at_k(num=4, num_right=1, k=2)
    0.5
    """
    ways = math.comb(num, k)
    return (ways - math.comb(num - num_right, k)) / ways


def mcnemar(num_gained: int, num_lost: int) -> float:
    """Return the exact two-sided p-value for no difference between two ways of playing the same problems.

    `num_gained` problems are right in the first way alone, `num_lost` in the second alone; if the ways are equally
    good, the former are binomial with chance 1/2 (McNemar, Psychometrika 12 (1947), 153-157, in its exact form).

    >>> mcnemar(5, 1)
    0.21875
    """
    num = num_gained + num_lost
    tail = sum(math.comb(num, count) for count in range(min(num_gained, num_lost) + 1))
    return min(1.0, 2 * tail / 2**num)


def bootstrap(values_P: ArrayLike, how: Intervals, weights_P: ArrayLike | None = None) -> tuple[float, float]:
    """Return the percentile interval of a mean, or weighted mean, over problems.

    Problems are drawn with replacement, as many as there are; the interval runs between the quantiles of the means
    (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3).
    """
    values = np.asarray(values_P, dtype=np.float64)
    weights = np.ones_like(values) if weights_P is None else np.asarray(weights_P, dtype=np.float64)
    rng, num = np.random.default_rng(how.seed), len(values)
    at_once = max(1, MAX_DRAWS // num)
    means = [
        _means(values * weights, weights, rng.integers(num, size=(min(at_once, how.resamples - start), num)))
        for start in range(0, how.resamples, at_once)
    ]
    tail = (1 - how.confidence) / 2
    low, high = np.nanquantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _means(sums_P: NDArray[np.float64], weights_P: NDArray[np.float64], drawn: NDArray[np.int64]) -> NDArray:
    """Return the mean of every resample; NaN where all that was drawn weighs nothing."""
    totals = weights_P[drawn].sum(axis=1)
    return np.divide(sums_P[drawn].sum(axis=1), totals, out=np.full_like(totals, np.nan), where=totals > 0)


def estimate_mean(
    values_P: Sequence[float],
    how: Intervals,
    bounds: tuple[float, float] = (0.0, 1.0),
    weights_P: Sequence[float] | None = None,
) -> Estimate:
    """Return a mean over problems, weighted where weights are given, with its bootstrap interval.

    Where all values are equal, so is every resample, which would make nothing of the uncertainty. Then at most the
    share `u` of problems is otherwise, the upper Wilson bound of 0 in so many, and those lie within `bounds`: the
    interval is `v + u (low - v)` to `v + u (high - v)`. For shares of 0 or 1 that is Wilson's over problems.
    """
    weights = [1.0] * len(values_P) if weights_P is None else weights_P
    seen = [value for value, weight in zip(values_P, weights, strict=True) if weight > 0]
    assert seen, f"a mean needs a value, got {len(values_P)} of weight 0"
    if min(seen) == max(seen):
        value, most = seen[0], wilson(0, len(seen), how.confidence)[1]
        low, high = (value + most * (bound - value) for bound in bounds)
        return Estimate(value, low, high, len(seen), "constant")
    value = float(np.average(values_P, weights=weights))
    return Estimate(value, *bootstrap(values_P, how, weights), len(seen), "bootstrap")


def estimate_share(num_right_P: Sequence[int], num_samples: int, how: Intervals) -> Estimate:
    """Return the mean over problems of the share of right samples: Wilson's interval for one sample, else bootstrap."""
    num = len(num_right_P)
    if num_samples == 1:
        num_right = sum(num_right_P)
        return Estimate(num_right / num, *wilson(num_right, num, how.confidence), num, "wilson")
    return estimate_mean([right / num_samples for right in num_right_P], how)


def estimate_pass(num_right_P: Sequence[int], num_samples: int, k: int, how: Intervals) -> Estimate:
    """Return the mean over problems of `pass_at_k`."""
    if k == 1:
        return estimate_share(num_right_P, num_samples, how)
    return estimate_mean([pass_at_k(num_samples, right, k) for right in num_right_P], how)
