"""Adds up the reward of an episode: what its steps earned, and what its last text earns.

A step gives its reward as ``info["reward"]``, a finite number; ``Env.reward`` grades the last text. An environment
whose steps all give one may leave `reward` out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from envs.contract import EnvFault, EpisodeEnv, checked_number
from envs.off_loop import awaited

#: The key of a step's info that holds the reward of the turn.
KEY = "reward"


class EpisodeReward:
    """The reward of an episode while it is played.

    Example::

        earned = EpisodeReward()
        earned.add({"reward": 0.5})      # 0.5
        earned.add({})                   # 0.0
        earned.total(1.0)                # 1.5
    """

    def __init__(self) -> None:
        self._of_turns: list[float] = []
        self._all_given = True

    def add(self, info: Mapping[str, Any]) -> float:
        """Count the reward in a step's info and return it; 0 where there is none.

        Raises:
            EnvFault: it is not a finite number.
        """
        if KEY not in info:
            self._all_given = False
            return 0.0
        reward = checked_number(info[KEY], f"info[{KEY!r}] must be")
        self._of_turns.append(reward)
        return reward

    def total(self, of_text: float | None) -> float:
        """Return the reward of the episode; `of_text` is that of the last text, None where `reward` is left out.

        Raises:
            EnvFault: it is left out, and a step gave none either; or the sum is beyond a float32.
        """
        if of_text is None:
            if not self._all_given:
                rule = "reward must be a finite number, got None; does it return?"
                raise EnvFault(f"{rule} It may be left out only where every step gives info[{KEY!r}]")
            of_text = 0.0
        # Unchanged where turns give none: a sum could round it.
        if not self._of_turns:
            return of_text
        return checked_number(math.fsum([*self._of_turns, of_text]), "the sum of all rewards must be")


def reward_of_text(env: EpisodeEnv | None, final_text: str) -> float | None:
    """Return what `env.reward` gives for the last text, awaited and checked; None where it is left out."""
    grade = getattr(env, "reward", None)
    if grade is None:
        value = None
    else:
        value = awaited(grade(final_text))
    if value is None:
        return None
    return checked_number(value, "reward must be")
