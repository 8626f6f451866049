"""Replays many episodes concurrently, then some of them once more, one at a time.

Episodes are not replayed in recorded order. So an environment whose episodes share state gives other results than it
did, and another result for an episode that is replayed alone.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.recording.schema import EpisodeRecord
from agents.replaying.difference import END, Difference, differences, shortened, unequal
from agents.replaying.episode_result import is_faulty, was_never_open
from agents.replaying.replayer import Replayer
from agents.types import EndReason
from envs.errors import UserError

#: Episodes are reordered within windows of `WINDOW * max_concurrent`, or fewer large ones.
WINDOW = 4
#: Why an episode without a turn is skipped: it has nothing to compare.
NEVER_OPEN = "ended before the first turn"
#: How many episodes are replayed once more, alone.
MAX_ALONE = 16
#: Bytes of the episodes of a window, of those that are played, and of those kept to be replayed alone.
MAX_MEMORY = 2**27
#: Calls that reached a time limit still run on their threads. Before episodes are replayed alone, they get this time.
SETTLE_S = 1.0


@dataclass(frozen=True)
class EpisodeDifferences:
    """An episode whose replay differs from the recording.

    `is_unsteady`: its result was another one when replayed alone. `is_doubtful`: JSON could not hold its label or
    metadata exactly, so the difference proves nothing.
    """

    place: int
    id: str
    end_reason: EndReason
    reward: float
    differences: tuple[Difference, ...]
    is_doubtful: bool = False
    is_unsteady: bool = False


@dataclass
class ReplaySummary:
    """The results of all episodes; it grows during the replay.

    `skipped` counts the episodes that could not be replayed, by reason. `num_alone` were replayed once more, alone;
    `unsteady` names those with another result then. `hurried` reached a time limit with others, but not alone.
    `num_damaged` places of the recording could not be read.
    """

    num_episodes: int = 0
    num_replayed: int = 0
    num_turns: int = 0
    by_place: dict[int, EpisodeDifferences] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    num_alone: int = 0
    unsteady: list[str] = field(default_factory=list)
    hurried: list[str] = field(default_factory=list)
    num_damaged: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every episode that has a turn was compared, so that none can differ unseen."""
        return not (self.num_damaged or self.doubtful or set(self.skipped) - {NEVER_OPEN})

    @property
    def found(self) -> list[EpisodeDifferences]:
        """The episodes that differ, in recorded order."""
        return [self.by_place[place] for place in sorted(self.by_place)]

    @property
    def differing(self) -> list[EpisodeDifferences]:
        """The episodes that differ and are not doubtful."""
        return [found for found in self.found if not found.is_doubtful]

    @property
    def doubtful(self) -> list[EpisodeDifferences]:
        """The episodes whose difference proves nothing."""
        return [found for found in self.found if found.is_doubtful]

    def skip(self, episode: EpisodeRecord, why: str, detail: str) -> None:
        """Count an episode that cannot be replayed; keep the detail of the first one."""
        self.skipped[why] += 1
        self.first_skipped.setdefault(why, detail)

    def put(self, place: int, episode: EpisodeRecord, differing: tuple[Difference, ...], unsteady: bool) -> None:
        """Set the differences of an episode; no differences remove it."""
        self.by_place.pop(place, None)
        if differing:
            reason = episode.end_reason
            is_doubtful = not episode.is_exact
            kept = tuple(map(shortened, differing))
            found = EpisodeDifferences(place, episode.id, reason, episode.reward, kept, is_doubtful, unsteady)
            self.by_place[place] = found


async def replay(
    replayer: Replayer,
    episodes: Iterable[EpisodeRecord],
    num_turns: int | None = None,
    max_concurrent: int = 64,
    token_texts: Callable[[Sequence[int]], list[Any]] = list,
    on_episode: Callable[[], None] = lambda: None,
) -> ReplaySummary:
    """Replay all episodes and return what differs.

    Example: `(await replay(replayer, recording.episodes())).differing` is `[]` if the environment has not changed.
    """
    summary = ReplaySummary()
    candidates = _Candidates()

    async def one(place: int, episode: EpisodeRecord) -> None:
        differing = await _play(replayer, episode, num_turns, token_texts, summary)
        on_episode()
        if differing is None:
            return
        summary.num_replayed += 1
        summary.num_turns += len(episode.turns[:num_turns])
        summary.put(place, episode, differing, unsteady=False)
        candidates.add(place, episode, differing)

    await run_concurrently(one, replayable(episodes, summary), max_concurrent)
    if candidates.timed_out:
        await asyncio.sleep(SETTLE_S)
    for place, episode, before in candidates.chosen():
        alone = await _play(replayer, episode, num_turns, token_texts, None)
        summary.num_alone += 1
        if alone is not None and not _are_alike(alone, before):
            summary.unsteady.append(episode.id)
            # Where it differs only when alone, those differences are all that can be shown.
            summary.put(place, episode, before or alone, unsteady=True)
    for place, episode, _ in candidates.timed_out:
        alone = await _play(replayer, episode, num_turns, token_texts, None)
        if alone is None or any(map(_timed_out, alone)):  # the other episodes were not the reason
            break
        summary.hurried.append(episode.id)
        summary.put(place, episode, alone, unsteady=False)
    return summary


def replayable(episodes: Iterable[EpisodeRecord], summary: ReplaySummary) -> Iterator[tuple[int, EpisodeRecord]]:
    """Yield the episodes that can be replayed, with their place in the recording; count all."""
    for place, episode in enumerate(episodes):
        summary.num_episodes += 1
        if episode.end_reason is EndReason.ABORTED and was_never_open(episode):
            summary.skip(episode, NEVER_OPEN, f"{episode.id}: aborted, or the engine failed")
        else:
            yield place, episode


async def run_concurrently(
    play: Callable[[int, EpisodeRecord], Awaitable[None]],
    episodes: Iterator[tuple[int, EpisodeRecord]],
    max_concurrent: int,
) -> None:
    """Play up to `max_concurrent` episodes at a time, in an order that is shuffled but always the same.

    Fewer are played at a time where more would take over `MAX_MEMORY`.

    Raises:
        UserError: a line of the recording cannot be read.
    """
    waiting = shuffled(episodes, WINDOW * max_concurrent)
    freed = asyncio.Condition()
    memory = garbage = 0  # of the episodes that are played, and of those that were

    def has_room() -> bool:
        return memory < MAX_MEMORY

    async def work() -> None:
        nonlocal memory, garbage
        while True:
            async with freed:
                await freed.wait_for(has_room)
            if (found := next(waiting, None)) is None:
                return
            memory += (taken := found[1].memory)
            await play(*found)
            memory = memory - taken
            garbage = garbage + taken
            del found  # while this one waits
            if garbage >= MAX_MEMORY:  # an environment that refers to itself keeps its sample until then
                gc.collect()
                garbage = 0
            async with freed:
                freed.notify_all()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_concurrent):
                group.create_task(work())
    except ExceptionGroup as failed:
        if (errors := failed.subgroup(UserError)) is None:
            raise
        raise errors.exceptions[0] from failed


def shuffled(episodes: Iterable[tuple[int, EpisodeRecord]], max_window: int) -> Iterator[tuple[int, EpisodeRecord]]:
    """Yield the episodes in an order that is shuffled within windows, and always the same."""
    for window in _windows(episodes, max_window):
        # Hashes give the same order on every machine; neighbours in the file, often of one group, come apart.
        window.sort(key=lambda each: hashlib.blake2b(each[1].id.encode()).digest(), reverse=True)
        while window:  # an episode that was handed on is not kept
            yield window.pop()


def _windows(
    episodes: Iterable[tuple[int, EpisodeRecord]], max_window: int
) -> Iterator[list[tuple[int, EpisodeRecord]]]:
    """Yield the episodes in lists of at most `max_window`, and of few bytes: they are all in memory."""
    window = list[tuple[int, EpisodeRecord]]()
    memory = 0
    for place, episode in episodes:
        window.append((place, episode))
        memory += episode.memory
        if len(window) == max_window or memory >= MAX_MEMORY:
            yield window
            window = []
            memory = 0
    yield window


async def _play(
    replayer: Replayer,
    episode: EpisodeRecord,
    num_turns: int | None,
    token_texts: Callable[[Sequence[int]], list[Any]],
    summary: ReplaySummary | None,
) -> tuple[Difference, ...] | None:
    """Return what differs; None if the episode cannot be replayed."""
    try:
        result = await replayer.play(episode, num_turns)
    except UserError as error:
        if summary:
            summary.skip(episode, "cannot be read", f"{episode.id}: {error}")
        return None
    return differences(episode, result, num_turns, token_texts)


def _are_alike(some: Sequence[Difference], others: Sequence[Difference]) -> bool:
    """Return whether two replays of an episode gave the same differences, apart from memory addresses."""
    return len(some) == len(others) and all(
        (one.kind, one.turn, one.place) == (other.kind, other.turn, other.place)
        and not any(unequal(one.replayed, other.replayed))
        for one, other in zip(some, others, strict=True)
    )


#: An episode with its place in the recording and its differences when it was replayed with others.
_Candidate = tuple[int, EpisodeRecord, tuple[Difference, ...]]


class _Candidates:
    """Episodes to replay alone: first those that differ, then some that do not.

    `timed_out` are those that reached a time limit, perhaps only because of the other episodes.
    """

    def __init__(self) -> None:
        self._memory = 0
        self._differing: list[_Candidate] = []
        self._same: list[_Candidate] = []
        self.timed_out: list[_Candidate] = []

    def add(self, place: int, episode: EpisodeRecord, differing: tuple[Difference, ...]) -> None:
        """Add an episode while there is room; a recorded fault is left out, because it may take long."""
        late = any(map(_timed_out, differing))
        if late:
            group = self.timed_out
        elif differing:
            group = self._differing
        else:
            group = self._same
        has_room = len(group) < MAX_ALONE and self._memory + episode.memory <= MAX_MEMORY
        if has_room and not is_faulty(episode):
            self._memory += episode.memory
            group.append((place, episode, differing))

    def chosen(self) -> list[_Candidate]:
        """Return at most `MAX_ALONE` episodes."""
        return [*self._differing, *self._same][:MAX_ALONE]


def _timed_out(difference: Difference) -> bool:
    late = (EndReason.ENV_TIMEOUT.value, f"{EndReason.TOOL_FAULT.value}: step took longer")
    return difference.kind == END and str(difference.replayed).startswith(late)
