"""Selects the recorded episodes that a command works on, by its flags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import islice

from pydantic import Field

from agents.recording.schema import EpisodeRecord
from agents.types import EndReason
from envs.config.settings import Section


class SelectionConfig(Section):
    """The flags that select recorded episodes; an episode must match all flags that are given.

    Example: `SelectionConfig(id=("train-12-*",), max_reward=0.0)` selects the samples of problem 12 without a reward.
    """

    id: tuple[str, ...] = Field(default=(), description="episode, or a pattern such as train-12-*")
    phase: tuple[str, ...] = Field(
        default=(), description="what it was played for: train, before, eval-10 (step 10), after, evaluate or play"
    )
    way: tuple[str, ...] = Field(
        default=(), description="how it was played: train, with_tool, without_tool, no_tools or play"
    )
    step: tuple[int, ...] = Field(default=(), description="training step during which it ended")
    end_reason: tuple[EndReason, ...] = Field(default=(), description="why it ended")
    min_reward: float | None = Field(default=None, description="lowest reward; empty: any")
    max_reward: float | None = Field(default=None, description="highest reward; empty: any")
    limit: int = Field(default=0, ge=0, description="how many episodes, the first ones; 0: all")

    def matches(self, episode: EpisodeRecord) -> bool:
        """Return whether an episode matches all flags but `limit`."""
        return (
            # Case counts: ids are exact, and the same on every system.
            (not self.id or any(fnmatchcase(episode.id, pattern) for pattern in self.id))
            and (not self.phase or episode.phase in self.phase)
            and (not self.way or episode.way in self.way)
            and (not self.step or episode.step in self.step)
            and (not self.end_reason or episode.end_reason in self.end_reason)
            and (self.min_reward is None or episode.reward >= self.min_reward)
            and (self.max_reward is None or episode.reward <= self.max_reward)
        )


def select_episodes(episodes: Iterable[EpisodeRecord], config: SelectionConfig) -> Iterator[EpisodeRecord]:
    """Yield the selected episodes in order; reads no more episodes than needed."""
    return islice(filter(config.matches, episodes), config.limit or None)
