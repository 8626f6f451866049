"""The learner: one sharded copy of the policy and its optimizer. Training samples in, step statistics out.

FSDP2 (`fully_shard`) runs over every process of the default group; one process with gloo on a CPU is the smallest case
of the same code. Each rank passes its share of the step's samples to `step`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agents.engines.hf import sampling_logprobs
from agents.model import PolicyModel
from agents.types import SamplingParams
from trainer.batching import collate, filler_row, pack_rows, split_into_microbatches
from trainer.config import OptimConfig
from trainer.loss import clipped_loss, entropy, k3_kl
from trainer.types import MicroBatch, Row, StepStats, TrainingSample


@dataclass
class _Sums:
    """Running sums over the model tokens of a step, on this rank."""

    loss: float = 0.0
    tokens: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    gap_max: float = 0.0


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
    ) -> None:
        ensure_process_group()
        self.device = torch.device(device)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.model = model.to(self.device).train()
        inner: Any = self.model.backbone.model
        for layer in [*inner.language_model.layers, *inner.visual.blocks]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optim, self.sampling, self.num_steps = optim, sampling, num_steps
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay
        )
        self.steps_done = 0

    def step(self, samples: Sequence[TrainingSample]) -> StepStats:
        """Take one optimizer step on this rank's samples; every rank must call it, also with none."""
        rows = pack_rows(samples, self.optim.max_tokens_per_microbatch)
        any_images = self._reduce([float(any(row.images for row in rows))], dist.ReduceOp.MAX)[0] > 0
        sums = _Sums()
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
            gap_N = (logprobs_N - batch.rollout_logprobs_N).abs()
            sums.loss += loss.item()
            sums.tokens += len(gap_N)
            sums.kl += k3_kl(logprobs_N, batch.rollout_logprobs_N).sum().item()
            sums.gap += gap_N.sum().item()
            sums.entropy += entropy(logprobs_NV).sum().item()
            sums.clipped += clipped_N.sum().item()
            sums.gap_max = max([sums.gap_max, *gap_N.tolist()])
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
        loss, tokens, kl, gap, ent, clipped = self._reduce(
            [sums.loss, sums.tokens, sums.kl, sums.gap, sums.entropy, sums.clipped], dist.ReduceOp.SUM
        )
        gap_max = self._reduce([sums.gap_max], dist.ReduceOp.MAX)[0]
        count = max(1.0, tokens)
        return StepStats(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            num_tokens=int(tokens),
            rollout_train_kl=kl / count,
            logprob_gap_mean=gap / count,
            logprob_gap_max=gap_max,
            entropy=ent / count,
            clip_frac=clipped / count,
        )

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def weights(self) -> dict[str, Tensor]:
        """Return the full weights by parameter name, gathered from all ranks."""
        return {
            name: parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
            for name, parameter in self.model.named_parameters()
        }


def ensure_process_group() -> None:
    """Join the default process group, or make one of this process alone with gloo."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
