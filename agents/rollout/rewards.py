"""Computes the reward of an episode from reward functions, each with a weight.

A reward function takes a finished `Trajectory`, whose `reward` is the environment's own, and returns a number::

    def brevity(trajectory: Trajectory) -> float:
        return -trajectory.num_model_tokens / 256
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agents.types import EndReason, Trajectory
from envs.contract import EnvFault, checked_number
from envs.errors import UserError
from envs.execution.runner import CallNames, call_within
from envs.spec import ENV_REWARD, REWARD, EnvLimits

RewardFunction = Callable[[Trajectory], float]


@dataclass(frozen=True)
class WeightedReward:
    """A reward function with its weight; no function: the environment's own reward."""

    name: str
    weight: float
    function: RewardFunction | None = None


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
        terms = [WeightedReward(*REWARD.load_weighted(field, reference)) for reference in references]
        names = [term.name for term in terms]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(field, "must name each reward once", twice[0], "rename one, or add up their weights")
        return cls(tuple(terms))

    def __str__(self) -> str:
        return " + ".join(f"{term.weight:g} {term.name}" for term in self.terms)

    async def score(self, trajectory: Trajectory, limits: EnvLimits) -> Trajectory:
        """Return the trajectory with its rewards; it is broken if a function raises, hangs or returns no number."""
        if not self.terms or not trajectory.end_reason.is_valid:
            return trajectory
        values = {ENV_REWARD: trajectory.reward}
        try:
            for term in self.terms:
                if term.function is not None:
                    who = f"the reward function {term.name}"
                    names = CallNames(f"{who}, sample {trajectory.sample_id}", who, who)
                    values[term.name] = await call_within(
                        limits.step_timeout_s, limits.inline, names, _value, term, trajectory
                    )
        except EnvFault as fault:
            end = EndReason.ENV_TIMEOUT if fault.timed_out else EndReason.ENV_ERROR
            return replace(trajectory, reward=0.0, end_reason=end, error=str(fault))
        total = math.fsum(term.weight * values[term.name] for term in self.terms)
        return replace(trajectory, reward=total, rewards=values)


def _value(term: WeightedReward, trajectory: Trajectory) -> float:
    assert term.function is not None
    return checked_number(term.function(trajectory), f"the reward function {term.name} must return")
