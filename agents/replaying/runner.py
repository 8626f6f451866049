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

from agents.recording.schema import EpisodeRecord
from agents.replaying.difference import END, Difference, differences, shortened, unequal
from agents.replaying.episode_result import is_faulty, was_never_open
from agents.replaying.replayer import Replayer
from agents.types import EndReason
from envs.errors import UserError

#: Episodes are reordered and played within windows of `WINDOW * max_concurrent`, or fewer large ones.
WINDOW = 4
#: Why an episode without a turn is skipped: it has nothing to compare.
NEVER_OPEN = "ended before the first turn"
#: How many episodes are replayed once more, alone.
MAX_ALONE = 16
#: Bytes of the episodes of a window, and of those kept to be replayed alone.
MAX_MEMORY = 2**27


@dataclass(frozen=True)
class EpisodeDifferences:
    """An episode whose replay differs from the recording; `is_unsteady`: its result was another one when alone."""

    place: int
    id: str
    end_reason: EndReason
    reward: float
    differences: tuple[Difference, ...]
    is_unsteady: bool = False


@dataclass
class ReplaySummary:
    """The results of all episodes; it grows during the replay.

    `skipped` counts the episodes that could not be replayed, by reason. `num_alone` were replayed once more, alone;
    `unsteady` names those with another result then. `num_damaged` places of the recording could not be read.
    """

    num_episodes: int = 0
    num_replayed: int = 0
    num_turns: int = 0
    by_place: dict[int, EpisodeDifferences] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    num_alone: int = 0
    unsteady: list[str] = field(default_factory=list)
    num_damaged: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every episode that has a turn was compared, so that none can differ unseen."""
        return not (self.num_damaged or set(self.skipped) - {NEVER_OPEN})

    @property
    def differing(self) -> list[EpisodeDifferences]:
        """The episodes that differ, in recorded order."""
        return [self.by_place[place] for place in sorted(self.by_place)]

    def skip(self, why: str, detail: str) -> None:
        """Count an episode that cannot be compared; keep the detail of the first one."""
        self.skipped[why] += 1
        self.first_skipped.setdefault(why, detail)

    def put(self, place: int, episode: EpisodeRecord, differing: tuple[Difference, ...], unsteady: bool) -> None:
        """Set the differences of an episode."""
        kept = tuple(map(shortened, differing))
        self.by_place[place] = EpisodeDifferences(place, episode.id, episode.end_reason, episode.reward, kept, unsteady)


async def replay(
    replayer: Replayer,
    episodes: Iterable[EpisodeRecord],
    max_concurrent: int = 64,
    on_episode: Callable[[], None] = lambda: None,
) -> ReplaySummary:
    """Replay all episodes and return what differs.

    Example: `(await replay(replayer, recording.episodes())).differing` is `[]` if the environment has not changed.

    Raises:
        UserError: a line of the recording cannot be read.
    """
    summary = ReplaySummary()
    candidates: list[_Candidate] = []

    async def one(place: int, episode: EpisodeRecord) -> None:
        try:
            differing = differences(episode, await replayer.play(episode))
        except UserError as error:
            summary.skip("cannot be read", f"{episode.id}: {error}")
            return
        finally:
            on_episode()
        if differing and not episode.is_exact:
            # Today's environment got the texts that stand in the recording for values that JSON cannot hold.
            summary.skip("whose label or metadata JSON cannot hold, so a difference proves nothing", episode.id)
            return
        summary.num_replayed += 1
        summary.num_turns += len(episode.turns)
        if differing:
            summary.put(place, episode, differing, unsteady=False)
        _add_candidate(candidates, (place, episode, differing))

    for window in windows(replayable(episodes, summary), WINDOW * max_concurrent):
        await play_window(one, window, max_concurrent)
    # First those that differ, then some that do not.
    candidates.sort(key=lambda candidate: not candidate[2])
    for place, episode, before in candidates[:MAX_ALONE]:
        alone = differences(episode, await replayer.play(episode))
        summary.num_alone += 1
        if not _are_alike(alone, before):
            summary.unsteady.append(episode.id)
            # Where it differs only when alone, those differences are all that can be shown.
            summary.put(place, episode, before or alone, unsteady=True)
    return summary


def replayable(episodes: Iterable[EpisodeRecord], summary: ReplaySummary) -> Iterator[tuple[int, EpisodeRecord]]:
    """Yield the episodes that can be replayed, with their place in the recording; count all."""
    for place, episode in enumerate(episodes):
        summary.num_episodes += 1
        if episode.end_reason is EndReason.ABORTED and was_never_open(episode):
            summary.skip(NEVER_OPEN, f"{episode.id}: aborted, or the engine failed")
        else:
            yield place, episode


async def play_window(
    play: Callable[[int, EpisodeRecord], Awaitable[None]],
    window: list[tuple[int, EpisodeRecord]],
    max_concurrent: int,
) -> None:
    """Play the episodes of a window, `max_concurrent` at a time, and empty it.

    The order is shuffled but always the same: hashes of ids give the same on every machine, and neighbours in the
    file, often of one group, come apart.
    """
    window.sort(key=lambda each: hashlib.blake2b(each[1].id.encode()).digest())
    memory = sum(episode.memory for _, episode in window)
    free = asyncio.Semaphore(max_concurrent)

    async def when_free(place: int, episode: EpisodeRecord) -> None:
        async with free:
            await play(place, episode)

    await asyncio.gather(*(when_free(place, episode) for place, episode in window))
    window.clear()
    if memory >= MAX_MEMORY:
        # An environment that refers to itself keeps its sample until the next collection.
        gc.collect()


def windows(
    episodes: Iterable[tuple[int, EpisodeRecord]], max_length: int
) -> Iterator[list[tuple[int, EpisodeRecord]]]:
    """Yield the episodes in lists of at most `max_length`, and of few bytes: they are all in memory."""
    window = list[tuple[int, EpisodeRecord]]()
    memory = 0
    for place, episode in episodes:
        window.append((place, episode))
        memory += episode.memory
        if len(window) == max_length or memory >= MAX_MEMORY:
            yield window
            window = []
            memory = 0
    yield window


def _are_alike(some: Sequence[Difference], others: Sequence[Difference]) -> bool:
    """Return whether two replays of an episode gave the same differences, apart from memory addresses."""
    return len(some) == len(others) and all(
        (one.kind, one.turn, one.place) == (other.kind, other.turn, other.place)
        and not any(unequal(one.replayed, other.replayed))
        for one, other in zip(some, others, strict=True)
    )


#: An episode with its place in the recording and its differences when it was replayed with others.
_Candidate = tuple[int, EpisodeRecord, tuple[Difference, ...]]


def _add_candidate(candidates: list[_Candidate], new: _Candidate) -> None:
    """Add an episode to replay alone while there is room; one that reached a time limit would take as long again."""
    _, episode, differing = new
    num_alike = sum(bool(each[2]) == bool(differing) for each in candidates)
    memory = sum(each[1].memory for each in candidates) + episode.memory
    has_room = num_alike < MAX_ALONE and memory <= MAX_MEMORY
    if has_room and not is_faulty(episode) and not any(map(_timed_out, differing)):
        candidates.append(new)


def _timed_out(difference: Difference) -> bool:
    late = (EndReason.ENV_TIMEOUT.value, f"{EndReason.TOOL_FAULT.value}: step took longer")
    return difference.kind == END and str(difference.replayed).startswith(late)
