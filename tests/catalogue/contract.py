"""Environments that break the contract: missing methods, wrong values, changed samples, another result each time."""

from __future__ import annotations

import itertools
import math
from typing import Any

from PIL import Image, ImageDraw

from envs import Env, Sample, tool
from envs.types import message_images
from tests.catalogue.base import Row, Sound, Step, make_sample

_count = itertools.count()
_baskets: list[str] = []


class Headless:
    def reset(self) -> Any:
        return {}, {}


class Hollow(Sound):
    def __new__(cls, sample: Sample, args: Any) -> Any:
        return object()


class Unready(Sound):
    def __init__(self, sample: Sample, args: Any) -> None:
        self.sample = sample


class Bare(Sound):
    def step(self, response_text: str) -> Any:
        return "It costs 3."


class Forgetful(Sound):
    def reset(self) -> Any:
        super().reset()


class Vague(Sound):
    def step(self, response_text: str) -> Any:
        observation, _, info = super().step(response_text)
        return observation, None, info


class Ventriloquist(Sound):
    def format_observation(self, observation: dict[str, Any]) -> Any:
        return {"role": "assistant", "content": observation["obs_str"]}


class Unframed(Sound):
    def format_observation(self, observation: dict[str, Any]) -> Any:
        return observation["obs_str"]


class Unkeyed(Sound):
    def step(self, response_text: str) -> Step:
        _, done, info = super().step(response_text)
        return {"text": "It costs 3."}, done, info

    def format_observation(self, observation: dict[str, Any]) -> Any:
        return Env.format_observation(self, observation)


class Complex(Sound):
    def step(self, response_text: str) -> Step:
        observation, done, info = super().step(response_text)
        return observation, done, {**info, "price": 3 + 0j}


class NotANumber(Sound):
    def reward(self, final_text: str) -> float:
        return math.nan


class Unpaid(Sound):
    def reward(self, final_text: str) -> Any:
        super().reward(final_text)


class Truthy(Sound):
    def reward(self, final_text: str) -> Any:
        return super().reward(final_text) == 1.0


class Bonus(Sound):
    def reward(self, final_text: str) -> float:
        return super().reward(final_text) or 5.0 * (final_text == "The answer is 7.")


class Endless(Sound):
    def step(self, response_text: str) -> Step:
        observation, _, info = super().step(response_text)
        return observation, False, info


class Shared(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Return the price of a fruit, and what was asked before."""
        _baskets.append(fruit)
        return ", ".join(_baskets)


class Eraser(Sound):
    def step(self, response_text: str) -> Step:
        self.sample.metadata.clear()  # type: ignore[attr-defined]
        return super().step(response_text)


class Painter(Sound):
    def reset(self) -> Any:
        (image,) = message_images(self.sample.prompt)
        ImageDraw.Draw(image).line((0, 0, 63, 63), fill="red")
        return super().reset()


def make_images(split: str, size: int, seed: int) -> list[Sample]:
    def prompt() -> Any:
        parts = [{"type": "image", "image": Image.new("RGB", (64, 64))}, {"type": "text", "text": "What is 1 + 2?"}]
        return ({"role": "user", "content": parts},)

    return [make_sample(place, prompt=prompt()) for place in range(size)]


class Whimsical(Sound):
    def reset(self) -> Any:
        super().reset()
        return {"obs_str": f"Today is day {next(_count)}."}, {}

    def format_observation(self, observation: dict[str, Any]) -> Any:
        return observation.get("messages") or Env.format_observation(self, observation)


class Restless(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Return the price of a fruit."""
        return next(_count)


class Lonely(Sound):
    def __init__(self, sample: Sample) -> None:
        super().__init__(sample)


class Moody(Sound):
    def reward(self, final_text: str) -> float:
        return super().reward(final_text) or next(_count) / 1e6


class Broken(Sound):
    def step(self, response_text: str) -> Step:
        return {"obs_str": self.sample.metadata["colour"]}, False, {}


class OneText(Sound):
    def solution(self) -> Any:
        return "\\boxed{3}"


class Unopened(Sound):
    def reset(self) -> Any:
        self.log: list[str] = []
        return super().reset()

    def close(self) -> None:
        self.log.clear()
        super().close()


class Slammed(Sound):
    def close(self) -> None:
        raise OSError("the door is stuck")


class ClosedTwice(Sound):
    is_open = True

    def close(self) -> None:
        if not self.is_open:
            raise OSError("closed already")
        self.is_open = False


class Observed(Env):
    def __init__(self, sample: Sample, args: Any) -> None:
        self.sample = sample

    def reset(self) -> Any:
        return {}, {}

    def step(self, response_text: str) -> Step:
        return {}, True, {}

    def reward(self, final_text: str) -> float:
        return float(final_text == self.sample.label)


ROWS = (
    Row(Headless, "the class has no step and no reward", "error", "a class without step"),
    Row(Lonely, "building takes the sample alone", "error", "must take sample, args, got (sample"),
    Row(Hollow, "building returns an object without methods", "contract", "must return an environment with"),
    Row(Unready, "its own __init__ does not call that of ToolEnv", "contract", "must begin with super().__init__"),
    Row(Bare, "step returns a text", "contract", "step must return (dict, bool, dict)"),
    Row(Forgetful, "reset returns nothing", "contract", "does it return?"),
    Row(Vague, "done is None", "contract", "step must return (dict, bool, dict)"),
    Row(Ventriloquist, "observations have the role of the model", "contract", "must not have the role"),
    Row(Unframed, "format_observation returns a text", "contract", "format_observation must return"),
    Row(Unkeyed, "an observation has neither text nor images", "contract", "must hold obs_str"),
    Row(Complex, "the info holds a complex number", "contract", "price is recorded as text only", is_remark=True),
    Row(NotANumber, "the reward is NaN", "contract", "must be a finite number"),
    Row(Unpaid, "reward returns nothing", "contract", "does it return?"),
    Row(Truthy, "the reward is a bool", "contract", "write float("),
    Row(Bonus, "a reward is beyond the declared best", "wrong answers", "above the reward_max_val"),
    Row(Endless, "done is never true", "contract", "never returns done=True"),
    Row(Shared, "episodes share a list", "deterministic", "differs"),
    Row(Eraser, "an episode clears its sample's metadata", "deterministic", "changes its prompt or metadata"),
    Row(
        Painter, "an episode draws on its sample's image", "deterministic", "changes its prompt or metadata",
        {"dataset": f"{__name__}:make_images"},
    ),
    Row(Whimsical, "the first observation differs each time", "deterministic", "the first observation differs"),
    Row(Restless, "the answer of a step differs each time", "deterministic", "the answer of step 1 differs"),
    Row(Moody, "the reward differs each time", "deterministic", "the rewards are"),
    Row(Broken, "step raises", "contract", "KeyError: 'colour' (contract.py:"),
    Row(OneText, "solution returns a text in place of a list", "contract", "solution must return a list of texts"),
    Row(Unopened, "close needs what reset makes", "closing", "AttributeError"),
    Row(Slammed, "close raises", "closing", "the door is stuck"),
    Row(ClosedTwice, "a second close raises", "closing", "closed already"),
    Row(
        Observed, "the entry asks to observe faults of a step without tools", "contract", "needs a ToolEnv",
        {"on_tool_fault": "observe"},
    ),
)  # fmt: skip
