"""Replays episodes with another grader and compares old rewards with new ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agents.recording.schema import EpisodeRecord
from agents.replaying.difference import FIRST, IMAGE, MAX_KEPT, OBSERVATION, differences, is_same
from agents.replaying.episode_result import asks_reward, is_faulty
from agents.replaying.replayer import Replayer
from agents.replaying.runner import ReplaySummary, replayable, run_concurrently
from envs.errors import UserError


@dataclass(frozen=True)
class Rescored:
    """An episode with both rewards; `is_told_else`: the environment also gave the model another observation."""

    place: int
    id: str
    old: float
    new: float
    final_text: str
    label: str | None
    is_told_else: bool

    @property
    def has_flipped(self) -> bool:
        """Whether the rewards differ."""
        return not is_same(self.old, self.new)


@dataclass
class Rescoring:
    """The results of all episodes; `lost` counts those without a new reward, by how they end."""

    summary: ReplaySummary = field(default_factory=ReplaySummary)
    episodes: list[Rescored] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def flipped(self) -> list[Rescored]:
        """The episodes whose rewards differ."""
        return [episode for episode in self.episodes if episode.has_flipped]

    def pairs(self) -> Counter[tuple[float, float]]:
        """Return how many episodes have each (old, new) reward."""
        return Counter((episode.old, episode.new) for episode in self.episodes)


async def rescore(
    replayer: Replayer,
    episodes: Iterable[EpisodeRecord],
    max_concurrent: int = 64,
    on_episode: Callable[[], None] = lambda: None,
) -> Rescoring:
    """Replay all episodes that have a reward; the replayer's environment uses the other grader."""
    result = Rescoring()
    summary = result.summary

    async def one(place: int, episode: EpisodeRecord) -> None:
        if not asks_reward(episode) or is_faulty(episode) or not episode.is_exact:
            summary.skip(episode, "have no reward to compare", episode.id)
            return
        try:
            replayed = await replayer.play(episode)
        except UserError as error:
            summary.skip(episode, "cannot be read", f"{episode.id}: {error}")
            return
        on_episode()
        summary.num_replayed += 1
        if replayed.reward is None:
            result.lost[replayed.end or "unknown"] += 1
            return
        told = {each.kind for each in differences(episode, replayed)} & {FIRST, OBSERVATION, IMAGE}
        if episode.turns:
            text = episode.turns[-1].text[-MAX_KEPT:]
        else:
            text = ""
        label = episode.label and episode.label[:MAX_KEPT]
        reward = episode.env_reward
        result.episodes.append(Rescored(place, episode.id, reward, replayed.reward, text, label, bool(told)))

    await run_concurrently(one, replayable(episodes, summary), max_concurrent)
    result.episodes.sort(key=lambda episode: episode.place)
    return result
