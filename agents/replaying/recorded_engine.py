"""An engine that answers with recorded completions: the same ids and log-probs again.

After the recorded turns another engine can continue. A fork uses this to continue a recorded episode from one of its
turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

from agents.engines.base import Engine, Session
from agents.engines.scripted import StillEngine
from agents.recording.schema import EpisodeRecord
from agents.types import Completion, GenerateRequest, add_run
from envs.errors import UserError

#: The answer if no turn is recorded and no other engine continues: the episode ends as aborted.
ABORTED = Completion((), (), "abort", 0, ())


def recorded_completions(episode: EpisodeRecord) -> tuple[Completion, ...]:
    """Return the recorded completion of each turn; missing log-probs are NaN.

    Example: an episode of two turns of 40 and 12 tokens gives two completions with 40 and 12 ids.
    """
    streams = episode.streams
    ids = [stream.ids_T.tolist() for stream in streams]
    logprobs = [stream.logprobs_T.tolist() for stream in streams]
    return tuple(
        Completion(
            ids=tuple(ids[turn.stream][turn.start : turn.end]),
            logprobs=tuple(logprobs[turn.stream][turn.start : turn.end]),
            finish=_finish(turn.finish, episode.id),
            prompt_length=turn.start,
            versions=turn.versions,
            num_cached=turn.num_cached,
        )
        for turn in episode.turns
    )


class RecordedEngine(StillEngine):
    """Answers turn k of the n-th session with `plays[n][k]`, and later turns with the engine `after`.

    Ids, log-probs, finish reason and versions are the recorded ones, whatever the request contains; `prompt_length` is
    the request's own, so an episode whose environment has changed can continue. If a request allows fewer tokens than
    recorded, the turn is cut, as by any engine. Without `after`, a turn that is not recorded is aborted. Whoever
    gives `after` starts and closes it.

    Example::

        engine = RecordedEngine([recorded_completions(episode)[:2]] * 4, 4096, after=HFEngine(model))
        # four sessions begin with the two recorded turns; the model writes the later ones
    """

    def __init__(
        self,
        plays: Sequence[Sequence[Completion]],
        context_length: int,
        after: Engine | None = None,
    ) -> None:
        self.plays = tuple(map(tuple, plays))
        self.context_length = context_length
        self._after = after
        self._num_opened = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_Session]:
        """Open the next session, and one of the engine `after`, which so knows the number of sessions early."""
        number = self._num_opened
        self._num_opened += 1
        assert number < len(self.plays), f"session {number} is opened, {len(self.plays)} are recorded"
        async with AsyncExitStack() as stack:
            # Opened before the first turn: the engine waits for as many requests as it has sessions.
            if self._after:
                after = await stack.enter_async_context(self._after.session())
            else:
                after = None
            yield _Session(self.plays[number], after)


@dataclass
class _Session:
    """One episode's recorded turns, and the session of the engine `after`."""

    turns: Sequence[Completion]
    after: Session | None
    num_asked: int = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        number = self.num_asked
        self.num_asked += 1
        if number < len(self.turns):
            await asyncio.sleep(0)  # as with any engine, other episodes run before the answer comes
            return replace(_cut(self.turns[number], request.max_new_tokens), prompt_length=len(request.ids))
        if self.after is None:
            return replace(ABORTED, prompt_length=len(request.ids))
        return await self.after.generate(request)


def _cut(completion: Completion, limit: int) -> Completion:
    if len(completion.ids) <= limit:
        return completion
    runs: list[tuple[int, int]] = []
    # Each version keeps the tokens that it wrote, as far as the turn goes.
    for version, count in completion.versions:
        add_run(runs, version, min(count, limit - sum(tokens for _, tokens in runs)))
    return replace(
        completion,
        ids=completion.ids[:limit],
        logprobs=completion.logprobs[:limit],
        finish="length",
        versions=tuple(runs),
    )


def _finish(finish: str, episode: str) -> Literal["stop", "length", "abort"]:
    # Written out, so that the type checker knows the result.
    if finish == "stop" or finish == "length" or finish == "abort":
        return finish
    fix = "take the recording as it was written"
    raise UserError(f"turns of {episode}", "must end with stop, length or abort", finish, fix)
