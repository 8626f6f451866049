"""The lessons of a stage, as rows for `trainer.sft`: images to read, demonstrations, and second attempts.

A network that is shown whole problems from the start learns the texts first and looks at no image for thousands of
steps, because few of its tokens depend on one. In a reading lesson every token does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from envs.env import Env, EnvArgs
from envs.geo3k.problem import Problem
from envs.geo3k.procedural import ProceduralGeo3k, Split
from envs.types import MadeSamples, Sample
from starter.attempts import OwnAttempts
from starter.demonstrations import Row, conversation, solved, zoomed
from starter.plans import Plan, PlannedTurn
from starter.recipes import LADDER, Numbers, Stage
from starter.textbook.problems import problems_of

WIDTH = 160
HEIGHT = 128
MARGIN = 4
READ_NUMBERS = "Read the numbers."
READ_FIGURE = "Read the figure."


class ReadingEnv(Env):
    """One turn: the reward is best for the label, to the letter."""

    def __init__(self, sample: Sample, args: EnvArgs) -> None:
        self._label = str(sample.label)
        self._args = args

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start; the prompt holds the image."""
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """End the episode."""
        return {}, True, {}

    def reward(self, final_text: str) -> float:
        """Return the best reward for the label."""
        return self._args.reward(float(final_text == self._label))

    def solution(self) -> Sequence[str]:
        """Return the label."""
        return [self._label]


class NumberImages(MadeSamples):
    """Images of numbers to read, as a rung of the ladder has them: the data set of `starter/registry.yaml`.

    Example: `NumberImages("heldout", size=8, rung=4)[0].label` is "47 3".
    """

    def __init__(self, split: Split, size: int, seed: int = 0, rung: int = 0) -> None:
        super().__init__(size)
        self._numbers = LADDER[rung]
        self._name = f"numbers-{rung}-{split}-{seed}"

    def make(self, place: int) -> Sample:
        """Return the image at a place."""
        name = f"{self._name}-{place}"
        texts, image = draw_numbers(self._numbers, Random(name))
        return reading_sample(name, READ_NUMBERS, image, " ".join(texts))


def reading_sample(name: str, request: str, image: Image.Image, label: str) -> Sample:
    """Return a request about an image, and what is to be read there."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": request}]
    return Sample(name, ({"role": "user", "content": content},), label)


@dataclass(frozen=True)
class Lessons:
    """The lessons of a stage; lesson i depends on seed, stage and i alone, and on the policy's own attempts.

    Example: `Lessons(stage, seed=17).row(3)["messages"]` is a whole conversation.
    """

    stage: Stage
    seed: int
    split: Split = "demonstrations"
    attempts: Sequence[OwnAttempts] = ()

    def row(self, index: int) -> Row:
        """Return the lesson at an index."""
        stage = self.stage
        rng = Random(f"lesson/{self.seed}/{self.split}/{index}")
        (kind,) = rng.choices(list(stage.shares), list(stage.shares.values()))
        if kind == "numbers":
            return _read(NumberImages(self.split, stage.num_lessons, self.seed, stage.rung)[index])
        if kind == "zoom":
            problem, image, boxes = self._problems(stage.zoomed).drawn(index)
            return zoomed(problem, image, () if rng.random() < stage.blind_frac else boxes)
        if kind == "attempt" and self.attempts:
            own = rng.choice(self.attempts)
            return solved(own.problem, own.image, Plan.after(own.wrong, own.problem, stage.mixture, rng))
        problem, image = self._problems(rng.choice(stage.problems)).item(index)
        if kind == "figure":
            return _read(reading_sample(problem.key, READ_FIGURE, image, describe(problem)))
        return solved(problem, image, Plan.draw(problem, stage.mixture, rng))

    def line(self, index: int) -> str:
        """Return the lesson at an index as a line of a file; of one that cannot be drawn, an empty text."""
        try:
            return json.dumps(self.row(index)) + "\n"
        except (AssertionError, RuntimeError) as error:  # one figure in a hundred thousand has no layout that fits
            print(f"lesson {index} is left out: {error!r}", flush=True)
            return ""

    def _problems(self, options: Mapping[str, Any]) -> ProceduralGeo3k:
        return problems_of(self.split, self.stage.num_lessons, self.seed, **options)


def _read(sample: Sample) -> Row:
    return conversation(sample, ReadingEnv(sample, EnvArgs(1)), [PlannedTurn(str(sample.label))])


def describe(problem: Problem) -> str:
    """Return what there is to read in a figure: its numbers in the order of the solution, its family and its unknown.

    Example: "47 65 triangle angles x".
    """
    numbers = [str(problem.givens[place]) for place in problem.drawn_givens]
    return " ".join([*numbers, *problem.family.split("_"), problem.unknown])


def draw_numbers(numbers: Numbers, rng: Random) -> tuple[list[str], Image.Image]:
    """Return numbers from left to right, and a 160 x 128 image that shows them in columns."""
    texts = [_number(rng.randint(1, numbers.digits), rng) for _ in range(rng.randint(1, numbers.most))]
    if numbers.unknown and rng.random() < 0.5:
        texts.insert(rng.randint(0, len(texts)), "x")
    image = Image.new("L", (WIDTH, HEIGHT), 255)
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, 5) if numbers.lines else 0):
        points = [(rng.randrange(WIDTH), rng.randrange(HEIGHT)) for _ in range(2)]
        draw.line([*points[0], *points[1]], fill=0, width=rng.choice((1, 1, 2)))
    column = WIDTH / len(texts)
    spread = numbers.spread * rng.random()
    for place, text in enumerate(texts):
        size = rng.randint(*numbers.sizes)
        box = _ink(text, size)
        if box.width > column - MARGIN:
            box = _ink(text, int(size * (column - MARGIN) / box.width))
        across, down = (0.5 + spread * (rng.random() - 0.5) for _ in range(2))
        left = across * (column - box.width)
        top = down * (HEIGHT - box.height)
        image.paste(box, (round(place * column + left), round(top)))
    return texts, image.convert("RGB")


def _number(digits: int, rng: Random) -> str:
    return str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))


def _ink(text: str, size: int) -> Image.Image:
    """Return a text in black on a white box with a border of one pixel."""
    font = ImageFont.load_default(size)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
    box = Image.new("L", (right - left + 2, bottom - top + 2), 255)
    ImageDraw.Draw(box).text((1 - left, 1 - top), text, fill=0, font=font)
    return box
