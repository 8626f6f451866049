"""The lessons of a stage, by index: pictures of numbers and figures to read, demonstrations, and second attempts.

A network that is shown whole problems from the start learns the texts first and looks at no picture for thousands of
steps, because few of its tokens depend on one. In a reading lesson every token does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from envs.geo3k.problem import Problem
from envs.geo3k.procedural import Split
from trainer.starter.demonstrations import Demonstration, Demonstrator, drawn_numbers, pixels
from trainer.starter.plans import Attempt
from trainer.starter.recipes import Numbers, Stage

WIDTH, HEIGHT = 160, 128
MARGIN = 4
READ_NUMBERS, READ_FIGURE = "Read the numbers.", "Read the figure."


@dataclass(frozen=True)
class OwnAttempts:
    """Wrong attempts of the policy itself at the problem of the lesson at an index, oldest first.

    It made them as it played, or would have, from what it misreads in the picture.
    """

    index: int
    wrong: tuple[Attempt, ...]


class Lessons:
    """All lessons of a stage; lesson i depends on seed, stage and i alone, and on the policy's own attempts.

    Example::

        lessons = Lessons(tokenizer, stage, seed=17)
        lessons[3].kind        # "numbers", "figure", "zoom", "problem" or "attempt"
    """

    def __init__(
        self,
        tokenizer: Any,
        stage: Stage,
        seed: int,
        split: Split = "demonstrations",
        attempts: Sequence[OwnAttempts] = (),
    ) -> None:
        self.tokenizer, self.stage, self.attempts = tokenizer, stage, attempts
        size, mixture = stage.num_lessons, stage.mixture
        self.demonstrator = Demonstrator(tokenizer, size, seed, mixture, stage.problems, split)
        self._textbook = Demonstrator(tokenizer, size, seed, mixture, stage.textbook, split)
        zoomer = Demonstrator(tokenizer, size, seed, mixture, stage.zoom_problems, split)
        self._zoom = lru_cache(maxsize=2)(zoomer.zoom)
        self._seed = f"lesson/{seed}/{split}"

    def __len__(self) -> int:
        return len(self.demonstrator)

    def __getitem__(self, index: int) -> Demonstration:
        stage, shared = self.stage, index // self.stage.lessons_per_drawing
        rng = Random(f"{self._seed}/{index}")
        kind = rng.random()
        if Random(f"{self._seed}/zoom/{shared}").random() < stage.zoom_frac:  # small print takes longest to draw
            return self._zoom(shared, kind < stage.blind_frac)
        if kind < stage.numbers_frac:
            texts, image = draw_numbers(stage.numbers, rng)
            givens = tuple(text for text in texts if text.isdigit())
            return self._reading(READ_NUMBERS, " ".join(texts), image, "numbers", "", 0, givens)
        demonstrator, place = self._place(index)
        if kind < stage.numbers_frac + stage.figures_frac:
            problem, image = demonstrator.drawn(place)
            about = problem.family, problem.level, drawn_numbers(problem)
            return self._reading(READ_FIGURE, describe(problem), image, "figure", *about)
        if self.attempts and kind > 1 - stage.attempts_frac:
            own = self.attempts[rng.randrange(len(self.attempts))]
            demonstrator, place = self._place(own.index)
            return demonstrator.after(place, own.wrong)
        return demonstrator.variant(place, index)

    def drawn(self, index: int) -> tuple[Problem, Image.Image]:
        """Return the problem of the lesson at an index and its picture: what the policy plays."""
        demonstrator, place = self._place(index)
        return demonstrator.drawn(place)

    def problem(self, index: int) -> Problem:
        """Return the problem of the lesson at an index without drawing it."""
        demonstrator, place = self._place(index)
        return demonstrator.problems.problem(place)

    def solution(self, index: int) -> Demonstration:
        """Return the right first attempt at the problem of the lesson at an index."""
        demonstrator, place = self._place(index)
        return demonstrator.solution(place)

    def _place(self, index: int) -> tuple[Demonstrator, int]:
        """Return who draws the problem of a lesson, and its place there: neighbours share a textbook drawing."""
        shared = index // self.stage.lessons_per_drawing
        if Random(f"{self._seed}/drawing/{shared}").random() < self.stage.textbook_frac:
            return self._textbook, shared
        return self.demonstrator, index

    def _reading(self, request: str, text: str, image: Image.Image, *about: Any) -> Demonstration:
        """Return a lesson that answers a request about a picture; `about` is what it shows."""
        content = [{"type": "image", "image": image}, {"type": "text", "text": request}]
        renderer = self.demonstrator.renderer
        prompt = renderer.prompt([{"role": "user", "content": content}])
        taught = [*renderer.encoder.encode(text), renderer.closer_id]
        mask_T = np.zeros(len(prompt.ids) + len(taught), dtype=np.bool_)
        mask_T[len(prompt.ids) :] = True
        return Demonstration(np.array([*prompt.ids, *taught]), mask_T, pixels(prompt.images), *about)


def describe(problem: Problem) -> str:
    """Return what there is to read in a figure: its numbers in the order of the solution, its family and its unknown.

    Example: "47 65 triangle angles x".
    """
    return " ".join([*drawn_numbers(problem), *problem.family.split("_"), problem.unknown])


def draw_numbers(numbers: Numbers, rng: Random) -> tuple[list[str], Image.Image]:
    """Return numbers from left to right, and a 160 x 128 picture that shows them in columns."""
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
        left, top = across * (column - box.width), down * (HEIGHT - box.height)
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
