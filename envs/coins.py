"""A game with images and rewards on the way: each turn the model takes one of the coins that it sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from envs.env import Env, EnvArgs
from envs.types import Sample

#: Turns of a game, and coins that lie on the table.
NUM_TURNS = 5
NUM_SHOWN = 4
HIGHEST = 9

_SIDE = 32
_NUMBER = re.compile(r"\d{1,9}")


class CoinsEnv(Env):
    """The last number that the model writes is the coin that it takes; the next coin comes in its place.

    A coin earns its share of the most that five turns can earn, a number that is on no coin nothing.

    Example::

        env = CoinsEnv(Sample(id="0", prompt=(), metadata={"coins": [3, 9, 1, 4, 7, 2, 5, 8]}), EnvArgs(max_turns=5))
        env.reset()[0]["obs_str"]                  # "Take a coin."; the image shows 3 9 1 4
        env.step("9")[2]                           # {"coin": 9, "reward": 0.2, "state": (3, 7, 1, 4)}
        env.step("5")[2]                           # {"coin": None, "reward": 0.0, "state": (3, 7, 1, 4)}
    """

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        coins = sample.metadata["coins"]
        self.shown = list(coins[:NUM_SHOWN])
        self.next = list(coins[NUM_SHOWN:])
        self.num_taken = 0

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show the first coins."""
        return self._table(), {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Take the coin that the text names; the game ends with its fifth turn."""
        self.num_taken += 1
        numbers = _NUMBER.findall(response_text)
        coin = int(numbers[-1]) if numbers else None
        if coin in self.shown:
            self.shown[self.shown.index(coin)] = self.next.pop(0)
        else:
            coin = None
        info = {"coin": coin, "reward": (coin or 0) / (NUM_TURNS * HIGHEST), "state": tuple(self.shown)}
        if self.num_taken == NUM_TURNS:
            return {}, True, info
        return self._table(), False, info

    def solution(self) -> Sequence[str]:
        """Return the highest coin of each turn: a coin that is left stays, so nothing is gained by waiting."""
        shown, texts = [*self.shown], []
        for coin in self.next[:NUM_TURNS]:
            texts.append(str(max(shown)))
            shown[shown.index(max(shown))] = coin
        return texts

    def _table(self) -> dict[str, Any]:
        image = Image.new("RGB", (_SIDE * NUM_SHOWN, _SIDE), "white")
        draw = ImageDraw.Draw(image)
        font = ImageFont.load_default(size=24)
        for place, coin in enumerate(self.shown):
            draw.text(((place + 0.5) * _SIDE, _SIDE / 2), str(coin), "black", font, anchor="mm")
        return {"obs_str": "Take a coin.", "role": "user", "multi_modal_data": {"image": [image]}}


def samples(split: str, size: int, seed: int) -> list[Sample]:
    """Return games; split and seed determine the coins."""
    rng = Random(f"coins/{split}/{seed}")
    rules = {"role": "user", "content": f"Take a coin {NUM_TURNS} times: write its number. It is what you earn."}
    return [
        Sample(
            f"coins-{split}-{seed}-{k}",
            (rules,),
            metadata={"coins": [rng.randint(1, HIGHEST) for _ in range(NUM_SHOWN + NUM_TURNS)]},
        )
        for k in range(size)
    ]
