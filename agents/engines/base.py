"""The protocol that every engine implements for the agent loop.

Engines: `agents.engines.hf` (embedded), `agents.engines.sglang` (servers), `agents.engines.scripted` (tests,
demonstrations).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agents.types import Completion, GenerateRequest, ProcessedImage


class Session(Protocol):
    """One episode's turns on an engine, which may keep what it has read from turn to turn."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Write one model turn. The request's ids must extend those of the session's previous request.

        Cancelling the call also stops the writing.
        """
        ...


class Engine(Protocol):
    """Writes model turns for many sessions concurrently.

    Example::

        async with engine.session() as session:
            completion = await session.generate(GenerateRequest(ids, images, 64, SamplingParams(stop_ids=(2,)), seed=7))
    """

    @property
    def context_length(self) -> int:
        """Longest stream, prompt included, in tokens."""
        ...

    @property
    def weight_version(self) -> int:
        """The version of the weights that write now."""
        ...

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Open a session; leaving the context frees what it holds."""
        ...

    async def pause(self) -> None:
        """Stop writing, so that the weights can change; return once nothing is being written.

        Turns in flight keep their tokens. Their `generate` continues after `resume` under the new weights, and
        `Completion.versions` says which weights wrote which tokens.
        """
        ...

    async def resume(self) -> None:
        """Continue writing."""
        ...

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first, given those before it, at temperature 1; nothing suppressed."""
        ...

    async def close(self) -> None:
        """Free what the engine holds, such as connections and servers that it started."""
        ...
