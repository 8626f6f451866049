"""Creates one geometry problem, text and diagram, from a family, a level and random numbers.

Levels mean the same in every family:

- 1: friendly numbers. Angles are multiples of 10, lengths are small, answers are integers.
- 2: harder arithmetic. Angles are multiples of 5, lengths are larger, answers are integers (or whole multiples of a
  root, in `special_right`).
- 3: any integer, an extra given or step in some families, and exact fractions and roots as answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from PIL import Image

from envs.errors import UserError, did_you_mean
from envs.geo3k.canvas import Canvas
from envs.geo3k.families import FAMILIES, Family
from envs.geo3k.families.family import Solution

__all__ = [
    "FAMILIES",
    "LEVELS",
    "Family",
    "Problem",
    "draw_problem",
    "make_problem",
    "misread",
    "read_as",
    "with_rival",
]

LEVELS = (1, 2, 3)

LAYOUT_TRIES = 16
MISREAD_TRIES = 8

#: Digits that look alike at low resolution.
LOOK_ALIKES = {
    "0": "869",
    "1": "74",
    "2": "7",
    "3": "85",
    "4": "91",
    "5": "63",
    "6": "85",
    "7": "12",
    "8": "36",
    "9": "40",
}


@dataclass(frozen=True)
class Problem:
    r"""A problem's numbers and texts; `draw_problem` draws its image.

    Example::

        Problem(family="triangle_angles", level=3, givens=(47, 65), unknown="x", question="Find x.", answer="68",
                reasoning="47 + 65 = 112. 180 - 112 = 68.").key      # "triangle_angles/47-65/x"

    `answer` is an integer, a decimal rounded to a tenth, or LaTeX spaced as in Geometry3K: "5 \\sqrt { 2 }",
    "\\frac { 7 } { 2 }". In an overprinted image a digit of `rival`, the givens of another problem, is printed over the
    one that is meant.
    """

    family: str
    level: int
    givens: tuple[int, ...]
    unknown: str
    question: str
    answer: str
    reasoning: str
    rival: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """The identity of the problem: equal for two problems that differ only in level or drawing."""
        givens = self.canonical_givens()
        return f"{self.family}/{'-'.join(map(str, givens))}/{self.unknown}"

    @property
    def drawn_givens(self) -> Sequence[int]:
        """The places of the givens that the image shows; the question tells the others."""
        return range(len(self.givens))

    def canonical_givens(self) -> tuple[int, ...]:
        """Return the givens in an order that is the same for problems that differ only in the drawing."""
        return FAMILIES[self.family].canonical(self.givens, self.unknown)

    def solve(self, givens: tuple[int, ...]) -> Solution:
        """Return the reasoning and the exact answer for given numbers; ValueError if no such figure exists."""
        return FAMILIES[self.family].solve(givens, self.unknown)


def make_problem(family: str, level: int, rng: Random) -> Problem:
    """Sample a problem of a family and a level (1 to 3); raise UserError if either is unknown."""
    if family not in FAMILIES:
        raise UserError("family", "must be a known family", family, did_you_mean(family, FAMILIES))
    if level not in LEVELS:
        raise UserError("level", "must be 1, 2 or 3", level, "give one of 1, 2, 3")
    kind = FAMILIES[family]
    givens, unknown = kind.sample(rng, level)
    reasoning, answer = kind.solve(givens, unknown)
    return Problem(family, level, givens, unknown, kind.question(givens, unknown), answer, reasoning)


Box = tuple[int, int, int, int]


def draw_problem(problem: Problem, rng: Random) -> Image.Image:
    """Draw the diagram, 160x128 RGB: the first of a few layouts without conflicts, else the one with the fewest."""
    return draw_with_boxes(problem, rng)[0]


def draw_with_boxes(problem: Problem, rng: Random) -> tuple[Image.Image, list[Box]]:
    """Draw the diagram; return it and the left, top, right and bottom edges of every label, in pixels."""
    canvas = _lay_out(problem, rng)
    return canvas.image(), canvas.label_boxes


def _lay_out(problem: Problem, rng: Random) -> Canvas:
    line_width = rng.choice((1, 1, 2))
    font_size = rng.choice((14, 15, 15, 16))
    overprint = next(iter(_differences(problem.givens, problem.rival or problem.givens)), None)
    best = None
    fewest = 0
    for _ in range(LAYOUT_TRIES):
        canvas = Canvas(line_width, font_size, overprint)
        FAMILIES[problem.family].draw(canvas, problem.givens, problem.unknown, rng)
        conflicts = canvas.conflicts
        if best is None or conflicts < fewest:
            best = canvas
            fewest = conflicts
        if not conflicts:
            break
    assert best is not None, f"{LAYOUT_TRIES} layouts were tried"
    return best


def _differences(givens: Sequence[int], others: Sequence[int]) -> list[tuple[int, int]]:
    return [(given, other) for given, other in zip(givens, others, strict=True) if given != other]


def misread(problem: Problem, rng: Random) -> Problem | None:
    """Return the problem with one digit misread, solved for the misread number.

    The wrong digit mostly looks like the true one. Reasoning and answer follow from the wrong number and differ from
    the true ones. None if a few tries find no wrong number for which the figure exists.
    """
    for _ in range(MISREAD_TRIES):
        place = rng.choice(problem.drawn_givens)
        digits = str(problem.givens[place])
        at = rng.randrange(len(digits))
        if rng.random() < 0.7:
            choices = LOOK_ALIKES[digits[at]]
        else:
            choices = "0123456789"
        read = int(digits[:at] + rng.choice(choices) + digits[at + 1 :])
        if read == problem.givens[place] or len(str(read)) != len(digits):
            continue
        if wrong := read_as(problem, (*problem.givens[:place], read, *problem.givens[place + 1 :])):
            return wrong
    return None


def with_rival(problem: Problem, rng: Random) -> Problem:
    """Return the problem with a second reading of its image: another digit in a number that stands there once."""
    wrong = misread(problem, rng)
    if wrong is None or any(problem.givens.count(n) > 1 for n, _ in _differences(problem.givens, wrong.givens)):
        return problem
    return replace(problem, rival=wrong.givens)


def read_as(problem: Problem, givens: tuple[int, ...]) -> Problem | None:
    """Return the problem with other numbers, solved for them; None if there is no such figure, or the answer is equal.

    Example: of "47 + 65 = 112. 180 - 112 = 68.", read as (41, 65), it is "41 + 65 = 106. 180 - 106 = 74.".
    """
    try:
        reasoning, answer = problem.solve(givens)
    except ValueError:  # no such figure
        return None
    if answer == problem.answer:
        return None
    return replace(problem, givens=givens, answer=answer, reasoning=reasoning)
