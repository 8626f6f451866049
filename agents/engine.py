"""What the agent loop asks of an engine.

Engines: `agents.engines.hf` (embedded), `agents.engines.scripted` (tests, demonstrations).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agents.types import Completion, GenerateRequest, ProcessedImage


class Session(Protocol):
    """One episode's conversation with the engine; what it has read is kept from turn to turn."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Write one model turn. The request's ids must extend those of the session's request before.

        Cancelling the wait ends the writing too.
        """
        ...


class Engine(Protocol):
    """Writes model turns for many sessions at once.

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
        """Which weights write now."""
        ...

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Open a session; leaving the context frees what it holds."""
        ...

    async def pause(self) -> None:
        """Stop writing, so that the weights can change; return when nothing is being written any more.

        Turns in flight keep what they have: their `generate` goes on after `resume`, under the new weights, and
        `Completion.versions` tells which tokens are whose.
        """
        ...

    async def resume(self) -> None:
        """Write on."""
        ...

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first, given those before it, at temperature 1; nothing suppressed."""
        ...

    async def close(self) -> None:
        """Free what the engine holds: connections, servers that it started."""
        ...
