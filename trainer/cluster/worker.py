"""One learner rank, in a process that Ray starts."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from agents.types import ProcessedImage, SamplingParams
from trainer.cluster.shares import Share
from trainer.config import LearnerPlan
from trainer.ipc import lend_weights
from trainer.learner import Learner, build_learner
from trainer.trainer import CheckpointFailed
from trainer.types import StepStats, TrainingSample


@dataclass(frozen=True)
class Place:
    """Where a rank runs. `gpus` are Ray's numbers of its GPUs: none on a CPU, one otherwise."""

    node: str
    host: str
    pid: int
    gpus: tuple[str, ...]


class LearnerWorker:
    """Holds one rank's shard of the learner. Every rank is called for everything, for all take part in everything.

    Example::

        worker = ray.remote(LearnerWorker).options(num_gpus=1).remote()
        worker.join.remote(config, model_path, sampling, rank=0, num_ranks=2, address="tcp://10.0.0.1:29500")
    """

    def __init__(self) -> None:
        self._rank = 0
        self._learner: Learner | None = None
        self._loan = contextlib.ExitStack()

    def place(self) -> Place:
        """Say where this is."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        node = ray.get_runtime_context().get_node_id()
        return Place(node, ray.util.get_node_ip_address(), os.getpid(), tuple(str(gpu) for gpu in gpus))

    def address(self) -> str:
        """Return an address on this host at which the ranks can meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def join(
        self,
        config: LearnerPlan,
        model_path: Path | str,
        sampling: SamplingParams,
        rank: int,
        num_ranks: int,
        num_on_node: int,
        address: str,
    ) -> None:
        """Meet the other ranks and load this rank's part of the network; `num_on_node` ranks share the node's cores."""
        on_gpu = config.cluster.num_gpus > 0
        # Ray shows a rank no GPU but its own.
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_on_node))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # what is offloaded is reduced on the CPU
        dist.init_process_group(
            backend,
            init_method=address,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=config.cluster.learner_timeout_s),
            device_id=device if on_gpu else None,
        )
        self._rank, self._learner = rank, build_learner(config, model_path, sampling, device)

    @property
    def learner(self) -> Learner:
        """The rank's learner, once it has joined."""
        assert self._learner is not None, "a rank joins first"
        return self._learner

    def step(self, share: Share) -> StepStats:
        """Take the rank's part in a step; the statistics are the same on all ranks."""
        return self.learner.step(share)

    def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Score a stream; the result is the same on all ranks."""
        return self.learner.score(ids, images)

    def likelihood(self, samples: Sequence[TrainingSample]) -> tuple[float, int]:
        """Score the rank's samples; the result is that of all ranks, and the same on all."""
        return self.learner.likelihood(samples)

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the full weights on rank 0, nothing elsewhere."""
        weights = self.learner.weights(torch.float32, "cpu")
        return {name: weight.numpy() for name, weight in weights.items()}

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write a checkpoint folder, rank 0 alone."""
        self.learner.save(folder, dtype)

    def begin_checkpoint(self, folder: Path) -> None:
        """Begin to write this rank's shards."""
        self.learner.begin_checkpoint(folder)

    def checkpoint(self, wait: bool) -> tuple[bool, str]:
        """Return whether the checkpoint is written or has failed, and then why: a rank that raises would be ended."""
        try:
            return self.learner.is_checkpoint_written(wait), ""
        except CheckpointFailed as error:
            return True, str(error)

    def restore(self, folder: Path) -> int:
        """Read this rank's shards; return the steps done."""
        self.learner.restore(folder)
        return self.learner.steps_done

    def lend(self) -> list[str]:
        """Return the handles of `trainer.ipc.lend_weights` on rank 0, nothing elsewhere; held until `take_back`."""
        self.take_back()
        if self._rank == 0:
            return self._loan.enter_context(lend_weights(self.learner))
        self.learner.weights()
        return []

    def take_back(self) -> None:
        """Free what was lent."""
        self._loan.close()
