"""Statistics of the difference between the trainer's and the rollout's log-probs.

Each rank adds its model tokens to `LogprobSums`. The sums of all ranks give one `LogprobStats`.

Legend: N model tokens, K turns, H bins of a histogram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.policy_loss import k3_kl

#: The histogram of |d| has this many bins a decade, from LOWEST to HIGHEST: a quantile is at most 2.4 % too large.
BINS_PER_DECADE = 100
LOWEST = -9
HIGHEST = 3
NUM_BINS = (HIGHEST - LOWEST) * BINS_PER_DECADE


@dataclass(frozen=True)
class LogprobStats:
    """Statistics of d = trainer - rollout log-prob over model tokens.

    `kl` is the mean of the k3 estimate over all of them and `kl_by_turn[k - 1]` over those of turn k alone, 0 where
    there are none. `mean`, `p99` and `max` describe |d|. `mult_prob_error` is the mean of exp(|d|): by which factor the
    probabilities differ, 1 if they do not (`token_mult_prob_error` of NeMo-RL, docs/guides/grpo.md).
    """

    num_tokens: int
    kl: float
    kl_by_turn: tuple[float, ...]
    mean: float
    p99: float
    max: float
    mult_prob_error: float


class LogprobSums:
    """Sums over the model tokens that one rank sees in a step.

    The sums stay on the device, so that adding to them never waits for it.

    Example::

        mine = LogprobSums(num_turns=2, device="cpu")
        mine.add(logprobs_N, rollout_logprobs_N, turns_N)                 # once for each micro-batch
        stats = mine.stats(sums, largest)   # over all ranks: the sum of their `sums`, the maximum of their `largest`
    """

    def __init__(self, num_turns: int, device: torch.device | str) -> None:
        self._kl_K = torch.zeros(num_turns, dtype=torch.float64, device=device)
        self._tokens_K = torch.zeros(num_turns, dtype=torch.float64, device=device)
        self._histogram_H = torch.zeros(NUM_BINS, dtype=torch.float64, device=device)
        self._totals_3 = torch.zeros(3, dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, logprobs_N: Tensor, rollout_logprobs_N: Tensor, turns_N: Tensor) -> None:
        """Add tokens; `turns_N` holds the turn of each, from 1."""
        # There is no maximum of nothing.
        if not len(turns_N):
            return
        kl_N = k3_kl(logprobs_N, rollout_logprobs_N)
        gap_N = (logprobs_N - rollout_logprobs_N).abs().double()
        self._totals_3 += torch.stack([kl_N.sum(), gap_N.sum(), gap_N.exp().sum()])
        self._largest = torch.maximum(self._largest, gap_N.nan_to_num(nan=math.inf).max())
        self._kl_K.index_add_(0, turns_N - 1, kl_N)
        self._tokens_K.index_add_(0, turns_N - 1, torch.ones_like(kl_N))
        # NaN counts as the largest value.
        decades_N = gap_N.log10().nan_to_num(nan=HIGHEST, neginf=LOWEST) - LOWEST
        bins_N = (decades_N * BINS_PER_DECADE).floor().clamp(0, NUM_BINS - 1).long()
        self._histogram_H.index_add_(0, bins_N, torch.ones_like(gap_N))  # bincount would wait for the device

    @property
    def sums(self) -> list[float]:
        """The values that are added up over ranks."""
        return torch.cat([self._totals_3, self._kl_K, self._tokens_K, self._histogram_H]).tolist()

    @property
    def largest(self) -> float:
        """The largest |d|; infinite if one is NaN."""
        return self._largest.item()

    def stats(self, sums: Sequence[float], largest: float) -> LogprobStats:
        """Return the statistics over all ranks, from the sum of their `sums` and the maximum of their `largest`."""
        kl, gap, factor, *rest = sums
        num_turns = len(self._kl_K)
        kl_K = rest[:num_turns]
        tokens_K = rest[num_turns : 2 * num_turns]
        histogram_H = rest[2 * num_turns :]
        count = sum(tokens_K)
        return LogprobStats(
            num_tokens=int(count),
            kl=kl / max(1.0, count),
            kl_by_turn=tuple(total / max(1.0, tokens) for total, tokens in zip(kl_K, tokens_K, strict=True)),
            mean=gap / max(1.0, count),
            # The upper edge of a bin may lie above the largest value.
            p99=min(largest, quantile(histogram_H, 0.99)),
            max=largest,
            mult_prob_error=factor / count if count else 1.0,
        )


def quantile(histogram_H: Sequence[float], share: float) -> float:
    """Return the upper edge of the histogram bin that reaches the share; 0 for an empty histogram.

    >>> histogram = [0.0] * NUM_BINS
    >>> histogram[700] = 99      # from 0.01 to 0.01023
    >>> histogram[900] = 1
    >>> round(quantile(histogram, 0.99), 5), round(quantile(histogram, 0.995), 5)
    (0.01023, 1.02329)
    """
    # A product that should be whole may be a hair above it.
    needed = math.ceil(share * sum(histogram_H) - 1e-9)
    seen = 0.0
    for index, count in enumerate(histogram_H):
        seen += count
        if count and seen >= needed:
            return 10 ** ((index + 1) / BINS_PER_DECADE + LOWEST)
    return 0.0
