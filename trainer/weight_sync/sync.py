"""Brings new weights from the learner to the engine, as versions, and probes whether they arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agents.engines.base import Engine, capabilities_of
from agents.engines.weight_servers import servers_of
from agents.model.cpu import compute
from agents.types import ProcessedImage
from trainer.learner.protocol import Learner
from trainer.types import RunFault
from trainer.weight_sync.transports import Transport, WeightPush


class SyncError(RunFault):
    """The engine does not run the learner's weights."""


class WeightSync:
    """Pushes the learner's weights to the engine.

    Example::

        sync = WeightSync(learner, DiskTransport(learner, engine, folder), ids, images, image_token_id=9, tolerance=0.1)
        await sync.start()             # both were loaded with version 0: a probe compares them
        await sync.push(version=1)     # ends with a probe
    """

    def __init__(
        self,
        learner: Learner,
        transport: Transport,
        probe_ids: Sequence[int],
        probe_images: Sequence[ProcessedImage],
        image_token_id: int,
        tolerance: float,
    ) -> None:
        self.learner = learner
        self.transport = transport
        self.tolerance = tolerance
        self._ids = tuple(probe_ids)
        self._images = tuple(probe_images)
        self._text_T = np.asarray(self._ids[1:]) != image_token_id

    @property
    def engine(self) -> Engine:
        """The engine that gets the weights."""
        return self.transport.engine

    async def start(self, version: int = 0) -> float:
        """Start the engine, and probe whether it runs the weights that the learner starts from; return the gap.

        Both were loaded with version 0. If the learner starts from a later `version`, it is pushed first.

        Raises:
            UserError: a server cannot be started or found.
            SyncError: the engine runs other weights.
        """
        await self.transport.start()
        if version:
            await self._bring(version)
        return await self.probe()

    @property
    def pauses_to_train(self) -> bool:
        """Whether servers share the learner's GPUs, free their memory while it trains, and write nothing meanwhile."""
        return capabilities_of(self.engine).frees_memory

    async def begin_training(self) -> None:
        """Give the learner the memory of servers on its GPUs, if they free it, until the next push."""
        # Servers write nothing from here until the push: it gives them their memory back, with the new weights.
        servers = servers_of(self.engine)
        if servers and self.pauses_to_train:
            await servers.free_memory()

    async def push(self, version: int) -> WeightPush:
        """Bring the learner's weights to the engine as `version`.

        Turns in flight pause meanwhile, and go on under the new weights. A probe follows.

        Raises:
            SyncError: the probe shows other weights.
        """
        started = time.perf_counter()
        push = await self._bring(version)
        seconds = time.perf_counter() - started
        # Every push: a server may keep what older weights made of an image or of a prefix.
        return replace(push, seconds=seconds, probe_gap=await self.probe())

    async def _bring(self, version: int) -> WeightPush:
        """Pause the engine, push to it, and let it go on."""
        if self.pauses_to_train:
            # Servers on the same GPU need room for the weights that are sent to them.
            await asyncio.to_thread(self.learner.free_memory)
        # Paused before anything is sent: a token must not be written by weights of which a part is new.
        await self.engine.pause()
        try:
            push = await self.transport.push(version)
            if self.pauses_to_train:  # the memory that weights took on their way; servers need it from here on
                await asyncio.to_thread(self.learner.free_memory)
            return push
        finally:
            await self.engine.resume()

    async def probe(self) -> float:
        """Score the fixed stream with the learner and with every server; return the largest gap to the learner.

        The gap is the mean |d| of log-probs in nats over the text tokens.

        Raises:
            SyncError: it is over the tolerance.
        """
        learner = await compute(self.learner.score, self._ids, self._images)
        scores = await self.transport.scores(self._ids, self._images)
        # The server that is farthest from the learner stands for all: each must agree.
        gap = max(self._distance(score, learner) for score in scores)
        if gap > self.tolerance:
            raise SyncError(
                f"the engine does not run the learner's weights: log-probs of a stream of {len(self._ids)} tokens "
                f"differ by {gap:.3g} nats on average, {self.tolerance:g} is allowed; version "
                f"{self.engine.weight_version}, brought by {type(self.transport).__name__}"
            )
        return gap

    def _distance(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
        # An image token is never sampled, so its log-prob tells nothing.
        gap = float(np.abs(one - other)[self._text_T].mean())
        # NaN compares as False
        if np.isfinite(gap):
            return gap
        return np.inf

    def close(self) -> None:
        """Delete the files that the transport wrote."""
        self.transport.close()


class NoWeightSync:
    """Stands in for `WeightSync` where no engine needs the weights: in a run on recorded rollouts."""

    async def begin_training(self) -> None:
        """Do nothing."""

    async def push(self, version: int) -> WeightPush:
        """Do nothing."""
        return WeightPush(num_bytes=0)
