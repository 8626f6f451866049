"""New weights from the learner to the engine, versioned, and a probe that proves that they arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.engine import Engine
from agents.types import ProcessedImage
from trainer.carriers import Carrier
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Probe:
    """Log-probs of a fixed stream, engine against learner, mean |d| in nats over its text tokens.

    `gap` is between the two now. `learner_moved` and `engine_moved` are how far each has come since the probe before;
    None at the first.
    """

    gap: float
    learner_moved: float | None
    engine_moved: float | None


class SyncError(RuntimeError):
    """The engine does not run the learner's weights."""


class WeightSync:
    """Hands weights over.

    Example::

        sync = WeightSync(learner, FromDisk(learner, engine, folder), ids, images, image_token_id=9, tolerance=0.1)
        await sync.start()             # version 0 is what both were loaded with: probed, pushed where it is not
        await sync.push(version=1)     # probed the first time
    """

    def __init__(
        self,
        learner: Trainer,
        carrier: Carrier,
        probe_ids: Sequence[int],
        probe_images: Sequence[ProcessedImage],
        image_token_id: int,
        tolerance: float,
    ) -> None:
        self.learner, self.carrier, self.tolerance = learner, carrier, tolerance
        self._ids, self._images = tuple(probe_ids), tuple(probe_images)
        self._text_T = np.asarray(self._ids[1:]) != image_token_id
        self._before: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
        self._is_proved = False

    @property
    def engine(self) -> Engine:
        """Who gets the weights."""
        return self.carrier.engine

    async def start(self, version: int = 0) -> Probe:
        """Start the engine and prove that it runs the weights that the learner starts from, pushed if those are of a
        later `version` than what both were loaded with.

        Raises:
            UserError: a server cannot be started or found.
            SyncError: the engine runs other weights.
        """
        await self.carrier.start()
        if version:
            await self.carrier.push(version)
        return await self.probe()

    async def push(self, version: int) -> tuple[float, Probe | None]:
        """Bring the learner's weights to the engine as `version`, while it is paused or idle.

        Returns the seconds taken, and the probe after the first push.

        Raises:
            SyncError: the probe shows other weights.
        """
        started = time.perf_counter()
        await self.carrier.push(version)
        seconds = time.perf_counter() - started
        if self._is_proved:
            return seconds, None
        probe = await self.probe()
        self._is_proved = True
        return seconds, probe

    async def probe(self) -> Probe:
        """Score the fixed stream on both sides; every server must agree with the learner.

        Raises:
            SyncError: the gap is over the tolerance, or the learner has moved and the engine has not followed.
        """
        learner = await asyncio.to_thread(self.learner.score, self._ids, self._images)
        scores = await self.carrier.scores(self._ids, self._images)
        engine = max(scores, key=lambda score: self._distance(score, learner))
        before, self._before = self._before, (learner, engine)
        probe = Probe(
            gap=self._distance(engine, learner),
            learner_moved=self._distance(learner, before[0]) if before else None,
            engine_moved=self._distance(engine, before[1]) if before else None,
        )
        moved, followed = probe.learner_moved or 0.0, probe.engine_moved or 0.0
        if probe.gap > self.tolerance:
            raise SyncError(
                f"the engine does not run the learner's weights: log-probs of a stream of {len(self._ids)} tokens "
                f"differ by {probe.gap:.3g} nats on average, {self.tolerance:g} is allowed; version "
                f"{self.engine.weight_version}, brought by {type(self.carrier).__name__}"
            )
        if moved > 2 * self.tolerance and followed < moved / 2:
            raise SyncError(f"the learner's log-probs moved by {moved:.3g} nats, the engine's only by {followed:.3g}")
        return probe

    def _distance(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
        gap = float(np.abs(one - other)[self._text_T].mean())
        return gap if np.isfinite(gap) else np.inf  # NaN is in no order

    def close(self) -> None:
        """Delete what was written on the way."""
        self.carrier.close()
