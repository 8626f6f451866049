"""New weights from the learner to the engine, versioned, and a probe that proves that they arrived.

The embedded engine copies them in place. SGLang servers read them from a checkpoint folder (`disk`), or take them over
CUDA IPC from the learner's own GPU (`ipc`): handles travel, tensors do not. Either way their prefix caches are emptied,
and hashes of images change with the version, so that no picture encoded by older weights is found again.
"""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.multiprocessing  # teaches ForkingPickler to hand tensors over
from numpy.typing import NDArray
from torch import Tensor

from agents.engine import Engine
from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine
from agents.engines.sglang.client import SGLangClient
from agents.types import ProcessedImage
from trainer.learner import Learner

Transport = Literal["memory", "disk", "ipc"]
#: Values of one message over CUDA IPC: 2 GiB in bfloat16.
BUCKET_VALUES = 2**30


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

        sync = WeightSync(learner, engine, "disk", Path("runs/x/sync"), ids, images, tolerance=0.1)
        await sync.start()             # version 0 is what both were loaded with: probed, pushed where it is not
        await sync.push(version=1)     # probed the first time
    """

    def __init__(
        self,
        learner: Learner,
        engine: Engine,
        transport: Transport,
        folder: Path,
        probe_ids: Sequence[int],
        probe_images: Sequence[ProcessedImage],
        tolerance: float,
    ) -> None:
        self.learner, self.engine, self.transport, self.folder = learner, engine, transport, folder
        self.tolerance = tolerance
        self._ids, self._images = tuple(probe_ids), tuple(probe_images)
        is_image = np.asarray(self._ids[1:]) == learner.model.image_token_id
        self._text_T = ~is_image
        self._before: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
        self._is_proved = False
        self._saved_version = -1
        if isinstance(engine, SGLangEngine):
            engine.current_weights = self._save

    async def start(self) -> Probe:
        """Start the servers, if there are any, and prove that they run the weights that the learner starts from.

        External servers may hold anything, so they are given the learner's weights first.

        Raises:
            UserError: a server cannot be started or found.
            SyncError: the engine runs other weights.
        """
        if isinstance(self.engine, SGLangEngine):
            await self.engine.start()
            if self.engine.settings.urls:
                await self._push_to_servers(self.engine, 0)
        return await self.probe()

    async def push(self, version: int) -> tuple[float, Probe | None]:
        """Bring the learner's weights to the engine as `version`, while it is paused or idle.

        Returns the seconds taken, and the probe after the first push.

        Raises:
            SyncError: the probe shows other weights.
        """
        started = time.perf_counter()
        if isinstance(self.engine, HFEngine):
            self.engine.load_weights(self.learner.weights(), version)
        elif isinstance(self.engine, SGLangEngine):
            await self._push_to_servers(self.engine, version)
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
        if isinstance(self.engine, SGLangEngine):
            scores = await self.engine.score_everywhere(self._ids, self._images)
        else:
            scores = [await self.engine.score(self._ids, self._images)]
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
                f"{self.engine.weight_version}, transport {self.transport}"
            )
        if moved > 2 * self.tolerance and followed < moved / 2:
            raise SyncError(f"the learner's log-probs moved by {moved:.3g} nats, the engine's only by {followed:.3g}")
        return probe

    def _distance(self, one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
        gap = float(np.abs(one - other)[self._text_T].mean())
        return gap if np.isfinite(gap) else np.inf  # NaN is in no order

    async def _push_to_servers(self, engine: SGLangEngine, version: int) -> None:
        if self.transport == "ipc":
            buckets = list(flat_buckets(self.learner.weights(), self.learner.dtype, BUCKET_VALUES))
            payloads = [_handles(bucket) for bucket in buckets]

            async def push(client: SGLangClient) -> None:
                for index, payload in enumerate(payloads):
                    await client.update_from_tensors(payload, version, is_last=index == len(payloads) - 1)

            await engine.update(push, version)
            del buckets  # the servers have copied what the handles point to
        else:
            await engine.update_from_disk(await asyncio.to_thread(self._save), version)
        # Only now: a server that was just coming back may have been reading them.
        for folder in self.folder.glob("version-*"):
            if folder != self._folder_of(self.learner.steps_done):
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_of(self, version: int) -> Path:
        return self.folder / f"version-{version}"

    def _save(self) -> Path:
        """Return a checkpoint folder with the learner's weights of now; it is written once a step."""
        with self.learner.lock:
            version = self.learner.steps_done
            if self._saved_version != version:
                self.learner.save(self._folder_of(version), self.learner.dtype)
                self._saved_version = version
            return self._folder_of(version)

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def flat_buckets(
    weights: Mapping[str, Tensor], dtype: torch.dtype, max_values: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights, under their names in a checkpoint, as views of few large tensors.

    One handle is opened for each underlying tensor, so few large ones are quicker than hundreds of small ones.
    """
    waiting: list[tuple[str, Tensor]] = []
    for name, weight in weights.items():
        if waiting and sum(w.numel() for _, w in waiting) + weight.numel() > max_values:
            yield _flat(waiting, dtype)
            waiting = []
        waiting.append((name.removeprefix("backbone."), weight))
    yield _flat(waiting, dtype)


def _flat(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    flat = torch.cat([weight.to(dtype).flatten() for _, weight in named])
    pieces = flat.split([weight.numel() for _, weight in named])
    return [(name, piece.view(weight.shape)) for (name, weight), piece in zip(named, pieces, strict=True)]


def _handles(named: Sequence[tuple[str, Tensor]]) -> str:
    """Return the pickled handles of tensors, which must live on until the receiver has copied them."""
    if named[0][1].is_cuda:
        torch.cuda.synchronize()
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(named))
    return base64.b64encode(buffer.getvalue()).decode()
