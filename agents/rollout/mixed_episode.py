"""The agent loops of a mixture: each environment has limits, thinking and rewards of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agents.rollout.episode import Episode
from agents.types import Trajectory
from envs.spec import EnvSpec
from envs.success import ENVIRONMENT
from envs.types import Sample


class MixedEpisode(Episode):
    """The agent loops of a mixture's environments, by id: each sample is played by that of its environment.

    Its own limits are the widest of them, for those who only show them.
    """

    def __init__(self, parts: Mapping[str, Episode]) -> None:
        # Shows the limits of the widest part; it plays nothing itself.
        vars(self).update(vars(max(parts.values(), key=lambda part: part.limits.max_turns)))
        self.parts = parts

    def part(self, sample: Sample) -> Episode:
        """Return the agent loop of a sample's environment."""
        return self.parts[sample.metadata[ENVIRONMENT]]

    async def run(self, sample: Sample, *args: Any, **kwargs: Any) -> Trajectory:
        """Play one episode of the sample's environment; see `Episode.run`."""
        return await self.part(sample).run(sample, *args, **kwargs)


def by_entry(spec: EnvSpec, max_turns: int, of_entry: Callable[[EnvSpec, int], Episode]) -> Episode:
    """Return the agent loop that `of_entry(entry, turns)` makes of an entry; in a mixture each part has its own."""
    if not spec.parts:
        return of_entry(spec, max_turns)
    # Each entry has its own limits, thinking and rewards.
    return MixedEpisode({part.id: of_entry(part, min(max_turns, part.max_turns)) for part in spec.entries})
