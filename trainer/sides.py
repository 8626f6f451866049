"""The rollout side of a run, as the training loop sees it: what gives a step its groups and takes its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from agents.rollout import ManagerState, Problem, RolloutManager, RolloutOptions, StepRollout, derive_seed
from agents.types import Trajectory, TrajectoryGroup
from envs.data import epoch_order
from trainer.display import Display
from trainer.evaluation import PlayOptions, evaluate, ways
from trainer.figures import Evaluation
from trainer.setup import RunParts
from trainer.weight_sync import Probe

#: Is told of an episode of an evaluation: its phase, the way in which it was played, and the episode.
OnEvaluated = Callable[[str, str, Trajectory], None]


class Rollouts(Protocol):
    """Hands out the groups of step after step, as a `RolloutManager` does."""

    async def collect(self, num_groups: int) -> StepRollout:
        """Return the groups of the next step, as many as that or what there is."""
        ...

    def state(self) -> ManagerState:
        """Return where this stands, between two calls of `collect`."""
        ...

    async def close(self) -> tuple[TrajectoryGroup, ...]:
        """Return all groups that were begun and never handed out."""
        ...


class RolloutSide(Protocol):
    """Where groups come from and weights go.

    Example::

        await side.start(version=0)
        rollouts = side.rollouts(on_episode, ManagerState())
        groups = (await rollouts.collect(8)).groups
        await side.push(version=1)          # the weights after training on them
    """

    @property
    def weight_version(self) -> int:
        """Which weights write now."""
        ...

    @property
    def events(self) -> Sequence[str]:
        """What has happened to servers so far, for people."""
        ...

    async def start(self, version: int) -> None:
        """Make ready to play with the learner's weights, which are of that version."""
        ...

    async def push(self, version: int) -> tuple[float, Probe | None]:
        """Take the learner's weights; return the seconds that took, and a probe where one was made."""
        ...

    def rollouts(self, on_episode: Callable[[Trajectory], None], state: ManagerState) -> Rollouts:
        """Return what hands out the groups of the steps to come; `on_episode` is told of each episode as it ends."""
        ...

    async def evaluate(self, phase: str, display: Display, on_episode: OnEvaluated) -> dict[str, Evaluation]:
        """Return accuracy on held-out problems by way of playing, nothing where there are none."""
        ...

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the summary of a run says of this side, given its metrics."""
        ...

    async def close(self) -> None:
        """Free what was started."""
        ...


class Playing:
    """Episodes of the run's environment, played by its engine."""

    def __init__(self, parts: RunParts) -> None:
        self.parts, self.config = parts, parts.config
        self._order: tuple[int, list[int]] = (-1, [])  # an epoch, and the order of its problems

    @property
    def weight_version(self) -> int:
        """Which weights write now."""
        return self.parts.engine.weight_version

    @property
    def events(self) -> Sequence[str]:
        """What has happened to servers so far."""
        return self.parts.sync.carrier.events

    async def start(self, version: int) -> None:
        """Start the engine and prove that it runs the learner's weights."""
        await self.parts.sync.start(version)

    async def push(self, version: int) -> tuple[float, Probe | None]:
        """Bring the learner's weights to the engine."""
        return await self.parts.sync.push(version)

    def rollouts(self, on_episode: Callable[[Trajectory], None], state: ManagerState) -> RolloutManager:
        """Return what plays the run's problems."""
        config, parts = self.config, self.parts
        names = {field.name for field in fields(RolloutOptions)}
        return RolloutManager(
            parts.episode(parts.spec.max_turns, config.rollout.temperature),
            parts.build_env,
            parts.env_args(parts.spec.max_turns),
            self._problem,
            RolloutOptions(**config.rollout.model_dump(include=names)),
            on_episode=on_episode,
            state=state,
        )

    def _problem(self, number: int) -> Problem:
        """Return the problem of a number: a seeded order of all, epoch after epoch.

        Its seed is that of the step which takes it when every step takes as many as it is to train on.
        """
        samples = self.parts.train_samples
        epoch, place = divmod(number, len(samples))
        if self._order[0] != epoch:
            self._order = epoch, epoch_order(len(samples), self.config.seed, epoch)
        step, index = divmod(number, self.config.rollout.problems_per_step)
        return Problem(samples[self._order[1][place]], derive_seed(self.config.seed, "train", step + 1), index)

    async def evaluate(self, phase: str, display: Display, on_episode: OnEvaluated) -> dict[str, Evaluation]:
        """Return accuracy on the held-out problems: over all turns and, where there are tools, without them in one."""
        source = self.parts.eval_samples
        if source is None or not len(source):
            return {}
        name, all_ways = f"evaluate {phase}", ways(self.parts.spec.max_turns, self.parts.has_tools)
        display.begin(name, len(all_ways) * len(source))
        options = PlayOptions(
            seed=derive_seed(self.config.seed, "evaluate"),
            right_reward=self.parts.spec.reward_max_val,
            max_concurrent=self.config.rollout.max_concurrent,
        )
        results = {}
        for way in all_ways:
            results[way.name] = await evaluate(
                self.parts.episode(way.max_turns, self.config.rollout.eval_temperature, way.use_tools),
                source,
                self.parts.build_env,
                self.parts.env_args(way.max_turns),
                options,
                on_episode=functools.partial(on_episode, phase, way.name),
            )
            display.say(f"{name}: {results[way.name].accuracy.value:.3f} {way.title}")
        return results

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return how many problems were left out."""
        return {"num_overlong": self.parts.num_overlong}

    async def close(self) -> None:
        """End the engine."""
        await self.parts.engine.close()
