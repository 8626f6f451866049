"""The ways by which weights travel to an engine, one class each.

The embedded engine copies them in place. SGLang servers read them from a checkpoint folder (`FromDisk`), or take them
over CUDA IPC from a learner's GPU on their host (`OverIpc`). Either way their prefix caches are emptied, and hashes of
images change with the version, so that no picture encoded by older weights is found again.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agents.engine import Engine
from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine
from agents.engines.sglang.client import SGLangClient
from agents.types import ProcessedImage
from trainer.trainer import Trainer

#: Lends the weights for as long as the context is open, as `trainer.ipc.lend_weights` does.
Lend = Callable[[], AbstractContextManager[list[str]]]


class Carrier(Protocol):
    """Brings a learner's weights to an engine.

    Example::

        carrier = FromDisk(learner, engine, Path("runs/x/sync"))
        await carrier.start()
        await carrier.push(version=1)
    """

    @property
    def engine(self) -> Engine:
        """Who gets the weights."""
        ...

    @property
    def events(self) -> Sequence[str]:
        """What has happened to the engine's servers so far, in order, for people."""
        ...

    async def start(self) -> None:
        """Start the engine with the weights that the learner starts from.

        Raises:
            UserError: a server cannot be started or found.
        """
        ...

    async def push(self, version: int) -> None:
        """Bring the learner's weights to the engine as `version`, while it is paused or idle."""
        ...

    async def scores(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Sequence[NDArray[np.float32]]:
        """Return what every copy of the weights gives for a stream, as `Engine.score` does."""
        ...

    def close(self) -> None:
        """Delete what was written on the way."""
        ...


class InPlace:
    """Weights for the embedded engine, copied in memory."""

    events: Sequence[str] = ()

    def __init__(self, learner: Trainer, engine: HFEngine) -> None:
        self.learner, self.engine = learner, engine

    async def start(self) -> None:
        """Do nothing: the engine has loaded what the learner has."""

    async def push(self, version: int) -> None:
        """Copy."""
        self.engine.load_weights(dict(await asyncio.to_thread(self.learner.weights)), version)

    async def scores(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Sequence[NDArray[np.float32]]:
        """Return the engine's score."""
        return [await self.engine.score(ids, images)]

    def close(self) -> None:
        """Do nothing."""


class FromDisk:
    """Weights for servers, through a checkpoint folder that they can read; one is kept for servers that come back."""

    def __init__(self, learner: Trainer, engine: SGLangEngine, folder: Path) -> None:
        self.learner, self.engine, self.folder = learner, engine, folder
        self._saved_version = -1
        engine.current_weights = self.save

    @property
    def events(self) -> Sequence[str]:
        """What has happened to servers."""
        return self.engine.servers.events

    async def start(self) -> None:
        """Start the servers. External ones may hold anything, so they are given the learner's weights first."""
        await self.engine.start()
        if self.engine.settings.urls:
            await self.push(0)

    async def push(self, version: int) -> None:
        """Have every server take the learner's weights; delete the folders of older ones."""
        await self._push(version)
        # Only now: a server that was just coming back may have been reading them.
        for folder in self.folder.glob("version-*"):
            if folder != self._folder_of(self.learner.steps_done):
                shutil.rmtree(folder, ignore_errors=True)

    async def _push(self, version: int) -> None:
        await self.engine.update_from_disk(await asyncio.to_thread(self.save), version)

    async def scores(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Sequence[NDArray[np.float32]]:
        """Return every server's score."""
        return await self.engine.score_everywhere(ids, images)

    def save(self) -> Path:
        """Return a checkpoint folder with the learner's weights of now; it is written once a step."""
        with self.learner.lock:
            version = self.learner.steps_done
            if self._saved_version != version:
                self.learner.save(self._folder_of(version), self.learner.dtype)
                self._saved_version = version
            return self._folder_of(version)

    def _folder_of(self, version: int) -> Path:
        return self.folder / f"version-{version}"

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


class OverIpc(FromDisk):
    """Weights for servers on the learner's host, over CUDA IPC; servers that come back read the folder."""

    def __init__(self, learner: Trainer, engine: SGLangEngine, folder: Path, lend: Lend) -> None:
        super().__init__(learner, engine, folder)
        self._lend = lend

    async def _push(self, version: int) -> None:
        num_gpus = self.engine.settings.tensor_parallel
        with ExitStack() as stack:
            payloads = await asyncio.to_thread(stack.enter_context, self._lend())

            async def push(client: SGLangClient) -> None:
                for index, payload in enumerate(payloads):
                    is_last = index == len(payloads) - 1
                    await client.update_from_tensors(payload, version, is_last, num_gpus)

            await self.engine.update(push, version)
