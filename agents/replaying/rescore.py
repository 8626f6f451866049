"""The same episodes under another grader: records and a player in, old and new rewards out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agents.recording.schema import EpisodeRecord
from agents.replaying.difference import FIRST, OBSERVATION, PICTURE, differences, is_same
from agents.replaying.played import asks_reward, is_faulty
from agents.replaying.player import Player
from agents.replaying.rounds import Outcome, at_once, counted
from envs.errors import UserError


@dataclass(frozen=True)
class Rescored:
    """An episode with both rewards; `is_told_else` where the environment also says something else to the model."""

    place: int
    id: str
    old: float
    new: float
    final_text: str
    label: str | None
    is_told_else: bool

    @property
    def has_flipped(self) -> bool:
        """Whether the reward is another one."""
        return not is_same(self.old, self.new)


@dataclass
class Rescoring:
    """What all episodes came to: `lost` counts those that have no reward now, by how they end."""

    outcome: Outcome = field(default_factory=Outcome)
    episodes: list[Rescored] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def flipped(self) -> list[Rescored]:
        """The episodes with another reward."""
        return [episode for episode in self.episodes if episode.has_flipped]

    def pairs(self) -> Counter[tuple[float, float]]:
        """Return how many episodes have each (old, new) reward."""
        return Counter((episode.old, episode.new) for episode in self.episodes)


async def rescore(
    player: Player,
    episodes: Iterable[EpisodeRecord],
    max_concurrent: int = 64,
    on_episode: Callable[[], None] = lambda: None,
) -> Rescoring:
    """Play all episodes that have a reward with a player whose entry names the other grader."""
    result = Rescoring()
    outcome = result.outcome

    async def one(place: int, episode: EpisodeRecord) -> None:
        if not asks_reward(episode) or is_faulty(episode) or not episode.is_exact:
            outcome.skip(episode, "have no reward that can be given again", episode.id)
            return
        try:
            played = await player.play(episode)
        except UserError as error:
            outcome.skip(episode, "cannot be read", f"{episode.id}: {error}")
            return
        on_episode()
        outcome.num_replayed += 1
        if played.reward is None:
            result.lost[played.end or "nobody knows"] += 1
            return
        told = {each.kind for each in differences(episode, played)} & {FIRST, OBSERVATION, PICTURE}
        text = episode.turns[-1].text if episode.turns else ""
        result.episodes.append(
            Rescored(place, episode.id, episode.reward, played.reward, text, episode.label, bool(told))
        )

    await at_once(one, counted(episodes, outcome), max_concurrent)
    result.episodes.sort(key=lambda episode: episode.place)
    return result
