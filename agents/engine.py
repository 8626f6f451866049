"""What the agent loop asks of an engine.

Engines: `agents.engines.hf` (embedded), `agents.engines.scripted` (tests, demonstrations).
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from agents.types import Completion, GenerateRequest


class Session(Protocol):
    """One episode's conversation with the engine; what it has read is kept from turn to turn."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Write one model turn. The request's ids must extend those of the session's request before."""
        ...


class Engine(Protocol):
    """Writes model turns for many sessions at once.

    Example::

        async with engine.session() as session:
            completion = await session.generate(GenerateRequest(ids, images, 64, SamplingParams(stop_ids=(2,)), seed=7))
    """

    #: Longest stream, prompt included, in tokens.
    context_length: int

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Open a session; leaving the context frees what it holds."""
        ...
