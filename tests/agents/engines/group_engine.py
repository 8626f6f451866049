"""A third engine: `PlainEngine` as an engine of one server in this process, which takes weights from disk and over a
process group. It shares no code with `agents.engines.sglang`, and `trainer` knows nothing of it.

`--engine tests/agents/engines/group_engine.py:make_engine`, with `--sync disk` or `--sync nccl`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore, TCPStore

from agents.engines.base import Capabilities, EngineSetup
from agents.engines.busy import BusyTime
from agents.engines.weight_servers import Adapter, GroupAddress, ServerRefused, WeightClient, WeightMessage
from agents.types import ProcessedImage
from tests.agents.engines.plain_engine import PlainEngine


class OneServer:
    """The engine's only server, and the calls to it."""

    number = num_restarts = 0
    url, node = "http://127.0.0.1", ""

    def __init__(self, engine: GroupEngine) -> None:
        self.engine, self.client, self.busy = engine, self, BusyTime()
        self.members: dist.ProcessGroup | None = None

    async def weight_version(self) -> str:
        return str(self.engine.weight_version)

    async def num_gpus(self) -> int:
        return 1

    async def update_from_disk(self, folder: str, version: int) -> None:
        await PlainEngine.update_from_disk(self.engine, Path(folder), version)

    async def update_from_tensors(self, payloads: Sequence[str], version: int, num_gpus: int = 1) -> None:
        raise ServerRefused("takes no handles")

    async def join_group(self, group: GroupAddress, first_rank: int) -> None:
        def join() -> dist.ProcessGroup:
            store = TCPStore(group.host, group.port, is_master=False, wait_for_workers=False)
            prefixed = PrefixStore("cpu/", PrefixStore(f"{group.name}/", PrefixStore(group.name, store)))
            limit = timedelta(seconds=60)
            return dist.ProcessGroupGloo(prefixed, first_rank, group.num_members, timeout=limit)  # type: ignore

        self.members = await asyncio.to_thread(join)

    async def update_from_group(self, messages: Sequence[WeightMessage], group: str, version: int) -> None:
        for message in messages:
            await asyncio.to_thread(self.receive, message)
        self.engine.weight_version = version

    @torch.no_grad()
    def receive(self, message: WeightMessage) -> None:
        assert self.members is not None
        weights = dict(self.engine.network.named_parameters())
        own = [weights[name] for name in message.names]
        flat = torch.empty(sum(weight.nbytes for weight in own), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.members.broadcast([flat], options).wait()
        values = flat.view(getattr(torch, message.dtype)).split([weight.numel() for weight in own])
        for weight, value in zip(own, values, strict=True):
            weight.copy_(value.view(weight.shape))

    async def leave_group(self, group: str) -> None:
        self.members = None


@dataclass
class OneServerAlone:
    """All servers of the engine."""

    all: list[OneServer]
    events: list[str] = field(default_factory=list)

    @property
    def up(self) -> list[OneServer]:
        return self.all

    def report_lost(self, server: OneServer, reason: str, must_restart: bool = False) -> None:
        raise RuntimeError(f"the engine's only server is lost: {reason}")

    def starting(self) -> list[int]:
        return []


class GroupEngine(PlainEngine):
    """`PlainEngine`, which says that it has a server and takes weights over a group too."""

    capabilities = Capabilities(frozenset({"disk", "nccl"}), has_servers=True)
    current_weights: Callable[[], Path] | None = None
    before_close: Callable[[], Awaitable[None]] | None = None
    are_started_here, gpus_per_server, num_loaded = True, 1, 0

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self.servers = OneServerAlone([OneServer(self)])

    def is_current(self, name: str) -> bool:
        return name == str(self.weight_version)

    def launch(self) -> None:
        raise NotImplementedError

    async def update(self, push: Callable[[WeightClient], Awaitable[None]], version: int) -> None:
        for server in self.servers.all:
            await push(server)

    async def update_from_disk(self, folder: Path, version: int) -> None:
        await self.servers.all[0].update_from_disk(str(folder), version)

    async def score_everywhere(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> list[NDArray[np.float32]]:
        return [await self.score(ids, images)]

    async def free_memory(self) -> None:
        raise NotImplementedError

    def why_no_adapter(self, layers: Sequence[str]) -> str:
        return "this engine takes no adapters"

    def adapt(self, rank: int, targets: Sequence[str]) -> None:
        raise NotImplementedError

    async def offer_adapter(self, adapter: Adapter) -> str:
        return "this engine takes no adapters"

    async def update_adapter(self, adapter: Adapter, version: int) -> None:
        raise NotImplementedError


def make_engine(setup: EngineSetup) -> GroupEngine:
    return GroupEngine(setup)
