"""An engine whose turns are written by a function instead of a network: for tests, demonstrations and replay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.types import Completion, GenerateRequest, ProcessedImage


class ScriptedSession:
    """One episode's script."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine, self._turn = engine, 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the script's next text, tokenised and closed with the stop token, cut at the budget."""
        text = self._engine.script(self._turn, request)
        self._turn += 1
        ids = [*self._engine.tokenizer(text, add_special_tokens=False)["input_ids"], request.sampling.stop_ids[-1]]
        finish = "stop" if len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        return Completion(tuple(ids), (0.0,) * len(ids), finish, len(request.ids), ((0, len(ids)),))


class ScriptedEngine:
    """Answers turn k of every session with `script(k, request)`.

    Example::

        engine = ScriptedEngine(tokenizer, lambda turn, request: "\\\\boxed{68}")
    """

    def __init__(
        self, tokenizer: Any, script: Callable[[int, GenerateRequest], str], context_length: int = 4096
    ) -> None:
        self.tokenizer, self.script, self.context_length = tokenizer, script, context_length
        self.weight_version = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ScriptedSession]:
        """Open a session whose script starts at turn 0."""
        yield ScriptedSession(self)

    async def pause(self) -> None:
        """Do nothing: a script has no weights, and no turn takes any time."""

    async def resume(self) -> None:
        """Do nothing."""

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return zeros: a script writes what it writes with certainty."""
        return np.zeros(max(0, len(ids) - 1), dtype=np.float32)

    async def close(self) -> None:
        """Do nothing."""
