"""Sums what one rank sees in a training step, and reduces the sums of all ranks to `StepStats`.

Legend: N model tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainer.algorithms.objective import Objective
from trainer.learner.collectives import reduce_over_ranks
from trainer.learner.logprob_stats import LogprobSums
from trainer.types import StepStats, TokenBatch


@dataclass
class StepSums:
    """Running sums over the model tokens of a step on this rank.

    The sums stay on the device, so that adding to them never waits for it. `update_loss` is that of the current update.

    Example::

        sums = StepSums.zero(num_turns=3, device=device)
        sums.measure(batch, logprobs_N, entropy_N)        # once for each model token of the step
        sums.add(objective(tokens, config), len(logprobs_N))   # once for each model token of each update
        sums.add_update(grad_norm=0.7, is_loss_finite=True)    # True: take the update
        stats = sums.stats(lr=1e-5)                            # over all ranks
    """

    device: torch.device
    logprob_sums: LogprobSums
    entropy: Tensor
    loss: Tensor
    update_loss: Tensor
    objective: dict[str, Tensor] = field(default_factory=dict)
    num_tokens_seen: int = 0
    grad_norms: list[float] = field(default_factory=list)
    num_skipped: int = 0
    logprobs: list[tuple[TokenBatch, Tensor]] = field(default_factory=list)

    @classmethod
    def zero(cls, num_turns: int, device: torch.device) -> StepSums:
        """Return the sums of no tokens; `num_turns` is the largest number of turns on any rank."""
        # In float64 one token still counts in a sum of millions.
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(device, LogprobSums(num_turns, device), zero, zero, zero)

    def measure(self, batch: TokenBatch, logprobs_N: Tensor, entropy_N: Tensor) -> None:
        """Add the log-probs and entropies of a micro-batch under the weights that the step starts from."""
        self.logprob_sums.add(logprobs_N, batch.rollout_logprobs_N, batch.turns_N)
        self.entropy = self.entropy + entropy_N.sum()
        self.logprobs.append((batch, logprobs_N))

    def add(self, result: Objective, num_tokens: int) -> None:
        """Add the loss and the objective's own sums of a micro-batch of `num_tokens` model tokens."""
        # A token that several updates train on counts as often in the objective's means.
        self.num_tokens_seen += num_tokens
        self.update_loss = self.update_loss + result.loss.detach()
        for name, value in result.sums.items():
            self.objective[name] = self.objective.get(name, 0.0) + value

    @property
    def is_update_finite(self) -> bool:
        """Whether the loss of the current update is finite, as far as this rank knows it."""
        return bool(self.update_loss.isfinite())

    def add_update(self, grad_norm: float, is_loss_finite: bool) -> bool:
        """Count the current update by its gradient; return whether to take it, the same on all ranks.

        One whose loss or gradient is not finite is skipped. One whose gradient is 0 is none.
        """
        is_finite = is_loss_finite and math.isfinite(grad_norm)
        is_taken = is_finite and grad_norm > 0
        if is_taken:
            self.loss = self.loss + self.update_loss
            self.grad_norms.append(grad_norm)
        self.num_skipped += not is_finite
        # A skipped update must not make the next one look endless.
        self.update_loss = torch.zeros_like(self.update_loss)
        return is_taken

    def stats(self, lr: float, group: dist.ProcessGroup | None = None) -> StepStats:
        """Return the statistics of the step over all ranks, or those of a group; every one of them must call it."""
        names = list(self.objective)  # the same on all ranks: each rank runs as many micro-batches
        # One copy from the device for all sums: each copy waits for it.
        mine = torch.stack([self.loss, self.entropy, *self.objective.values()]).tolist()
        values = [*mine[:2], float(self.num_tokens_seen), *mine[2:], *self.logprob_sums.sums]
        loss, entropy, seen, *rest = reduce_over_ranks(values, dist.ReduceOp.SUM, self.device, group)
        [largest] = reduce_over_ranks([self.logprob_sums.largest], dist.ReduceOp.MAX, self.device, group)
        gap = self.logprob_sums.stats(rest[len(names) :], largest)
        return StepStats(
            loss=loss / max(1, len(self.grad_norms)),
            grad_norm=float(np.mean(self.grad_norms)) if self.grad_norms else 0.0,
            lr=lr,
            num_tokens=gap.num_tokens,
            num_updates=len(self.grad_norms),
            num_skipped=self.num_skipped,
            rollout_train_kl=gap.kl,
            kl_by_turn=gap.kl_by_turn,
            logprob_gap_mean=gap.mean,
            logprob_gap_p99=gap.p99,
            logprob_gap_max=gap.max,
            token_mult_prob_error=gap.mult_prob_error,
            entropy=entropy / max(1, gap.num_tokens),
            objective={name: value / max(1.0, seen) for name, value in zip(names, rest, strict=False)},
            logprobs=_by_key(self.logprobs),
        )


def _by_key(measured: Sequence[tuple[TokenBatch, Tensor]]) -> dict[tuple[int, int, int, int], NDArray[np.float32]]:
    """Return the log-probs of every sample of this rank, copied from the device at once; filler samples have none."""
    samples = [sample for batch, _ in measured for sample in batch.samples]
    if not samples:
        return {}
    # One copy for all samples, for the same reason as above.
    values_N = torch.cat([logprobs_N.float() for _, logprobs_N in measured]).cpu().numpy()
    ends = np.cumsum([int(sample.mask_T.sum()) for sample in samples])
    parts = np.split(values_N, ends[:-1])
    return {(*sample.key, sample.stream): part for sample, part in zip(samples, parts, strict=True) if len(part)}
