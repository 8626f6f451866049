"""The learner: one sharded copy of the policy and its optimizer. Training samples in, step statistics out.

FSDP2 (`fully_shard`) runs over every process of the default group; one process with gloo on a CPU is the smallest case
of the same code. Each rank passes its share of the step's samples to `step`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agents.logprobs import sampling_logprobs, stream_logprobs
from agents.model import PolicyModel
from agents.types import ProcessedImage, SamplingParams
from trainer.batching import collate, filler_row, pack_rows, split_into_microbatches
from trainer.config import OptimConfig
from trainer.gaps import Gaps
from trainer.loss import clipped_loss, entropy
from trainer.types import MicroBatch, Row, StepStats, TrainingSample


@dataclass
class _Sums:
    """Running sums over the model tokens of a step, on this rank."""

    gaps: Gaps
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0


class Learner:
    """Owns the training weights.

    Example::

        learner = Learner(PolicyModel.load(path), OptimConfig(), SamplingParams(), num_steps=20)
        stats = learner.step(samples)            # one optimizer step
        engine.load_weights(learner.weights(), version=1)
    """

    def __init__(
        self,
        model: PolicyModel,
        optim: OptimConfig,
        sampling: SamplingParams,
        num_steps: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        ensure_process_group()
        self.device = torch.device(device)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.model = model.to(self.device).train()
        # Weights and optimizer stay in float32; `dtype` is what the network computes in, as the engine does.
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)
        self.optim, self.sampling, self.num_steps, self.dtype = optim, sampling, num_steps, dtype
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay
        )
        self.steps_done = 0
        #: Held while the network is used: who needs the weights for a server may ask in another thread than who trains.
        self.lock = threading.RLock()

    def step(self, samples: Sequence[TrainingSample]) -> StepStats:
        """Take one optimizer step on this rank's samples; every rank must call it, also with none."""
        with self.lock:
            return self._step(samples)

    def _step(self, samples: Sequence[TrainingSample]) -> StepStats:
        rows = pack_rows(samples, self.optim.max_tokens_per_microbatch)
        most_turns = max((int(s.turns_T.max()) for s in samples), default=0)
        images, turns = self._reduce([float(any(row.images for row in rows)), float(most_turns)], dist.ReduceOp.MAX)
        any_images, sums = images > 0, _Sums(Gaps(int(turns), self.device))
        # Rows without an advantage are only measured; their gradient would be 0.
        self._rounds([row for row in rows if not row.teaches], any_images, sums, backward=False)
        rounds = self._rounds([row for row in rows if row.teaches], any_images, sums, backward=True)
        lr = self._set_lr()
        grad_norm = self._update() if rounds else 0.0
        self.steps_done += 1
        return self._stats(sums, grad_norm, lr)

    def _rounds(self, rows: Sequence[Row], any_images: bool, sums: _Sums, backward: bool) -> int:
        """Run the rows micro-batch by micro-batch; return how many that took on every rank."""
        bins = split_into_microbatches(rows, self.optim.max_tokens_per_microbatch)
        rounds = int(self._reduce([float(len(bins))], dist.ReduceOp.MAX)[0])
        for index in range(rounds):
            chosen = bins[index] if index < len(bins) else []
            # FSDP communicates in every forward and backward of every part, vision tower included. So all ranks run the
            # same number of micro-batches and, where any rank has images in this step, all of them show one.
            if not chosen or (any_images and not any(row.images for row in chosen)):
                chosen = [*chosen, filler_row(self.model, with_image=any_images)]
            with torch.set_grad_enabled(backward):
                loss = self._loss(collate(chosen, self.device), sums)
            if backward:
                # FSDP averages gradients over ranks; the weights already hold the global denominator, so undo it.
                (loss * dist.get_world_size()).backward()
        return rounds

    def _loss(self, batch: MicroBatch, sums: _Sums) -> Tensor:
        """Return a micro-batch's share of the step's loss, and count its tokens in `sums`."""
        logits_NV = self.model(batch.ids_BT, batch.positions_3BT, batch.attention_mask_B1TT, batch.select, batch.vision)
        sampling = self.sampling
        logprobs_NV = sampling_logprobs(logits_NV, sampling.logprob_temperature, sampling.suppressed_ids)
        logprobs_N = logprobs_NV.gather(-1, batch.targets_N[:, None])[:, 0]
        loss_N, clipped_N = clipped_loss(
            logprobs_N, batch.rollout_logprobs_N, batch.advantages_N, self.optim.clip_low, self.optim.clip_high
        )
        loss = (loss_N * batch.weights_N).sum()
        with torch.no_grad():
            sums.gaps.add(logprobs_N, batch.rollout_logprobs_N, batch.turns_N)
            sums.loss += loss.item()
            sums.entropy += entropy(logprobs_NV).sum().item()
            sums.clipped += clipped_N.sum().item()
        return loss

    def _set_lr(self) -> float:
        warm = min(1.0, (self.steps_done + 1) / max(1, self.optim.warmup_steps))
        lr = self.optim.lr * warm
        if self.optim.schedule == "cosine":
            lr *= 0.5 * (1 + math.cos(math.pi * self.steps_done / max(1, self.num_steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _update(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _stats(self, sums: _Sums, grad_norm: float, lr: float) -> StepStats:
        loss, ent, clipped, *gap_sums = self._reduce(
            [sums.loss, sums.entropy, sums.clipped, *sums.gaps.sums], dist.ReduceOp.SUM
        )
        gaps = sums.gaps.stats(gap_sums, self._reduce([sums.gaps.largest], dist.ReduceOp.MAX)[0])
        count = max(1, gaps.num_tokens)
        return StepStats(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            num_tokens=gaps.num_tokens,
            rollout_train_kl=gaps.kl,
            kl_by_turn=gaps.kl_by_turn,
            logprob_gap_mean=gaps.mean,
            logprob_gap_p99=gaps.p99,
            logprob_gap_max=gaps.max,
            entropy=ent / count,
            clip_frac=clipped / count,
        )

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id of a stream but the first, at temperature 1; every rank must call it."""
        with self.lock:
            scores = stream_logprobs(self.model, ids, images, self.device)
            self.model.reshard()  # type: ignore[operator]
            return scores

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write a checkpoint folder's configuration and weights; `dtype` is that of the file."""
        self.model.save(folder, dtype, self.weights())

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by parameter name, gathered from all ranks."""
        with self.lock:
            # A forward without a backward leaves the root's parameters gathered, in the precision of the forward.
            self.model.reshard()  # type: ignore[operator]
            return {
                name: parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
                for name, parameter in self.model.named_parameters()
            }


def ensure_process_group() -> None:
    """Join the default process group, or make one of this process alone with gloo."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
