"""An engine that tells how much it writes: any engine in; the same engine, with a callback after every turn, out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from agents.engine import Engine, Session
from agents.types import Completion, GenerateRequest, ProcessedImage


class _Session:
    """A session whose turns are counted."""

    def __init__(self, session: Session, on_turn: Callable[[int], None]) -> None:
        self._session, self._on_turn = session, on_turn

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await self._session.generate(request)
        self._on_turn(len(completion.ids))
        return completion


class MeteredEngine:
    """Calls `on_turn(tokens)` each time that a turn has been written.

    Example::

        tokens = []
        engine = MeteredEngine(HFEngine(model), tokens.append)
    """

    def __init__(self, engine: Engine, on_turn: Callable[[int], None]) -> None:
        self._engine, self._on_turn = engine, on_turn
        self.context_length = engine.context_length

    @property
    def weight_version(self) -> int:
        """The engine's."""
        return self._engine.weight_version

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_Session]:
        """Open a session whose turns are counted."""
        async with self._engine.session() as session:
            yield _Session(session, self._on_turn)

    async def pause(self) -> None:
        """Pause the engine."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Resume the engine."""
        await self._engine.resume()

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Let the engine score a stream."""
        return await self._engine.score(ids, images)

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
