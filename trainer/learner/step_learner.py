"""What learners of all backends do alike in a step: its updates, micro-batches, loss, learning rate and statistics.

A backend adds the network: how samples become micro-batches, and how these run forward and backward.

Legend: N model tokens of a micro-batch or sample.
"""

from __future__ import annotations

import abc
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from agents.model.cpu import alone
from agents.types import SamplingParams
from trainer.algorithms.objective import objective, skips_zero_advantages
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.data.packing import balanced_bins
from trainer.learner.collectives import reduce_over_ranks
from trainer.learner.step_sums import StepSums
from trainer.types import ModelTokens, Row, StepStats, TokenBatch, TrainingSample

#: The log-probs (N,) of the model tokens of each sample.
SampleLogprobs = Mapping[TrainingSample, Tensor]
BatchT = TypeVar("BatchT", bound=TokenBatch)
#: Takes a micro-batch, and the log-probs (N,) and entropies (N,) of its model tokens.
OnMicroBatch = Callable[[BatchT, Tensor, Tensor], object]


class StepLearner(abc.ABC, Generic[BatchT]):
    """The part of a learner that does not depend on who computes the network.

    Example::

        stats = learner.step([samples])     # on every rank, each with its share of the samples
    """

    def __init__(
        self,
        sampling: SamplingParams,
        num_steps: int,
        optim: OptimConfig,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.sampling = sampling
        self.num_steps = num_steps
        self.optim = optim
        self.algorithm = algorithm
        self.config = config
        self.device = device
        self.dtype = dtype
        self.steps_done = 0
        #: Held while the network is used: a server may ask for the weights in one thread while another trains.
        self.lock = threading.RLock()

    @abc.abstractmethod
    def _rows(self, samples: Sequence[TrainingSample]) -> list[Row]:
        """Return the rows that the network takes the samples in."""

    @abc.abstractmethod
    def _collate(self, rows: list[Row], any_images: bool) -> BatchT:
        """Return the micro-batch of rows, which may be none; `any_images`: whether any rank has images in this step."""

    @abc.abstractmethod
    def _forward(
        self,
        runs: Iterable[list[list[Row]]],
        any_images: bool,
        on_micro_batch: OnMicroBatch[BatchT],
        is_reference: bool = False,
    ) -> None:
        """Run the micro-batches of these rows forward, without gradients, by the policy or the reference network.

        Calls `on_micro_batch` for each micro-batch on the ranks that know its log-probs and entropies.
        """

    @abc.abstractmethod
    def _update(
        self,
        samples: Sequence[TrainingSample],
        any_images: bool,
        sums: StepSums,
        old: SampleLogprobs | None,
        reference: SampleLogprobs | None,
    ) -> None:
        """Accumulate the gradient of one minibatch and step the optimizer.

        A minibatch whose gradient is 0, as that of advantages which are all 0, is no update: it changes neither the
        weights nor the optimizer's moments, and counts in no mean. Nor does one whose loss or gradient is not finite.
        """

    @property
    @abc.abstractmethod
    def _param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, whose learning rate is set before each step."""

    def step(self, minibatches: Sequence[Sequence[TrainingSample]]) -> StepStats:
        """Take one optimizer update per minibatch and epoch, on this rank's share of each minibatch.

        Every rank must call it with the same number of minibatches; a share may be empty.
        """
        with self.lock:
            if self.device.type == "cuda":
                # So that the peak is that of this step.
                torch.cuda.reset_peak_memory_stats(self.device)
            return self._step(minibatches)

    def _step(self, minibatches: Sequence[Sequence[TrainingSample]]) -> StepStats:
        everything = [sample for samples in minibatches for sample in samples]
        most_turns = max((int(s.turns_T.max()) for s in everything), default=0)
        # A tower that one rank runs communicates with those of all ranks.
        flags = [any(s.images for s in everything), any(s.routes_RLK is not None for s in everything)]
        images, routes, turns = self._max_over_ranks([*map(float, flags), float(most_turns)])
        any_images = images > 0
        sums = StepSums.zero(int(turns), self.device)
        lr = self._set_lr()
        routing = self._routing_stats(minibatches[0], any_images) if routes else {}
        # The ratio compares with the policy before the step's first update. With one update, that is the policy itself.
        if len(minibatches) * self.optim.epochs > 1:
            old = self._score(minibatches, any_images, sums)
        else:
            old = None
        # Only a KL penalty reads it.
        if self.algorithm.kl_coef:
            reference = self._score(minibatches, any_images)
        else:
            reference = None
        for _ in range(self.optim.epochs):
            for samples in minibatches:
                self._update(samples, any_images, sums, old, reference)
        self.steps_done += 1
        return replace(self._stats(sums, lr), routing=routing, memory=self._memory())

    def _routing_stats(self, samples: Sequence[TrainingSample], any_images: bool) -> Mapping[str, float]:
        """Return the statistics of a mixture's routes, of some of these samples; none where nothing measures them."""
        return {}

    def _stats(self, sums: StepSums, lr: float) -> StepStats:
        """Return the statistics of the step; the same on all ranks, but for the log-probs of each rank's samples."""
        return sums.stats(lr)

    def _split_rows(self, samples: Sequence[TrainingSample]) -> tuple[list[Row], list[Row]]:
        """Return the rows that are only measured, because their gradient would be 0, and the rows that are trained."""
        # Rows without an advantage still count in the statistics, so they run forward, but cost no backward.
        rows = self._rows(samples)
        if not skips_zero_advantages(self.algorithm):
            return [], rows
        return [row for row in rows if not row.has_advantage], [row for row in rows if row.has_advantage]

    def _bins(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Return the rows of each micro-batch: the same number of micro-batches on every rank, the last may be empty.

        Ranks communicate in every forward and backward, so all must run the same number of them.
        """
        bins = balanced_bins(rows, self.config.max_tokens_per_microbatch)
        most = int(self._max_over_ranks([float(len(bins))])[0])
        return bins + [[] for _ in range(most - len(bins))]

    @property
    def _is_reporter(self) -> bool:
        """Whether this rank adds what it has seen of its samples to the sums of all ranks."""
        return True

    def _batches(self, bins: Sequence[list[Row]], any_images: bool) -> Iterator[BatchT]:
        """Yield the micro-batches; a thread collates the next one while the network runs this one."""
        # To collate is work of the CPU, in which the device would stand still.
        with ThreadPoolExecutor(1) as pool:
            coming = [pool.submit(alone, self._collate, rows, any_images) for rows in bins[:1]]
            for number in range(len(bins)):
                ready = coming.pop().result()
                coming = [pool.submit(alone, self._collate, rows, any_images) for rows in bins[number + 1 : number + 2]]
                yield ready

    def _bins_of_updates(self, minibatches: Sequence[Sequence[TrainingSample]]) -> Iterator[list[list[Row]]]:
        """Yield exactly the micro-batches of the updates: other ones would round differently in bfloat16."""
        for samples in minibatches:
            for rows in self._split_rows(samples):
                yield self._bins(rows)

    def _score(
        self,
        minibatches: Sequence[Sequence[TrainingSample]],
        any_images: bool,
        sums: StepSums | None = None,
    ) -> SampleLogprobs:
        """Return log-probs under the current weights, and let `sums` measure how far the rollout's are from them.

        Without `sums`, return those of the reference network.
        """
        scores: dict[TrainingSample, Tensor] = {}

        def on_micro_batch(batch: BatchT, logprobs_N: Tensor, entropy_N: Tensor) -> None:
            if sums:
                sums.measure(batch, logprobs_N, entropy_N)
            scores.update(by_sample(batch, logprobs_N))

        self._forward(self._bins_of_updates(minibatches), any_images, on_micro_batch, is_reference=sums is None)
        return scores

    def sum_logprobs(self, samples: Sequence[TrainingSample]) -> tuple[float, int]:
        """Return the sum of the log-probs of all ranks' model tokens, in nats, and the number of these tokens.

        Each rank passes its share, which may be empty; every rank must call it.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0

        def on_micro_batch(_: BatchT, logprobs_N: Tensor, __: Tensor) -> None:
            nonlocal total, count
            # It stays on the device: to read it would wait for every micro-batch.
            total = total + logprobs_N.sum(dtype=torch.float64)
            count = count + len(logprobs_N)

        with self.lock:
            any_images = self._max_over_ranks([float(any(s.images for s in samples))])[0] > 0
            self._forward([self._bins(self._rows(samples))], any_images, on_micro_batch)
            # Ranks that share a network have seen the same tokens, and one of them counts.
            if self._is_reporter:
                mine = [total.item(), float(count)]
            else:
                mine = [0.0, 0.0]
            nats, tokens = reduce_over_ranks(mine, dist.ReduceOp.SUM, self.device)
            return nats, int(tokens)

    def _objective(
        self,
        batch: TokenBatch,
        logprobs_N: Tensor,
        entropy_N: Tensor,
        sums: StepSums,
        old: SampleLogprobs | None,
        reference: SampleLogprobs | None,
    ) -> Tensor:
        """Return a micro-batch's share of the update's loss, and add its tokens to `sums`."""
        result = objective(
            ModelTokens(
                logprobs_N=logprobs_N,
                entropy_N=entropy_N,
                # Against itself the ratio is 1, and its gradient that of the log-prob.
                old_logprobs_N=logprobs_N.detach() if old is None else _of(batch, old, self.device),
                rollout_logprobs_N=batch.rollout_logprobs_N,
                ref_logprobs_N=None if reference is None else _of(batch, reference, self.device),
                advantages_N=batch.advantages_N,
                weights_N=batch.weights_N,
                sample_N=batch.sample_N,
                num_samples=len(batch.samples),
            ),
            self.algorithm,
        )
        if old is None:
            sums.measure(batch, logprobs_N.detach(), entropy_N.detach())
        sums.add(result, len(logprobs_N))
        return result.loss

    def _is_finite(self, sums: StepSums) -> bool:
        """Return whether the loss of the current update is finite on all ranks."""
        return self._max_over_ranks([float(not sums.is_update_finite)])[0] == 0

    def _set_lr(self) -> float:
        """Set the learning rate of this step, by warm-up and schedule, and return it."""
        warm = min(1.0, (self.steps_done + 1) / max(1, self.optim.warmup_steps))
        lr = self.optim.lr * warm
        if self.optim.schedule == "cosine":
            lr *= 0.5 * (1 + math.cos(math.pi * self.steps_done / max(1, self.num_steps)))
        for group in self._param_groups:
            group["lr"] = lr
        return lr

    def _memory(self) -> dict[str, float]:
        """Return the memory that the step took on GPUs, and has left taken."""
        if self.device.type != "cuda":
            return {}
        mine = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
        peak, kept = self._max_over_ranks([number / 2**30 for number in mine])
        return {"learner_peak_gib": peak, "learner_kept_gib": kept}

    def _max_over_ranks(self, values: list[float]) -> list[float]:
        return reduce_over_ranks(values, dist.ReduceOp.MAX, self.device)

    def free_memory(self) -> None:
        """Return the GPU memory that torch keeps for the next tensors."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Do nothing: it ends with this process."""


def by_sample(batch: TokenBatch, values_N: Tensor) -> dict[TrainingSample, Tensor]:
    """Return the values of each sample's tokens."""
    parts = values_N.split([int(sample.mask_T.sum()) for sample in batch.samples])
    return dict(zip(batch.samples, parts, strict=True))


def _of(batch: TokenBatch, values: SampleLogprobs, device: torch.device) -> Tensor:
    """Return the values of a micro-batch's tokens; a filler sample has none."""
    nothing = torch.zeros(0, device=device)
    return torch.cat([values.get(sample, nothing) for sample in batch.samples])
