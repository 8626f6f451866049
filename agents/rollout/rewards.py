"""Computes the reward of an episode from reward functions, each with a weight.

A reward function takes a finished `Trajectory`, whose `reward` is the environment's own, and returns a number, or None
where it does not apply. It may be a coroutine function, or a judge (`agents.endpoints.judge`)::

    def brevity(trajectory: Trajectory) -> float:
        return -trajectory.num_model_tokens / 256
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agents.endpoints.judge import Judge, Verdict, load_judge
from agents.types import EndReason, Trajectory
from envs.checking.error_location import located_line
from envs.config.plugins import place_of
from envs.contract import EnvFault, checked_number
from envs.errors import UserError
from envs.execution.coroutines import await_within
from envs.execution.runner import CallNames, call_within
from envs.spec import ENV_REWARD, REWARD, EnvLimits

RewardFunction = Callable[[Trajectory], float | Awaitable[float | None] | None]

#: Begins the error of an episode for which every reward function returned None.
NONE_APPLIES = "no reward function applies"


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
        if isinstance(function, Judge):  # whose own settings limit the time of each request
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

        rewards = RewardSum.load(["answer", "my.py:brevity@0.1"])
        scored = await rewards.score(trajectory, limits)
        scored.reward, scored.rewards         # (0.98, {"answer": 1.0, "brevity": -0.2})
    """

    terms: tuple[WeightedReward, ...] = ()

    @classmethod
    def load(cls, references: Sequence[str], field: str = "--reward") -> RewardSum:
        """Return the functions that settings name.

        Raises:
            UserError: one cannot be imported or takes other parameters, or two have one name.
        """
        terms = [_term(field, reference) for reference in references]
        names = [term.name for term in terms]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(field, "must name each reward once", twice[0], "rename one, or add up their weights")
        if any(term.name == ENV_REWARD and term.function for term in terms):
            raise UserError(field, "must not have the name of the environment's own reward", ENV_REWARD, "rename it")
        return cls(tuple(terms))

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


def _term(field: str, reference: str) -> WeightedReward:
    name, weight, found = REWARD.load_weighted(field, reference)
    if isinstance(found, Path):
        found = load_judge(field, found)
    return WeightedReward(name, weight, found)


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
