"""Plays a set of problems with a policy: an agent loop and samples come in, a result for each problem goes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from agents.episode import Episode
from agents.rollout import Problem, RolloutManager, RolloutOptions
from agents.types import EndReason, Trajectory, TrajectoryGroup
from envs.runner import EnvFault, EnvRunner, EpisodeEnv
from envs.types import SampleSource, private
from trainer.figures import EpisodeResult, Evaluation, ProblemResult, summarise
from trainer.metrics import tool_outcomes
from trainer.statistics import Intervals

#: What a step's info holds where the environment has scored an answer of that turn, from 0 to 1.
TOOL_SCORE = "tool_score"
TAGS = ("family", "level")
WITH_TOOL, WITHOUT_TOOL = "with_tool", "without_tool"


@dataclass(frozen=True)
class Way:
    """One way in which a policy is evaluated; `name` is that of tables and files."""

    name: str
    max_turns: int
    use_tools: bool

    @property
    def title(self) -> str:
        """The name as people read it."""
        return self.name.replace("_", " ")


def ways(max_turns: int, has_tools: bool) -> tuple[Way, ...]:
    """Return the ways to evaluate: over all turns and, where there are tools, without them in one.

    >>> [way.name for way in ways(3, has_tools=True)]
    ['with_tool', 'without_tool']
    """
    every = Way(WITH_TOOL, max_turns, True), Way(WITHOUT_TOOL, 1, False)
    return every if has_tools else every[:1]


@dataclass(frozen=True)
class PlayOptions:
    """How a set of problems is played; an episode is right when its reward is `right_reward` or more."""

    num_samples: int = 1
    seed: int = 0
    right_reward: float = 1.0
    max_concurrent: int = 1024
    looks_at_first_turn: bool = False
    tags: tuple[str, ...] = TAGS


class Play:
    """Plays every problem of a set; `results` grows as problems are done, and keeps what there is when it is stopped.

    At most `max_concurrent` problems are in memory with their pictures. The same seed gives the same episodes with the
    embedded engine.

    Example::

        play = Play(episode, samples, build_env, args, PlayOptions(num_samples=4))
        await play.run()
        summarise(play.results, (1, 4), Intervals()).accuracy      # Estimate(0.262, 0.221, 0.305, 256, "bootstrap")
    """

    def __init__(
        self,
        episode: Episode,
        samples: SampleSource,
        build_env: Callable[..., EpisodeEnv],
        args: Any,
        options: PlayOptions,
        on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        self.episode, self.samples, self.options = episode, samples, options
        self._build_env, self._args, self._on_episode = build_env, args, on_episode
        self.results: list[ProblemResult] = []

    async def run(self) -> None:
        """Play all. Raises what the engine raises; a broken episode is a result like any other."""
        options = RolloutOptions(self.options.num_samples, max_concurrent=self.options.max_concurrent)
        manager = RolloutManager(
            self.episode, self._build_env, self._args, self._problem, options, on_episode=self._on_episode
        )
        try:
            while (num_left := len(self.samples) - len(self.results)) > 0:
                first = len(self.results)
                groups = (await manager.collect(min(num_left, self.options.max_concurrent))).groups
                self.results += [self._result(number, group) for number, group in enumerate(groups, first)]
                if self.options.looks_at_first_turn:
                    await self._replay_first_turns(first, groups)
        finally:
            left = enumerate(await manager.close(), len(self.results))
            self.results += [self._result(number, group) for number, group in left if self._is_whole(group)]

    def _problem(self, number: int) -> Problem:
        return Problem(self.samples[number], self.options.seed, number)

    def _is_whole(self, group: TrajectoryGroup) -> bool:
        """Whether a group that was not handed out has all its samples, none of them cut off."""
        ends = [t.end_reason for t in group.trajectories]
        return len(ends) == self.options.num_samples and EndReason.ABORTED not in ends

    def _result(self, number: int, group: TrajectoryGroup) -> ProblemResult:
        metadata = group.trajectories[0].metadata
        tags = {tag: str(metadata[tag]) for tag in self.options.tags if tag in metadata}
        return ProblemResult(number, group.sample_id, tags, tuple(map(self._episode_result, group.trajectories)))

    def _episode_result(self, t: Trajectory) -> EpisodeResult:
        return EpisodeResult(
            reward=t.reward,
            is_right=self._is_right(t),
            end_reason=t.end_reason,
            num_turns=len(t.turns),
            num_tokens=t.num_model_tokens,
            outcomes=tuple(outcome for turn in t.turns for outcome in tool_outcomes(turn)),
            is_first_turn_right=self._first_turn(t) if self.options.looks_at_first_turn else None,
        )

    def _is_right(self, t: Trajectory) -> bool:
        return t.end_reason.is_valid and t.reward >= self.options.right_reward

    def _first_turn(self, t: Trajectory) -> bool | None:
        """Return whether the answer after the first turn was right, None where the episode does not tell."""
        if not (t.end_reason.is_valid and t.turns):
            return False
        score = t.turns[0].info.get(TOOL_SCORE)
        if isinstance(score, Real):
            return float(score) >= 1.0
        return self._is_right(t) if len(t.turns) == 1 else None

    async def _replay_first_turns(self, first: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Complete the results from `first` on with what their environments say of first turns."""
        places = asyncio.Semaphore(self.options.max_concurrent)

        async def complete(number: int, t: Trajectory, result: EpisodeResult) -> EpisodeResult:
            if result.is_first_turn_right is not None:
                return result
            async with places:
                return replace(result, is_first_turn_right=await self._replay(number, t.turns[0].text))

        async def complete_problem(number: int, group: TrajectoryGroup) -> None:
            result = self.results[number]
            both = zip(group.trajectories, result.episodes, strict=True)
            episodes = await asyncio.gather(*(complete(number, t, episode) for t, episode in both))
            self.results[number] = replace(result, episodes=tuple(episodes))

        await asyncio.gather(*(complete_problem(number, group) for number, group in enumerate(groups, first)))

    async def _replay(self, number: int, text: str) -> bool:
        """Return whether a fresh environment of a problem gives a first turn the reward of a right answer."""
        sample = self.samples[number]
        runner = EnvRunner(lambda: self._build_env(private(sample), deepcopy(self._args)), self.episode.limits.env)
        try:
            await runner.open()
            await runner.step(text)
            return await runner.reward(text) >= self.options.right_reward
        except EnvFault:
            return False
        finally:
            await runner.close()


async def evaluate(
    episode: Episode,
    samples: SampleSource,
    build_env: Callable[..., EpisodeEnv],
    args: Any,
    options: PlayOptions,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Evaluation:
    """Play every problem, one at least, and return the figures."""
    play = Play(episode, samples, build_env, args, options, on_episode)
    await play.run()
    return summarise(play.results, (1,), Intervals())
