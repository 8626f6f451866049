"""Transports bring weights to an engine, one class for each way.

The embedded engine copies the weights in memory (`InProcessTransport`). Every other engine reads them from a checkpoint
folder (`DiskTransport`). So do SGLang servers (`ServersTransport`), unless they get them over CUDA IPC from a learner's
GPU on their host (`IpcTransport`), or over a process group from any host (`trainer.weight_sync.group_transport`). All
three empty the prefix caches of servers. The image hashes change with the version, so a server never reuses an image
that older weights encoded.

Of a learner that trains adapters, servers need only those (`AdapterTransport`): megabytes over HTTP, wherever they run.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from agents.engines.base import Engine, MemoryEngine, TrainableEngine, memory_engine
from agents.engines.weight_servers import ServersEngine, WeightClient, servers_of
from agents.model.cpu import compute
from agents.types import ProcessedImage
from envs.errors import UserError
from trainer.learner.cuda_ipc import WeightHandles
from trainer.learner.protocol import Learner

E = TypeVar("E", bound=Engine)
T = TypeVar("T", bound=TrainableEngine)
#: Lends the weights until the context is left, as `trainer.learner.cuda_ipc.lend_weights` does.
ShareWeights = Callable[[], AbstractContextManager[WeightHandles]]


@dataclass(frozen=True)
class WeightPush:
    """The bytes of new weights, the seconds in which the engine was paused for them, and the gap of a probe after that.

    `parts` has the seconds of its parts where they are known, such as `{"gather_s": 0.2, "send_s": 0.1}`.
    """

    num_bytes: int
    parts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    probe_gap: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step's push: `sync_s`, `sync_bytes`, `sync_gb_per_s`, and parts."""
        metrics = {"sync_s": self.seconds, "sync_bytes": float(self.num_bytes)}
        if self.seconds:
            metrics["sync_gb_per_s"] = self.num_bytes / 1e9 / self.seconds
        return metrics | {f"sync_{name}": seconds for name, seconds in self.parts.items()}


class Transport(ABC, Generic[E]):
    """Brings a learner's weights to an engine.

    Example::

        transport = DiskTransport(learner, engine, Path("runs/x/sync"))
        await transport.start()
        await transport.push(version=1)
    """

    def __init__(self, learner: Learner, engine: E) -> None:
        self.learner = learner
        self.engine = engine

    @property
    def events(self) -> Sequence[str]:
        """Messages for the console about the engine's servers, in order: lost, back, and so on."""
        servers = servers_of(self.engine)
        return servers.servers.events if servers else ()

    @property
    def busy_s(self) -> Sequence[float]:
        """The seconds so far in which each server wrote, or the embedded engine; empty where nobody knows."""
        if servers := servers_of(self.engine):
            return [server.busy.seconds for server in servers.servers.all]
        embedded = memory_engine(self.engine)
        return [embedded.busy.seconds] if embedded else ()

    async def start(self) -> None:
        """Start the engine with the weights that the learner starts from, which it has loaded itself.

        Raises:
            UserError: a server cannot be started or found.
        """
        await self.engine.start()

    @abstractmethod
    async def push(self, version: int) -> WeightPush:
        """Bring the learner's weights to the engine as `version`, while it is paused or idle."""

    async def scores(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Sequence[NDArray[np.float32]]:
        """Return the log-probs of a stream, as `Engine.score` does, from every server."""
        if servers := servers_of(self.engine):
            return await servers.score_everywhere(ids, images)
        return [await self.engine.score(ids, images)]

    def close(self) -> None:
        """Delete the files that were written, if there are any."""


class InProcessTransport(Transport[MemoryEngine]):
    """Copies weights to the embedded engine in memory."""

    async def push(self, version: int) -> WeightPush:
        """Copy the learner's weights to the engine."""
        weights = dict(await compute(self.learner.weights))
        self.engine.load_weights(weights, version)
        return WeightPush(sum(weight.nbytes for weight in weights.values()))


class DiskTransport(Transport[T]):
    """Writes weights to a checkpoint folder that the engine reads."""

    def __init__(self, learner: Learner, engine: T, folder: Path) -> None:
        super().__init__(learner, engine)
        self.folder = folder
        self._saved_version = -1

    async def push(self, version: int) -> WeightPush:
        """Let the engine load the learner's weights, then delete the folders of older weights."""
        push = await self._push(version)
        current = self.learner.steps_done
        # Not earlier: a server that was restarting may have been reading an older folder.
        for folder in self.folder.glob("version-*"):
            if folder != self._folder_of(current):
                shutil.rmtree(folder, ignore_errors=True)
        return push

    async def _push(self, version: int) -> WeightPush:
        folder = await asyncio.to_thread(self.save)
        await self.engine.update_from_disk(folder, version)
        return WeightPush(sum(file.stat().st_size for file in folder.glob("*.safetensors")))

    def save(self) -> Path:
        """Return a checkpoint folder with the learner's current weights; it is written once per step."""
        # A server that comes back asks in another thread, perhaps in the middle of a step.
        with self.learner.lock:
            version = self.learner.steps_done
            # Several servers may come back in one step.
            if self._saved_version != version:
                self.learner.save(self._folder_of(version), self.learner.dtype)
                self._saved_version = version
            return self._folder_of(version)

    def _folder_of(self, version: int) -> Path:
        return self.folder / f"version-{version}"

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class ServersTransport(DiskTransport[ServersEngine]):
    """Writes weights to a checkpoint folder that servers read. The newest one stays for servers that restart."""

    def __init__(self, learner: Learner, engine: ServersEngine, folder: Path) -> None:
        super().__init__(learner, engine, folder)
        # A server that restarts has nothing of what was sent before.
        engine.current_weights = self.save

    async def start(self) -> None:
        """Start the servers. External servers may hold any weights, so they get the learner's at once."""
        await super().start()
        # Servers that the run starts load version 0 themselves.
        if not self.engine.are_started_here:
            await self.push(0)


class IpcTransport(ServersTransport):
    """Lends weights over CUDA IPC to servers on the node of learner rank 0.

    Servers on other nodes read the folder, and so do those that restart.
    """

    def __init__(
        self,
        learner: Learner,
        engine: ServersEngine,
        folder: Path,
        share_weights: ShareWeights,
        node: Callable[[], str] = str,
    ) -> None:
        """Share on a node as servers name it, which may change with a restart; "" if all are on this host."""
        super().__init__(learner, engine, folder)
        self._share_weights = share_weights
        self._node = node

    async def _push(self, version: int) -> WeightPush:
        num_gpus = self.engine.gpus_per_server
        clients = [server.client for server in self.engine.servers.up]
        here = self._node()
        if not any(client.node == here for client in clients):
            return await super()._push(version)
        # Written once for all far servers, before GPU memory is lent to the near ones.
        if any(client.node != here for client in clients):
            await asyncio.to_thread(self.save)

        async def push(client: WeightClient) -> None:
            if client.node == here:
                await client.update_from_tensors(shared.payloads, version, num_gpus)
            else:
                folder = await asyncio.to_thread(self.save)
                await client.update_from_disk(str(folder.absolute()), version)

        with ExitStack() as stack:
            shared = await asyncio.to_thread(stack.enter_context, self._share_weights())
            await self.engine.update(push, version)
            return WeightPush(shared.num_bytes)


class AdapterTransport(Transport[ServersEngine]):
    """Sends servers the adapter alone; if one refuses it at the start, `merged` brings them all whole weights instead.

    The engine keeps the adapter that it was given last, for servers that restart.
    """

    def __init__(self, merged: ServersTransport, is_required: bool = False) -> None:
        super().__init__(merged.learner, merged.engine)
        self._merged = merged
        self._is_required = is_required
        self._is_refused = False

    async def start(self) -> None:
        """Start the servers, and offer them the learner's adapter.

        Raises:
            UserError: a server cannot be started or found, or refuses the adapter although it is required.
        """
        await self.engine.start()
        # Flags of a server may allow adapters, and it may still refuse this one.
        reason = await self.engine.offer_adapter(await asyncio.to_thread(self.learner.adapter))
        if reason and self._is_required:
            raise refused(reason)
        if reason:
            note_merged(self.engine, reason)
            self._is_refused = True
            await self.push(0)

    async def push(self, version: int) -> WeightPush:
        """Load the learner's adapter into every server."""
        if self._is_refused:
            return await self._merged.push(version)
        adapter = await asyncio.to_thread(self.learner.adapter)
        await self.engine.update_adapter(adapter, version)
        return WeightPush(adapter.num_bytes)

    def close(self) -> None:
        """Delete the files of whole weights, if there are any."""
        self._merged.close()


def refused(reason: str) -> UserError:
    """Return the error for adapters that are required and cannot be served."""
    fix = "give --sync auto for merged weights; a server of yours needs --enable-lora, --max-lora-rank and "
    return UserError("--sync adapter", "needs servers that take the adapter", reason, f"{fix}--lora-target-modules")


def note_merged(engine: ServersEngine, reason: str) -> None:
    """Report that servers get merged weights although adapters are trained."""
    engine.servers.events.append(f"servers get merged weights, not the adapter alone: {reason}")
