"""The learner: one sharded copy of the policy and its optimizer. Training samples in, step statistics out.

FSDP2 (`fully_shard`) runs over every process of the default group; one process with gloo on a CPU is the smallest case
of the same code. Each rank passes its share of the step's samples to `step`.

Legend: N model tokens of a micro-batch or sample.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from agents.logprobs import stream_logprobs
from agents.model import PolicyModel
from agents.types import ProcessedImage, SamplingParams
from trainer.batching import balanced_bins, collate, filler_row, pack_rows
from trainer.config import AlgorithmConfig, LearnerConfig, LearnerPlan, OptimConfig
from trainer.gaps import Gaps
from trainer.loading import empty_model, load_weights
from trainer.lora import ALL_LINEAR, LoraOptions, add_lora, disabled, merged_weights
from trainer.objective import ModelTokens, objective
from trainer.offload import OffloadedState
from trainer.sharding import keep_gathered, reshard, shard
from trainer.state import StateWriter, restore, trained_state
from trainer.trainable import freeze_vision, trainable_parameters
from trainer.types import MicroBatch, Row, StepStats, TrainingSample

#: Log-probs (N,) of a sample's model tokens, by the sample.
SampleLogprobs = Mapping[TrainingSample, Tensor]


@dataclass
class _Sums:
    """Running sums over the model tokens of a step, on this rank; on the device, so that nothing waits for them."""

    gaps: Gaps
    entropy: Tensor
    loss: Tensor
    objective: dict[str, Tensor] = field(default_factory=dict)
    tokens_seen: int = 0
    grad_norms: list[float] = field(default_factory=list)
    num_skipped: int = 0
    logprobs: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)

    @classmethod
    def zero(cls, num_turns: int, device: torch.device) -> _Sums:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(Gaps(num_turns, device), zero, zero)


class Learner:
    """Owns the training weights.

    Example::

        learner = Learner(PolicyModel.load(path), SamplingParams(), num_steps=20)
        stats = learner.step([samples])            # one optimizer update
        engine.load_weights(learner.weights(), version=1)
    """

    def __init__(
        self,
        model: PolicyModel,
        sampling: SamplingParams,
        num_steps: int,
        optim: OptimConfig = OptimConfig(),
        algorithm: AlgorithmConfig = AlgorithmConfig(),
        config: LearnerConfig = LearnerConfig(),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        path: Path | str = "",
        seed: int = 0,
    ) -> None:
        """Shard the network, and fill it from the checkpoint at `path` where its parameters are on the meta device.

        Raises:
            UserError: the checkpoint does not fit, or the network has nothing of what is to be trained.
        """
        self.device, self.dtype = torch.device(device), dtype
        assert path or not algorithm.kl_coef or config.lora_rank, "a reference network is read from a checkpoint"
        ensure_process_group(self.device)
        self.optim, self.algorithm, self.config = optim, algorithm, config
        self.sampling, self.num_steps = sampling, num_steps
        if config.freeze_vision:
            freeze_vision(model, dtype)
        if config.lora_rank:
            targets = config.lora_targets or (ALL_LINEAR,)
            add_lora(model, LoraOptions(config.lora_rank, config.lora_alpha, targets), seed)
        self.model = self._sharded(model, path, seed)
        self._reference = self._build_reference(path)
        self.optimizer = torch.optim.AdamW(
            trainable_parameters(self.model),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=self.device.type == "cuda",
        )
        self._state = OffloadedState(self.optimizer) if config.offload == "optimizer" else None
        self.steps_done = 0
        self._writer = StateWriter()
        #: Held while the network is used: who needs the weights for a server may ask in another thread than who trains.
        self.lock = threading.RLock()

    def _sharded(self, model: PolicyModel, path: Path | str, seed: int) -> PolicyModel:
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        on_host = self.config.offload == "all"
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        if not is_empty and not on_host:
            model = model.to(self.device)
        shard(model.train(), self.config, mesh, self.dtype)
        if is_empty:
            load_weights(model, path, self.device, torch.device("cpu") if on_host else self.device, seed)
        return model

    def _build_reference(self, path: Path | str) -> PolicyModel | None:
        """Return the network that the policy is to stay close to; adapters switched off are one already."""
        if not self.algorithm.kl_coef or self.config.lora_rank:
            return None
        model = empty_model(path, self.dtype)
        model.requires_grad_(False)
        return self._sharded(model, path, 0).eval()

    def step(self, minibatches: Sequence[Sequence[TrainingSample]]) -> StepStats:
        """Take one optimizer update per minibatch and epoch, on this rank's share of each.

        Every rank must call it with as many minibatches, also with empty ones.
        """
        with self.lock:
            return self._step(minibatches)

    def _step(self, minibatches: Sequence[Sequence[TrainingSample]]) -> StepStats:
        everything = [sample for samples in minibatches for sample in samples]
        most_turns = max((int(s.turns_T.max()) for s in everything), default=0)
        images, turns = self._reduce([float(any(s.images for s in everything)), float(most_turns)], dist.ReduceOp.MAX)
        any_images, sums = images > 0, _Sums.zero(int(turns), self.device)
        num_updates = len(minibatches) * self.optim.epochs
        lr = self._set_lr()
        # The ratio is to the policy before the step's first update: for one update alone, that is the policy itself.
        old = self._score(minibatches, any_images, sums) if num_updates > 1 else None
        reference = self._score_reference(minibatches, any_images)
        for _ in range(self.optim.epochs):
            for samples in minibatches:
                self._update(samples, any_images, sums, old, reference)
        self.steps_done += 1
        return self._stats(sums, lr, num_updates)

    def _score(self, minibatches: Sequence[Sequence[TrainingSample]], any_images: bool, sums: _Sums) -> SampleLogprobs:
        """Return log-probs under the weights of now, and measure how far the rollout's are from them."""
        scores: dict[TrainingSample, Tensor] = {}
        with torch.no_grad():
            for batch in self._batches_of_updates(minibatches, any_images):
                logprobs_N, entropy_N = self.model.token_scores(batch.packed, self.sampling.law)
                self._measure(batch, logprobs_N, entropy_N, sums)
                scores |= _by_sample(batch, logprobs_N)
        reshard(self.model)
        return scores

    def _score_reference(
        self, minibatches: Sequence[Sequence[TrainingSample]], any_images: bool
    ) -> SampleLogprobs | None:
        if not self.algorithm.kl_coef:
            return None
        scores: dict[TrainingSample, Tensor] = {}
        network = self._reference or self.model
        with torch.no_grad(), contextlib.nullcontext() if self._reference else disabled(self.model):
            for batch in self._batches_of_updates(minibatches, any_images):
                scores |= _by_sample(batch, network.token_scores(batch.packed, self.sampling.law)[0])
        reshard(network)
        return scores

    def _update(
        self,
        samples: Sequence[TrainingSample],
        any_images: bool,
        sums: _Sums,
        old: SampleLogprobs | None,
        reference: SampleLogprobs | None,
    ) -> None:
        """Accumulate the gradient of one minibatch and step the optimizer."""
        # What an earlier update left behind that failed on the way.
        self.optimizer.zero_grad(set_to_none=True)
        keep_gathered(self.model, False)
        silent, taught = self._parts(samples)
        with torch.no_grad():
            for batch in self._batches(self._bins(silent), any_images):
                self._add_up(batch, sums, old, reference)
        reshard(self.model)
        bins = self._bins(taught)
        for number, batch in enumerate(self._batches(bins, any_images), 1):
            keep_gathered(self.model, self.config.reshard == "never" and number < len(bins))
            loss = self._add_up(batch, sums, old, reference)
            # FSDP averages gradients over ranks; the weights already hold the global denominator, so undo it.
            (loss * dist.get_world_size()).backward()
        if bins:
            self._step_optimizer(sums)

    def _parts(self, samples: Sequence[TrainingSample]) -> tuple[list[Row], list[Row]]:
        """Return the rows of an update that are only measured, for their gradient would be 0, and those that teach."""
        rows = pack_rows(samples, self.config.max_tokens_per_microbatch)
        if self.algorithm.kl_coef or self.algorithm.entropy_coef:
            return [], rows
        return [row for row in rows if not row.has_advantage], [row for row in rows if row.has_advantage]

    def _batches_of_updates(
        self, minibatches: Sequence[Sequence[TrainingSample]], any_images: bool
    ) -> Iterator[MicroBatch]:
        """Yield the very micro-batches that the updates will read: in bfloat16 others would be rounded otherwise."""
        for samples in minibatches:
            for rows in self._parts(samples):
                yield from self._batches(self._bins(rows), any_images)

    def _bins(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Return the rows of each micro-batch, as many on every rank: the last may be empty.

        FSDP communicates in every forward and backward of every part, so all ranks must run the same number of them.
        """
        bins = balanced_bins(rows, self.config.max_tokens_per_microbatch)
        most = int(self._reduce([float(len(bins))], dist.ReduceOp.MAX)[0])
        return bins + [[] for _ in range(most - len(bins))]

    def _batches(self, bins: Sequence[list[Row]], any_images: bool) -> Iterator[MicroBatch]:
        """Yield the micro-batches. Where any rank has images in this step, all show one, for the tower communicates."""

        def batch(chosen: list[Row]) -> MicroBatch:
            if not chosen or (any_images and not any(row.images for row in chosen)):
                chosen = [*chosen, filler_row(self.model, with_image=any_images)]
            return collate(chosen, self.model.image_token_id, self.device, self.dtype)

        # The next one is put together while the network is busy with this one.
        with ThreadPoolExecutor(1) as pool:
            coming = [pool.submit(batch, chosen) for chosen in bins[:1]]
            for number in range(len(bins)):
                ready = coming.pop().result()
                coming = [pool.submit(batch, chosen) for chosen in bins[number + 1 : number + 2]]
                yield ready

    def _add_up(
        self, batch: MicroBatch, sums: _Sums, old: SampleLogprobs | None, reference: SampleLogprobs | None
    ) -> Tensor:
        """Return a micro-batch's share of the update's loss, and count its tokens in `sums`."""
        logprobs_N, entropy_N = self.model.token_scores(batch.packed, self.sampling.law)
        result = objective(
            ModelTokens(
                logprobs_N=logprobs_N,
                entropy_N=entropy_N,
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
            self._measure(batch, logprobs_N.detach(), entropy_N.detach(), sums)
        sums.tokens_seen += len(logprobs_N)
        sums.loss = sums.loss + result.loss.detach()
        for name, value in result.sums.items():
            sums.objective[name] = sums.objective.get(name, 0.0) + value
        return result.loss

    def _measure(self, batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor, sums: _Sums) -> None:
        sums.gaps.add(logprobs_N, batch.rollout_logprobs_N, batch.turns_N)
        sums.entropy = sums.entropy + entropy_N.sum()
        sums.logprobs.append((batch, logprobs_N))

    def _set_lr(self) -> float:
        warm = min(1.0, (self.steps_done + 1) / max(1, self.optim.warmup_steps))
        lr = self.optim.lr * warm
        if self.optim.schedule == "cosine":
            lr *= 0.5 * (1 + math.cos(math.pi * self.steps_done / max(1, self.num_steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _step_optimizer(self, sums: _Sums) -> None:
        norm = torch.nn.utils.clip_grad_norm_(trainable_parameters(self.model), self.optim.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        sums.grad_norms.append(float(norm))
        if norm.isfinite():
            with self._optimizer_at_hand():
                self.optimizer.step()
        else:
            sums.num_skipped += 1
        self.optimizer.zero_grad(set_to_none=True)

    def _optimizer_at_hand(self) -> AbstractContextManager[None]:
        """Have the optimizer's state on the device within."""
        return self._state.on_device() if self._state else contextlib.nullcontext()

    def _stats(self, sums: _Sums, lr: float, num_updates: int) -> StepStats:
        names = list(sums.objective)  # the same on all ranks: they run as many micro-batches
        mine = torch.stack([sums.loss, sums.entropy, *sums.objective.values()]).tolist()
        figures = [*mine[:2], float(sums.tokens_seen), *mine[2:], *sums.gaps.sums]
        loss, ent, seen, *rest = self._reduce(figures, dist.ReduceOp.SUM)
        gaps = sums.gaps.stats(rest[len(names) :], self._reduce([sums.gaps.largest], dist.ReduceOp.MAX)[0])
        return StepStats(
            loss=loss / max(1, num_updates),
            grad_norm=float(np.mean(sums.grad_norms)) if sums.grad_norms else 0.0,
            lr=lr,
            num_tokens=gaps.num_tokens,
            num_updates=len(sums.grad_norms) - sums.num_skipped,
            num_skipped=sums.num_skipped,
            rollout_train_kl=gaps.kl,
            kl_by_turn=gaps.kl_by_turn,
            logprob_gap_mean=gaps.mean,
            logprob_gap_p99=gaps.p99,
            logprob_gap_max=gaps.max,
            entropy=ent / max(1, gaps.num_tokens),
            objective={name: value / max(1.0, seen) for name, value in zip(names, rest, strict=False)},
            logprobs=_by_key(sums.logprobs),
        )

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id of a stream but the first, at temperature 1; every rank must call it."""
        with self.lock:
            scores = stream_logprobs(self.model, ids, images, self.device, self.dtype)
            reshard(self.model)
            return scores

    def likelihood(self, samples: Sequence[TrainingSample]) -> tuple[float, int]:
        """Return the sum of the log-probs of all ranks' samples' model tokens, in nats, and how many these are.

        Each rank passes its share, which may be empty; every rank must call it.
        """
        with self.lock, torch.no_grad():
            images = self._reduce([float(any(s.images for s in samples))], dist.ReduceOp.MAX)[0] > 0
            rows = pack_rows(samples, self.config.max_tokens_per_microbatch)
            total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
            for batch in self._batches(self._bins(rows), images):
                logprobs_N, _ = self.model.token_scores(batch.packed, self.sampling.law)
                total, count = total + logprobs_N.sum(dtype=torch.float64), count + len(logprobs_N)
            reshard(self.model)
            nats, tokens = self._reduce([total.item(), float(count)], dist.ReduceOp.SUM)
            return nats, int(tokens)

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write a model folder's configuration and weights, in `dtype`; every rank must call it."""
        weights = self.weights(dtype, "cpu")
        if dist.get_rank() == 0:
            self.model.save(folder, dtype, weights)
        dist.barrier()

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy the trained weights and the optimizer's state, and write them in the background, this rank its shards.

        Every rank must call it, and `is_checkpoint_written` of every rank must have been True for the one before.
        """
        with self.lock:
            reshard(self.model)
            with self._optimizer_at_hand():
                self._writer.begin(trained_state(self.model, self.optimizer, self.steps_done), folder)

    def is_checkpoint_written(self, wait: bool) -> bool:
        """Return whether the checkpoint is on disk; raises `CheckpointFailed` where a rank could not write."""
        return self._writer.is_written(wait)

    def restore(self, folder: Path, with_optimizer: bool = True) -> None:
        """Go on from what any number of ranks wrote with `begin_checkpoint`; every rank must call it.

        Learning rate, betas and weight decay stay those of this learner. Raises `UserError` for another network.
        """
        with self.lock:
            reshard(self.model)
            with self._optimizer_at_hand():
                self.steps_done = restore(folder, self.model, self.optimizer if with_optimizer else None)

    def weights(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return the full weights by name, adapters merged, on rank 0 and nothing elsewhere; every rank must call it.

        They are gathered one by one, cast to `dtype` and moved to `device` where these are given; otherwise, with one
        rank, they are the learner's own and change with its next step.
        """
        with self.lock:
            reshard(self.model)
            kept: dict[str, Tensor] = {}
            for name, weight in merged_weights(self.model, _whole):
                if dist.get_rank() == 0:
                    kept[name] = weight.to(device or weight.device, dtype or weight.dtype)
            return kept


def build_learner(config: LearnerPlan, path: Path | str, sampling: SamplingParams, device: torch.device) -> Learner:
    """Return the learner of a run; every rank calls it.

    Raises:
        UserError: the checkpoint does not fit, or the network has nothing of what is to be trained.
    """
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    # What is only read need not be kept more exactly than it is computed in; adapters are float32 themselves.
    kept = dtype if config.learner.lora_rank or not config.steps else torch.float32
    return Learner(
        empty_model(path, kept),
        sampling,
        config.steps,
        config.optim,
        config.algorithm,
        config.learner,
        device,
        dtype,
        path,
        config.seed,
    )


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def _by_sample(batch: MicroBatch, values_N: Tensor) -> dict[TrainingSample, Tensor]:
    parts = values_N.split([int(sample.mask_T.sum()) for sample in batch.samples])
    return dict(zip(batch.samples, parts, strict=True))


def _by_key(measured: Sequence[tuple[MicroBatch, Tensor]]) -> dict[tuple[int, int, int], NDArray[np.float32]]:
    """Return the log-probs of every sample of this rank, fetched from the device in one go; fillers have none."""
    samples = [sample for batch, _ in measured for sample in batch.samples]
    if not samples:
        return {}
    values_N = torch.cat([logprobs_N.float() for _, logprobs_N in measured]).cpu().numpy()
    ends = np.cumsum([int(sample.mask_T.sum()) for sample in samples])
    parts = np.split(values_N, ends[:-1])
    return {sample.key: part for sample, part in zip(samples, parts, strict=True) if len(part)}


def _of(batch: MicroBatch, values: SampleLogprobs, device: torch.device) -> Tensor:
    """Return the values of a micro-batch's tokens; a filler has none."""
    nothing = torch.zeros(0, device=device)
    return torch.cat([values.get(sample, nothing) for sample in batch.samples])


def ensure_process_group(device: torch.device) -> None:
    """Join the default process group, or make one of this process alone."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
