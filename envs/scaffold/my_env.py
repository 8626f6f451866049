"""my_env: the model looks up prices and adds them. Replace it by your own task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random

from envs import Sample, ToolEnv, ToolError, tool

SYSTEM_PROMPT = "Look the prices up with the tool. Write the final answer as \\boxed{}."
PRICES = {"apple": 3, "pear": 4, "plum": 1, "melon": 9}


class MyEnv(ToolEnv):
    """One episode. `self.sample` is the task, `self.args` the registry entry's settings, `self.turn` counts from 1."""

    @tool
    def price(self, fruit: str) -> int:
        """Return the price of a fruit.

        Args:
            fruit: its name, such as apple
        """
        if fruit not in PRICES:
            raise ToolError(f"There is no such fruit. Fruits: {', '.join(PRICES)}.")
        return PRICES[fruit]

    def solution(self) -> Sequence[str]:
        """Return a perfect model's text for each turn; `python -m envs.check` expects the best reward for it."""
        calls = [{"name": "price", "arguments": {"fruit": fruit}} for fruit in self.sample.metadata["basket"]]
        looking = "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
        return [looking, f"\\boxed{{{self.sample.label}}}"]


def samples(split: str, size: int, seed: int) -> list[Sample]:
    """Return the tasks of a split; the same arguments give the same tasks."""
    return [make_sample(split, seed, index) for index in range(size)]


def make_sample(split: str, seed: int, index: int) -> Sample:
    """Return one task: the question, and the label that the answer is compared with."""
    rng = Random(f"my_env/{split}/{seed}/{index}")
    basket = rng.sample(sorted(PRICES), k=2)
    question = f"What do one {basket[0]} and one {basket[1]} cost together?"
    return Sample(
        id=f"my_env-{split}-{seed}-{index}",
        prompt=({"role": "user", "content": question},),
        label=str(sum(PRICES[fruit] for fruit in basket)),
        metadata={"basket": basket},
    )
