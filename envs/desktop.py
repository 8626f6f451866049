"""A desktop of which the model sees screenshots: on each it finds the button that can be pressed, and presses it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from envs.env import Env, EnvArgs
from envs.types import Sample

#: Buttons in a row, from 1.
NUM_BUTTONS = 4

_SIDE = 32
_FRAME = (3, 6, 28, 25)
_BUTTON = re.compile(f"[1-{NUM_BUTTONS}]")


class DesktopEnv(Env):
    """The first number of a button that the model writes is the one that it presses; then the next screen comes.

    Each screen has one button with its number; the others are grey and do nothing. An episode has as many screens as
    turns, and each right press earns its share of 1.

    Example::

        env = DesktopEnv(Sample(id="0", prompt=(), metadata={"seed": "0"}), EnvArgs(max_turns=20))
        env.reset()[0]["obs_str"]                  # "Press the button."; the image shows a 4 in the last place
        env.step("4")[2]                           # {"pressed": True, "reward": 0.05}
        env.step("none")[2]                        # {"pressed": False, "reward": 0.0}
    """

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        rng = Random(f"desktop/{sample.metadata['seed']}")
        self.buttons = [rng.randint(1, NUM_BUTTONS) for _ in range(args.max_turns)]
        self.num_pressed = 0

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show the first screen."""
        return self._screenshot(), {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Press a button; the episode ends with the last screen."""
        button = self.buttons[self.num_pressed]
        found = _BUTTON.search(response_text)
        pressed = found is not None and int(found[0]) == button
        info = {"pressed": pressed, "reward": pressed / len(self.buttons)}
        self.num_pressed += 1
        if self.num_pressed == len(self.buttons):
            return {}, True, info
        return self._screenshot(), False, info

    def solution(self) -> Sequence[str]:
        """Return the button of each screen."""
        return [str(button) for button in self.buttons]

    def _screenshot(self) -> dict[str, Any]:
        image = Image.new("RGB", (_SIDE * NUM_BUTTONS, _SIDE), "white")
        draw = ImageDraw.Draw(image)
        for button in range(1, NUM_BUTTONS + 1):
            left = (button - 1) * _SIDE
            is_on = button == self.buttons[self.num_pressed]
            frame = (left + _FRAME[0], _FRAME[1], left + _FRAME[2], _FRAME[3])
            draw.rectangle(frame, outline="black" if is_on else "lightgrey")
            if is_on:
                middle = (left + _SIDE / 2, _SIDE / 2)
                draw.text(middle, str(button), "black", ImageFont.load_default(size=12), anchor="mm")
        return {"obs_str": "Press the button.", "role": "user", "multi_modal_data": {"image": [image]}}


def samples(split: str, size: int, seed: int) -> list[Sample]:
    """Return desktops; split and seed determine their screens."""
    rules = {"role": "user", "content": "Each screen has a button. Press it: write its number."}
    names = [f"{split}-{seed}-{k}" for k in range(size)]
    return [Sample(f"desktop-{name}", (rules,), metadata={"seed": name}) for name in names]
