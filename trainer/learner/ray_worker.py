"""Runs one learner rank in a process that Ray starts."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from agents.engines.weight_servers import Adapter
from agents.types import SamplingParams
from trainer.config.learner import LearnerPlan
from trainer.learner.build import build_learner
from trainer.learner.collectives import listen, use_loopback
from trainer.learner.cuda_ipc import WeightHandles, share_weights
from trainer.learner.protocol import RankLearner
from trainer.learner.weight_sender import RankSender


@dataclass(frozen=True)
class Place:
    """Where a rank runs. `gpus` are its GPUs as Ray numbers them: one, or none on a CPU."""

    node: str
    host: str
    pid: int
    gpus: tuple[str, ...]


class LearnerWorker:
    """Holds one rank's shard of the learner. Every method must be called on all ranks, since all take part in it.

    Example::

        worker = ray.remote(LearnerWorker).options(num_gpus=1).remote()
        worker.join.remote(config, model_path, sampling, rank=0, num_ranks=2, address=("10.0.0.1", 29500))
    """

    #: This rank's part in sending weights, once it has joined.
    sender: RankSender

    def __init__(self) -> None:
        self._rank = 0
        self._meeting: socket.socket | None = None
        self._learner: RankLearner | None = None
        self._loan = contextlib.ExitStack()

    def place(self) -> Place:
        """Return where this rank runs."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        node = ray.get_runtime_context().get_node_id()
        return Place(node, ray.util.get_node_ip_address(), os.getpid(), tuple(str(gpu) for gpu in gpus))

    def address(self) -> tuple[str, int]:
        """Return an address of this host at which the ranks can meet, if this one becomes rank 0."""
        self._meeting = listen(ray.util.get_node_ip_address())
        host, port, *_ = self._meeting.getsockname()
        return host, port

    def join(
        self,
        config: LearnerPlan,
        model_path: Path | str,
        sampling: SamplingParams,
        rank: int,
        num_ranks: int,
        num_on_node: int,
        address: tuple[str, int],
        variables: Mapping[str, str] = {},
    ) -> None:
        """Join the other ranks and load this rank's part of the network; `num_on_node` ranks share the node's cores.

        `variables` are environment variables that NCCL reads when it is first used.
        """
        os.environ.update(variables)
        on_gpu = config.cluster.num_gpus > 0
        # Ray shows a rank only its own GPU, so it is always the first.
        if on_gpu:
            device = torch.device("cuda", 0)
        else:
            device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_on_node))
        torch.manual_seed(config.seed + rank)  # its own seed differs from process to process
        # offloaded tensors are reduced on the CPU
        if on_gpu:
            backend = "cpu:gloo,cuda:nccl"
        else:
            backend = "gloo"
        host, port = address
        if ip_address(host).is_loopback:  # all ranks are on this host
            use_loopback()
        limit = timedelta(seconds=config.cluster.learner_timeout_s)
        dist.init_process_group(
            backend,
            store=self._open_store(host, port, rank, num_ranks, limit),
            rank=rank,
            world_size=num_ranks,
            timeout=limit,
            device_id=device if on_gpu else None,
        )
        self._rank = rank
        self._learner = build_learner(config, model_path, sampling, device)
        self.sender = RankSender(self._learner)

    def _open_store(self, host: str, port: int, rank: int, num_ranks: int, limit: timedelta) -> TCPStore:
        """Return the store where the ranks meet: rank 0 serves it at the address that it gave."""
        assert self._meeting is not None, "a rank is asked for its address first"
        if rank == 0:
            listening = self._meeting.detach()
            return TCPStore(host, port, num_ranks, is_master=True, timeout=limit, master_listen_fd=listening)
        self._meeting.close()
        return TCPStore(host, port, num_ranks, is_master=False, timeout=limit)

    @property
    def learner(self) -> RankLearner:
        """The rank's learner, once it has joined."""
        assert self._learner is not None, "a rank joins first"
        return self._learner

    def call(self, method: str, *args: Any) -> Any:
        """Call a method by its path from here, such as `place`, `learner.step` or `sender.messages`."""
        return attrgetter(method)(self)(*args)

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the full weights on rank 0, and nothing on the others."""
        weights = self.learner.weights(torch.float32, "cpu")
        return {name: weight.numpy() for name, weight in weights.items()}

    def adapter(self) -> Adapter | None:
        """Return the low-rank updates on rank 0, and nothing on the others."""
        adapter = self.learner.adapter()
        if self._rank == 0:
            return adapter
        return None

    def restore(self, folder: Path) -> int:
        """Read this rank's shards; return the steps done."""
        self.learner.restore(folder)
        return self.learner.steps_done

    def share_weights(self) -> WeightHandles:
        """Return the handles of `trainer.learner.cuda_ipc.lend_weights` on rank 0; they are valid until `take_back`."""
        # A push that failed may have left weights lent.
        self.take_back()
        if self._rank == 0:
            return self._loan.enter_context(share_weights(self.learner))
        # Rank 0 gathers from all, so each must take part to the end.
        for _ in self.learner.stream():
            pass
        return WeightHandles()

    def take_back(self) -> None:
        """Free the weights that were shared."""
        self._loan.close()
