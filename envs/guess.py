"""A text game of several turns without tools: the model guesses a number and hears "Higher." or "Lower."."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from envs.env import Env, EnvArgs
from envs.types import Sample

HIGHEST = 20

_NUMBER = re.compile(r"\d{1,9}")


class GuessEnv(Env):
    """The model writes a number; the last one in its text is its guess.

    Example::

        env = GuessEnv(Sample(id="0", prompt=(), label="7"), EnvArgs(max_turns=5))
        env.step("I say 12.")[0]["obs_str"]        # "Lower."
        env.step("7")                              # ({}, True, {"guess": 7})
        env.reward("7")                            # 1.0
    """

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        self.secret = int(str(sample.label))
        self.args = args

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the game; the prompt holds the rules."""
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Answer a guess with "Higher." or "Lower."; the right one ends the game."""
        guess = _last_number(response_text)
        if guess is None:
            return {"obs_str": "Write a number.", "role": "user"}, False, {"guess": None}
        if guess == self.secret:
            return {}, True, {"guess": guess}
        return {"obs_str": "Higher." if guess < self.secret else "Lower.", "role": "user"}, False, {"guess": guess}

    def reward(self, final_text: str) -> float:
        """Return the best reward if the last guess is right."""
        return self.args.reward(float(_last_number(final_text) == self.secret))

    def solution(self) -> Sequence[str]:
        """Return the number."""
        return [str(self.secret)]


def _last_number(text: str) -> int | None:
    numbers = _NUMBER.findall(text)
    if numbers:
        return int(numbers[-1])
    return None


def samples(split: str, size: int, seed: int) -> list[Sample]:
    """Return games; split and seed determine the secret numbers."""
    rng = Random(f"guess/{split}/{seed}")
    rules = {"role": "user", "content": f"Guess my number from 1 to {HIGHEST}. I say whether it is higher or lower."}
    return [Sample(f"guess-{split}-{seed}-{k}", (rules,), label=str(rng.randint(1, HIGHEST))) for k in range(size)]
