"""One optimizer step that shows its gradients, on one rank or on several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from agents.model import PolicyModel
from agents.types import SamplingParams
from trainer.config import OptimConfig
from trainer.learner import Learner
from trainer.types import StepStats, TrainingSample


class OpenLearner(Learner):
    """A learner that keeps the full gradients of its latest step, as they were before clipping."""

    gradients: dict[str, Tensor]

    def _update(self) -> float:
        self.gradients = {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        return super()._update()


@dataclass(frozen=True, eq=False)
class Stepped:
    """What is left after one optimizer step."""

    stats: StepStats
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def take_step(
    checkpoint: Path, samples: Sequence[TrainingSample], params: SamplingParams, optim: OptimConfig
) -> Stepped:
    """Load the checkpoint afresh and take one step on this rank's samples."""
    learner = OpenLearner(PolicyModel.load(checkpoint), optim, params, num_steps=1)
    stats = learner.step(samples)
    return Stepped(stats, learner.gradients, {name: w.clone() for name, w in learner.weights().items()})


def rank_main(rank: int, store: str, checkpoint: Path, shares: dict[str, Any], out: Path) -> None:
    """Take one step per named split of the samples as one of several ranks; rank 0 writes what is left of each."""
    torch.set_num_threads(1)
    first = next(iter(shares.values()))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(first["samples"]))
    for name, share in shares.items():
        stepped = take_step(checkpoint, share["samples"][rank], share["params"], share["optim"])
        if rank == 0:
            torch.save(stepped, out / f"{name}.pt")
    dist.destroy_process_group()
