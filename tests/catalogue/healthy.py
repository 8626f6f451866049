"""Sound environments that look odd, and of which the check must find nothing."""

from __future__ import annotations

import asyncio
import functools
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from envs import Env, Sample, ToolEnv, ToolError, tool
from envs.wrapper import Wrapper
from tests.catalogue.base import PRICES, Row, Sound, Step, make_sample


class Slow(Sound):
    def step(self, response_text: str) -> Step:
        time.sleep(0.02)
        return super().step(response_text)


class Big(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Show a large image of a fruit."""
        return Image.new("RGB", (2000, 1500), "white")


class Wordy(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Return a page about a fruit."""
        return "word " * 15_000


class Images(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Show a fruit in several ways."""
        sizes = [("L", 64), ("RGBA", 96), ("P", 128), ("1", 32), ("I;16", 64)]
        return ["Here.", *(Image.new(mode, (side, side)) for mode, side in sizes)]


class Caesar(Env):
    """A game without tools, chance or label: count down to zero, and an early claim costs a point."""

    def __init__(self, sample: Sample, args: Any) -> None:
        self.left, self.penalty = 2, 0.0

    def reset(self) -> Any:
        return {"obs_str": "Count down from 2.", "role": "user"}, {}

    def step(self, response_text: str) -> Step:
        if response_text != str(self.left):
            self.penalty -= 1.0
            return {"obs_str": "No.", "role": "user"}, False, {}
        self.left -= 1
        return ({}, True, {}) if self.left == 0 else ({"obs_str": "Yes.", "role": "user"}, False, {})

    def reward(self, final_text: str) -> float:
        return max(-2.0, self.penalty - self.left) if self.left else 1.0 + self.penalty

    def solution(self) -> Sequence[str]:
        return ["2", "1"]


class Penalties(Sound):
    def reward(self, final_text: str) -> float:
        return 0.0 if super().reward(final_text) == 0.0 else -0.1 * min(self.turn, 10)


class Toolless(ToolEnv):
    """A question and an answer."""


class Wrapped(Wrapper):
    """The sound one, in a wrapper."""

    def __init__(self, sample: Sample, args: Any) -> None:
        super().__init__(Sound(sample, args))


class Async(Sound):
    @tool
    async def price(self, fruit: str) -> Any:
        """Return the price of a fruit."""
        await asyncio.sleep(0.001)
        return PRICES.get(fruit, "none")


class Tidy(Sound):
    """Has a process and a folder for each episode, and ends both."""

    child: subprocess.Popen[bytes] | None = None

    def reset(self) -> Any:
        self.folder = tempfile.TemporaryDirectory()
        self.child = subprocess.Popen(["sleep", "60"])
        (Path(self.folder.name) / "state").write_text("new")
        return super().reset()

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.folder.cleanup()
            self.child = None
        super().close()


class Cached(Sound):
    """Loads 40 MiB once, and prints a line of news."""

    @staticmethod
    @functools.cache
    def table() -> bytearray:
        print("loading the table")
        return bytearray(b"x" * 40 * 2**20)

    def reset(self) -> Any:
        self.table()
        return super().reset()


class Seeded(Sound):
    """Draws at random from a generator of its own."""

    @tool
    def price(self, fruit: str) -> Any:
        """Return a price."""
        return random.Random(f"{self.sample.id} {fruit!r}").random()


class Refuses(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Return the price of a fruit."""
        if fruit not in PRICES:
            raise ToolError("There is no such fruit.", "sold_out")
        return {"fruit": fruit, "prices": [PRICES[fruit], None, 0.5, True]}


class Many(Sound):
    """Has more tools than the check tries."""

    def __init__(self, sample: Sample, args: Any) -> None:
        super().__init__(sample, args)
        for number in range(12):
            self.add_tool(self._named(f"shelf_{number}"))

    @staticmethod
    def _named(name: str) -> Any:
        def shelf(place: int = 0) -> str:
            """Return what is on a shelf."""
            return f"{name} {place}"

        shelf.__name__ = name
        return shelf


class Thinker(Sound):
    """Gets thoughts, and takes them out itself."""

    def reward(self, final_text: str) -> float:
        return super().reward(final_text.rpartition("</think>")[2])


class Stranger(Env):
    """Nobody knows its right answer, and it never ends."""

    def __init__(self, sample: Sample, args: Any) -> None:
        pass

    def reset(self) -> Any:
        return {"obs_str": "You stand in a wood.", "role": "user"}, {}

    def step(self, response_text: str) -> Step:
        return {"obs_str": "You walk.", "role": "user"}, False, {"steps": 1}

    def reward(self, final_text: str) -> float:
        return 0.5


class Choices(Sound):
    """Several choices; the label is a letter that the question holds too."""


def choices(split: str, size: int, seed: int) -> list[Sample]:
    question = ({"role": "user", "content": "What is 1 + 2? A: 3, B: 4, C: 5. Answer: with a letter."},)
    return [make_sample(place, prompt=question, label="ABC"[place % 3]) for place in range(size)]


def unlabelled(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, label=None) for place in range(size)]


class Inline(Sound):
    """On the event loop."""


class Process(Sound):
    """In a process of its own."""


def _data(name: str) -> dict[str, Any]:
    return {"dataset": f"{__name__}:{name}"}


ROWS = (
    Row(Slow, "every step takes 20 ms", "", ""),
    Row(Big, "images of 3 million pixels", "", ""),
    Row(Wordy, "results of 75,000 characters", "", ""),
    Row(Images, "images in results, in five modes", "", ""),
    Row(Caesar, "a game without chance, tools and labels", "", "", {**_data("unlabelled"), "reward_min_val": -4.0}),
    Row(Penalties, "rewards are penalties", "", "", {"reward_max_val": 0.0, "reward_min_val": -1.0}),
    Row(Toolless, "no tools", "", ""),
    Row(Wrapped, "a wrapper around another", "", ""),
    Row(Async, "an async tool", "", ""),
    Row(Tidy, "a process and a folder for each episode, both ended", "", ""),
    Row(Cached, "40 MiB loaded once", "", ""),
    Row(Seeded, "chance from a generator of its own", "", ""),
    Row(Refuses, "a tool that refuses with ToolError", "", ""),
    Row(Many, "13 tools", "", ""),
    Row(Thinker, "gets thoughts and takes them out", "", "", {"thinking": "keep"}),
    Row(Stranger, "no right answer and no end", "", "", _data("unlabelled")),
    Row(Choices, "the question names all labels", "", "", _data("choices")),
    Row(Inline, "on the event loop", "", "", {"isolation": "inline"}),
    Row(Process, "in a process of its own", "", "", {"isolation": "process"}),
)
