"""Environments that grade wrongly: too much, too little, or the wrong text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs import Sample, ToolEnv
from tests.catalogue.base import PRICES, Row, Sound, Step, make_sample


class Miser(Sound):
    def reward(self, final_text: str) -> float:
        return 0.0


class Generous(Sound):
    def reward(self, final_text: str) -> float:
        return 1.0


class Silence(Sound):
    def reward(self, final_text: str) -> float:
        return float(not final_text) or super().reward(final_text)


class Parrot(Sound):
    def reward(self, final_text: str) -> float:
        return float(self.sample.metadata["fruit"] in final_text) or super().reward(final_text)


class ThoughtReader(Sound):
    """Its entry keeps thoughts, and the grader reads the last box wherever it is."""


class Capital(Sound):
    def reward(self, final_text: str) -> float:
        return float(final_text.lower() == self.sample.label)


def capitals(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, label=["Apple", "Pear", "Plum"][place % 3]) for place in range(size)]


class Pedant(Sound):
    def reward(self, final_text: str) -> float:
        return float(final_text == f"ANSWER={self.sample.label};")


class Spaced(Sound):
    def reward(self, final_text: str) -> float:
        return float(final_text == self.sample.label)


def spaced(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, label=f" {3 + place}\n") for place in range(size)]


class Rounded(Sound):
    """Its labels are numbers of 32 bits, written as those of 64."""


def rounded(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, label="0.30000001192092896") for place in range(1)]


class Anywhere(Sound):
    def reward(self, final_text: str) -> float:
        return float(str(self.sample.label) in final_text)


class Roughly(Sound):
    def reward(self, final_text: str) -> float:
        return float(any(f"{int(self.sample.label or 0) + more}" in final_text for more in (0, 1)))


class AnyPrice(Sound):
    def reward(self, final_text: str) -> float:
        return float(any(final_text in (str(price), f"\\boxed{{{price}}}") for price in PRICES.values()))


class ReadsItself(Sound):
    seen = ""

    def step(self, response_text: str) -> Step:
        observation, done, info = super().step(response_text)
        self.seen += observation.get("obs_str", "")
        return observation, done, info

    def reward(self, final_text: str) -> float:
        return max(super().reward(final_text), float(str(self.sample.label) in self.seen))

    def solution(self) -> Sequence[str]:
        call = f'{{"name": "price", "arguments": {{"fruit": "{self.sample.metadata["fruit"]}"}}}}'
        return [f"<tool_call>{call}</tool_call>", f"\\boxed{{{self.sample.label}}}"]


class Harsh(Sound):
    def reward(self, final_text: str) -> float:
        return super().reward(final_text) or -1.0


class Marathon(Sound):
    def solution(self) -> Sequence[str]:
        return ['<tool_call>{"name": "price", "arguments": {"fruit": "pear"}}</tool_call>'] * 3 + ["\\boxed{3}"]


class Unlabelled(ToolEnv):
    """Graded by the label, which there is none of."""


def unlabelled(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, label=None) for place in range(size)]


def _data(name: str) -> dict[str, Any]:
    return {"dataset": f"{__name__}:{name}"}


ROWS = (
    Row(Miser, "the right answer gets nothing", "gold answer", "best is 1"),
    Row(Generous, "every text gets the best reward", "wrong answers", "scores 1"),
    Row(Silence, "an empty text gets the best reward", "wrong answers", "empty text"),
    Row(Parrot, "the question itself gets the best reward", "wrong answers", "the question again"),
    Row(ThoughtReader, "an answer in a thought is paid", "wrong answers", "in a thought", {"thinking": "keep"}),
    Row(Capital, "the text is lower-cased, the label is not", "gold answer", "label 'Apple'", _data("capitals")),
    Row(Pedant, "only a format that no prompt names is right", "gold answer", "best is 1"),
    Row(Spaced, "labels have spaces around them", "gold answer", "as a person writes it", _data("spaced")),
    Row(Rounded, "labels are what rounding has left", "gold answer", "'0.3'", _data("rounded")),
    Row(Anywhere, "the label is right anywhere in a text", "wrong answers", "several answers"),
    Row(Roughly, "the next number is right too", "wrong answers", "a wrong answer"),
    Row(AnyPrice, "the answer of another problem is right", "wrong answers", "another's label"),
    Row(ReadsItself, "what a tool has shown is paid", "reward source", "scores 1"),
    Row(Harsh, "a reward is below the declared worst", "wrong answers", "below the reward_min_val"),
    Row(Marathon, "the solution takes more turns than there are", "gold answer", "takes 4 turns"),
    Row(Unlabelled, "the samples have no label to grade by", "contract", "has no label", _data("unlabelled")),
)
