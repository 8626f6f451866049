"""Computes the reward of an episode from reward functions, each with a weight.

A reward function takes a finished `Trajectory`, whose `reward` is the environment's own, and returns a number, or None
where it does not apply. It may be a coroutine function, or a `Judge`::

    def brevity(trajectory: Trajectory) -> float:
        return -trajectory.num_model_tokens / 256
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agents.types import EndReason, Trajectory
from envs.checking.error_location import located_line
from envs.config.plugins import place_of
from envs.contract import EnvFault, checked_number
from envs.execution.coroutines import await_within
from envs.execution.runner import CallNames, call_within
from envs.spec import ENV_REWARD, EnvLimits

RewardFunction = Callable[[Trajectory], float | Awaitable[float | None] | None]

#: Begins the error of an episode for which every reward function returned None.
NONE_APPLIES = "no reward function applies"


class Verdict(NamedTuple):
    """What a judge says of an episode: a value from 0 to 1, and its text."""

    value: float
    text: str


class Judge(ABC):
    """What judges episodes in place of a function; it limits its own time."""

    @abstractmethod
    async def verdict(self, trajectory: Trajectory) -> Verdict:
        """Return the verdict on an episode. Raises `EnvFault` where there is none."""


@dataclass(frozen=True)
class WeightedReward:
    """A reward function with its weight; no function: the environment's own reward."""

    name: str
    weight: float
    function: RewardFunction | Judge | None = None

    async def value(self, trajectory: Trajectory, limits: EnvLimits) -> float | Verdict | None:
        """Return the function's value for an episode, None where it does not apply.

        Raises:
            EnvFault: it raises, takes too long or returns something else.
        """
        function = self.function
        if function is None:
            return trajectory.reward
        who = f"the reward function {self.name}"
        names = CallNames(f"{who}, sample {trajectory.sample_id}", who, who)
        if isinstance(function, Judge):
            return await await_within(None, names, function.verdict(trajectory))

        # The value is checked where it is made, within the time limit: the methods of a stranger's number may hang.
        def checked(value: object) -> float | None:
            if value is None:
                return None
            return checked_number(value, f"{who} must return")

        def called() -> float | Awaitable[float | None] | None:
            value = function(trajectory)
            if inspect.isawaitable(value):
                return value
            return checked(value)

        async def awaited(value: Awaitable[float | None]) -> float | None:
            return checked(await value)

        value = await call_within(limits.step_timeout_s, limits.inline, names, called)
        if inspect.isawaitable(value):
            return await await_within(limits.step_timeout_s, names, awaited(value))
        return value


@dataclass(frozen=True)
class RewardSum:
    """The weighted sum of reward functions. Without any, an episode keeps the environment's own reward.

    Example::

        rewards = load_rewards(["answer", "my.py:brevity@0.1"])   # of agents.endpoints.judge
        scored = await rewards.score(trajectory, limits)
        scored.reward, scored.rewards         # (0.98, {"answer": 1.0, "brevity": -0.2})
    """

    terms: tuple[WeightedReward, ...] = ()

    def __str__(self) -> str:
        return " + ".join(f"{term.weight:g} {term.name}" for term in self.terms)

    async def score(self, trajectory: Trajectory, limits: EnvLimits) -> Trajectory:
        """Return the trajectory with its rewards; it ends as `reward_error` if it gets none.

        That is where a function raises, hangs or returns no number, and where no function applies.
        """
        if not self.terms or not trajectory.end_reason.is_valid:
            return trajectory
        values = {ENV_REWARD: trajectory.reward}
        verdicts: dict[str, str] = {}
        parts: list[float] = []
        for term in self.terms:
            try:
                value = await term.value(trajectory, limits)
            except EnvFault as fault:
                return _unscored(replace(trajectory, verdicts=verdicts), values, f"{fault}\n\n{_summary(term, fault)}")
            if isinstance(value, Verdict):
                verdicts[term.name] = value.text
                value = value.value
            if value is not None:
                values[term.name] = value
                parts.append(term.weight * value)
        if not parts:
            return _unscored(trajectory, values, f"{NONE_APPLIES}: all returned None")
        try:
            rule = f"the weighted sum {self} must be"
            total = checked_number(_sum(parts), rule)
            # Rewards of turns may cancel out in the sum and still be too large by themselves.
            weight = sum(term.weight for term in self.terms if term.function is None)
            turns = tuple(replace(turn, reward=checked_number(weight * turn.reward, rule)) for turn in trajectory.turns)
        except EnvFault as fault:
            return _unscored(trajectory, values, str(fault))
        return replace(trajectory, reward=total, rewards=values, verdicts=verdicts, turns=turns)


def _unscored(trajectory: Trajectory, values: Mapping[str, float], error: str) -> Trajectory:
    """Return an episode without a reward; it keeps the environment's own, and those of other functions."""
    return replace(trajectory, reward=0.0, rewards=values, end_reason=EndReason.REWARD_ERROR, error=error)


def _summary(term: WeightedReward, fault: EnvFault) -> str:
    """Return what failed in one line: "the reward function f failed: KeyError: 'x' (my.py:12)"."""
    who = f"the reward function {term.name}"
    line = located_line(str(fault), default=place_of(term.function))
    if line.startswith(who):
        return line
    return f"{who} failed: {line}"


def _sum(parts: Sequence[float]) -> float:
    """Return the exact sum, NaN where it is beyond a float."""
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):
        return math.nan
