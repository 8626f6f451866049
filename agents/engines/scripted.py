"""An engine without a network, for people, tests, demonstrations and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.types import Completion, GenerateRequest, ProcessedImage


class _Session:
    """One episode's turns; it counts them."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._turn = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the next turn, cut at the budget."""
        await asyncio.sleep(0)  # as with any engine, other episodes run before the completion comes
        ids = self._engine.turn(self._turn, request)
        self._turn += 1
        finish = "stop"
        if len(ids) > request.max_new_tokens:
            ids = ids[: request.max_new_tokens]
            finish = "length"
        return Completion(ids, (0.0,) * len(ids), finish, len(request.ids), ((0, len(ids)),))


class StillEngine:
    """What an engine without weights does for its protocol: nothing starts, pauses, scores or closes."""

    weight_version = 0

    async def start(self) -> None:
        """Do nothing."""

    async def pause(self) -> None:
        """Do nothing: there are no weights, and no turn takes any time."""

    async def resume(self) -> None:
        """Do nothing."""

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return zeros: every token has probability 1."""
        return np.zeros(max(0, len(ids) - 1), dtype=np.float32)

    async def close(self) -> None:
        """Do nothing."""


class ScriptedEngine(StillEngine):
    """Writes the text `script(k, request)` as turn k of every session, tokenised and closed with the stop token.

    Example::

        engine = ScriptedEngine(tokenizer, lambda turn, request: "\\\\boxed{68}")
    """

    def __init__(
        self, tokenizer: Any, script: Callable[[int, GenerateRequest], str], context_length: int = 4096
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.context_length = context_length

    def turn(self, number: int, request: GenerateRequest) -> tuple[int, ...]:
        """Return the ids of a session's turn, the stop token included."""
        text = self.script(number, request)
        return (*self.tokenizer(text, add_special_tokens=False)["input_ids"], request.sampling.stop_ids[-1])

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_Session]:
        """Open a session that starts at turn 0."""
        yield _Session(self)
