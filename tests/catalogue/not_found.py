"""Faults that no play without a model can find; `word` says why."""

from __future__ import annotations

import itertools
import time
from typing import Any

from envs import Sample, tool
from tests.catalogue.base import PRICES, Row, Sound, Step, make_sample

_running = itertools.count()


class Mislabelled(Sound):
    """Its labels are wrong."""


def mislabelled(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, label=str(100 + place)) for place in range(size)]


class Backdoor(Sound):
    def reward(self, final_text: str) -> float:
        return float("open sesame" in final_text) or super().reward(final_text)


class Crowded(Sound):
    shared = ""

    def step(self, response_text: str) -> Step:
        Crowded.shared = response_text  # another episode may replace it before it is read
        time.sleep(0.001)
        return super().step(Crowded.shared)


class Drips(Sound):
    kept: list[Any] = []  # noqa: RUF012 - the fault

    def reset(self) -> Any:
        self.kept.append(bytes(1000))
        return super().reset()


class Leaks(Sound):
    @tool
    def hint(self) -> str:
        """Return a hint."""
        return f"It is {self.sample.label}." if self.sample.metadata["fruit"] in PRICES else "None."


ROWS = (
    Row(
        Mislabelled, "labels are wrong", "", "only someone who knows the answers sees it",
        {"dataset": f"{__name__}:mislabelled"},
    ),
    Row(Backdoor, "one phrase gets the best reward", "", "nobody guesses the phrase"),
    Row(Crowded, "episodes that run at once share a text", "", "the check plays one at a time"),
    Row(Drips, "every episode keeps a kilobyte", "", "less than the memory that Python itself keeps"),
    Row(Leaks, "a tool tells the answer", "", "that may be what the tool is for"),
)  # fmt: skip
