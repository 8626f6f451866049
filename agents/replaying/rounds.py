"""Plays many records at once, then a few of them alone: a player and records in, what each came to out.

Episodes are not played in the order of the recording: an environment whose episodes touch one another then gives
something else than it did, and so it does for one that is played alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from agents.recording.schema import EpisodeRecord
from agents.replaying.difference import END, Difference, differences, unequal
from agents.replaying.played import is_faulty, was_never_open
from agents.replaying.player import Player
from agents.types import EndReason
from envs.errors import UserError

#: How many episodes of a window are brought into another order, for each that is played at once.
WINDOW = 4
#: How many episodes are played once more, alone.
MAX_AGAIN = 16
#: How long calls that ran into a time limit, which go on by themselves, are given to come to an end before that.
SETTLE_S = 1.0


@dataclass(frozen=True)
class Found:
    """An episode that came to something else than was recorded.

    `is_unsteady` says that it came to yet something else when it was played alone, `is_doubtful` that label or metadata
    are known as text only, so that nothing follows.
    """

    place: int
    id: str
    end_reason: EndReason
    reward: float
    differences: tuple[Difference, ...]
    is_doubtful: bool = False
    is_unsteady: bool = False


@dataclass
class Outcome:
    """What all episodes came to; it grows while they are played.

    `skipped` counts those that could not be played again by why, `again` those that were played alone, of which
    `unsteady` came to something else than before. `hurried` ran into a time limit among others, and not alone.
    """

    num_episodes: int = 0
    num_replayed: int = 0
    num_turns: int = 0
    by_place: dict[int, Found] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    again: int = 0
    unsteady: list[str] = field(default_factory=list)
    hurried: list[str] = field(default_factory=list)

    @property
    def found(self) -> list[Found]:
        """The episodes that came to something else, in the order of the recording."""
        return [self.by_place[place] for place in sorted(self.by_place)]

    @property
    def differing(self) -> list[Found]:
        """Those of them that differ."""
        return [found for found in self.found if not found.is_doubtful]

    @property
    def doubtful(self) -> list[Found]:
        """Those of which it is not known."""
        return [found for found in self.found if found.is_doubtful]

    def skip(self, episode: EpisodeRecord, why: str, detail: str) -> None:
        """Count an episode that cannot be played again; the detail of the first one is kept."""
        self.skipped[why] += 1
        self.first_skipped.setdefault(why, detail)

    def find(self, place: int, episode: EpisodeRecord, differing: tuple[Difference, ...], unsteady: bool) -> None:
        """Note what an episode came to, in place of what was noted of it before."""
        self.by_place.pop(place, None)
        if differing:
            reason, is_doubtful = episode.end_reason, not episode.is_exact
            found = Found(place, episode.id, reason, episode.reward, differing, is_doubtful, unsteady)
            self.by_place[place] = found


async def replay(
    player: Player,
    episodes: Iterable[EpisodeRecord],
    num_turns: int | None = None,
    max_concurrent: int = 64,
    spelled: Callable[[Sequence[int]], list[Any]] = list,
    on_episode: Callable[[], None] = lambda: None,
) -> Outcome:
    """Play all and return what differs.

    Example: `(await replay(player, recording.episodes())).differing` is `[]` where the environment is as it was.
    """
    outcome, kept = Outcome(), _Kept()

    async def one(place: int, episode: EpisodeRecord) -> None:
        differing = await _play(player, episode, num_turns, spelled, outcome)
        on_episode()
        if differing is None:
            return
        outcome.num_replayed += 1
        outcome.num_turns += len(episode.turns[:num_turns])
        outcome.find(place, episode, differing, unsteady=False)
        kept.keep(place, episode, differing)

    await at_once(one, counted(episodes, outcome), max_concurrent)
    if kept.late:
        await asyncio.sleep(SETTLE_S)
    for place, episode, before in kept.chosen():
        alone = await _play(player, episode, num_turns, spelled, None)
        outcome.again += 1
        if alone is not None and not _are_alike(alone, before):
            outcome.unsteady.append(episode.id)
            outcome.find(place, episode, before or alone, unsteady=True)
    for place, episode, _ in kept.late:
        alone = await _play(player, episode, num_turns, spelled, None)
        if alone is None or any(map(_timed_out, alone)):  # it is not for the others
            break
        outcome.hurried.append(episode.id)
        outcome.find(place, episode, alone, unsteady=False)
    return outcome


def counted(episodes: Iterable[EpisodeRecord], outcome: Outcome) -> Iterator[tuple[int, EpisodeRecord]]:
    """Yield the episodes that can be played again with their place, and count all."""
    for place, episode in enumerate(episodes):
        outcome.num_episodes += 1
        if episode.end_reason is EndReason.ABORTED and was_never_open(episode):
            outcome.skip(episode, "ended before the first turn", f"{episode.id}: aborted, or the engine failed")
        else:
            yield place, episode


async def at_once(
    play: Callable[[int, EpisodeRecord], Awaitable[None]],
    episodes: Iterator[tuple[int, EpisodeRecord]],
    max_concurrent: int,
) -> None:
    """Play so many episodes at once, in an order that is not theirs, and the same every time."""

    def mixed() -> Iterator[tuple[int, EpisodeRecord]]:
        while window := list(islice(episodes, WINDOW * max_concurrent)):
            yield from sorted(window, key=lambda each: hashlib.blake2b(each[1].id.encode()).digest())

    waiting = mixed()

    async def work() -> None:
        for place, episode in waiting:
            await play(place, episode)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_concurrent):
                group.create_task(work())
    except ExceptionGroup as failed:  # a line of the recording that cannot be read
        if (errors := failed.subgroup(UserError)) is None:
            raise
        raise errors.exceptions[0] from failed


async def _play(
    player: Player,
    episode: EpisodeRecord,
    num_turns: int | None,
    spelled: Callable[[Sequence[int]], list[Any]],
    outcome: Outcome | None,
) -> tuple[Difference, ...] | None:
    """Return what differs; None where the episode cannot be played again."""
    try:
        played = await player.play(episode, num_turns)
    except UserError as error:
        if outcome:
            outcome.skip(episode, "cannot be read", f"{episode.id}: {error}")
        return None
    return differences(episode, played, num_turns, spelled)


def _are_alike(some: Sequence[Difference], others: Sequence[Difference]) -> bool:
    """Return whether an episode came to the same twice, but for addresses in memory."""
    return len(some) == len(others) and all(
        (one.kind, one.turn, one.place) == (other.kind, other.turn, other.place)
        and not any(unequal(one.replayed, other.replayed))
        for one, other in zip(some, others, strict=True)
    )


#: An episode with its place in the recording, and what differed when it was played among others.
Kept = tuple[int, EpisodeRecord, tuple[Difference, ...]]


class _Kept:
    """Episodes to be played alone: the first ones that differ and, where those are few, some that do not.

    `late` are those that ran into a time limit, which was perhaps the others' fault.
    """

    def __init__(self) -> None:
        self._differing: list[Kept] = []
        self._same: list[Kept] = []
        self.late: list[Kept] = []

    def keep(self, place: int, episode: EpisodeRecord, differing: tuple[Difference, ...]) -> None:
        """Keep an episode while there is room; one with a fault may take long, and is not kept."""
        kept = self.late if any(map(_timed_out, differing)) else self._differing if differing else self._same
        if len(kept) < MAX_AGAIN and not is_faulty(episode):
            kept.append((place, episode, differing))

    def chosen(self) -> list[Kept]:
        """Return at most `MAX_AGAIN`."""
        return [*self._differing, *self._same][:MAX_AGAIN]


def _timed_out(difference: Difference) -> bool:
    return difference.kind == END and str(difference.replayed).startswith(EndReason.ENV_TIMEOUT.value)
