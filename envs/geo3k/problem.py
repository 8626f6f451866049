"""Creates one geometry problem, text and diagram, from a family, a level and random numbers.

Levels mean the same in every family:

- 1: friendly numbers. Angles are multiples of 10, lengths are small, answers are integers.
- 2: harder arithmetic. Angles are multiples of 5, lengths are larger, answers are integers (or whole multiples of a
  root, in `special_right`).
- 3: any integer, an extra given or step in some families, and exact fractions and roots as answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from PIL import Image

from envs.errors import UserError, did_you_mean
from envs.geo3k.canvas import Canvas
from envs.geo3k.families import FAMILIES, Family

__all__ = ["FAMILIES", "LEVELS", "Family", "Problem", "draw_problem", "make_problem", "misread"]

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
    r"""A problem's numbers and texts; `draw_problem` draws its picture.

    Example::

        Problem(family="triangle_angles", level=3, givens=(47, 65), unknown="x", question="Find x.", answer="68",
                reasoning="47 + 65 = 112. 180 - 112 = 68.").key      # "triangle_angles/47-65/x"

    `answer` is an integer or LaTeX spaced as in Geometry3K: "5 \\sqrt { 2 }", "\\frac { 7 } { 2 }".
    """

    family: str
    level: int
    givens: tuple[int, ...]
    unknown: str
    question: str
    answer: str
    reasoning: str

    @property
    def key(self) -> str:
        """The identity of the problem: equal for two problems that differ only in level or drawing."""
        givens = FAMILIES[self.family].canonical(self.givens, self.unknown)
        return f"{self.family}/{'-'.join(map(str, givens))}/{self.unknown}"


def make_problem(family: str, level: int, rng: Random) -> Problem:
    """Sample a problem of a family and a level (1 to 3); raise UserError if either is unknown."""
    if family not in FAMILIES:
        raise UserError("family", "must be a known family", family, did_you_mean(family, FAMILIES))
    if level not in LEVELS:
        raise UserError("level", "must be 1, 2 or 3", level, "give one of 1, 2, 3")
    givens, unknown = FAMILIES[family].sample(rng, level)
    return _solved(family, level, givens, unknown)


def _solved(family: str, level: int, givens: tuple[int, ...], unknown: str) -> Problem:
    reasoning, answer = FAMILIES[family].solve(givens, unknown)
    return Problem(family, level, givens, unknown, FAMILIES[family].question(givens, unknown), answer, reasoning)


def draw_problem(problem: Problem, rng: Random) -> Image.Image:
    """Draw the diagram, 160x128 RGB."""
    return lay_out(problem, rng).image()


def lay_out(problem: Problem, rng: Random) -> Canvas:
    """Return the diagram before it is drawn: the first of a few layouts without conflicts, or the one with fewest."""
    line_width, font_size = rng.choice((1, 1, 2)), rng.choice((14, 15, 15, 16))
    best, fewest = None, 0
    for _ in range(LAYOUT_TRIES):
        canvas = Canvas(line_width, font_size)
        FAMILIES[problem.family].draw(canvas, problem.givens, problem.unknown, rng)
        conflicts = canvas.conflicts
        if best is None or conflicts < fewest:
            best, fewest = canvas, conflicts
        if not conflicts:
            break
    assert best is not None, f"{LAYOUT_TRIES} layouts were tried"
    return best


def misread(problem: Problem, rng: Random) -> Problem | None:
    """Return the problem with one digit misread, solved for the misread number.

    The wrong digit mostly looks like the true one. Reasoning and answer follow from the wrong number and differ from
    the true ones. None if a few tries find no wrong number for which the figure exists.
    """
    for _ in range(MISREAD_TRIES):
        place = rng.randrange(len(problem.givens))
        digits = str(problem.givens[place])
        at = rng.randrange(len(digits))
        choices = LOOK_ALIKES[digits[at]] if rng.random() < 0.7 else "0123456789"
        read = int(digits[:at] + rng.choice(choices) + digits[at + 1 :])
        if read == problem.givens[place] or len(str(read)) != len(digits):
            continue
        givens = (*problem.givens[:place], read, *problem.givens[place + 1 :])
        try:
            wrong = _solved(problem.family, problem.level, givens, problem.unknown)
        except ValueError:  # no such figure
            continue
        if wrong.answer != problem.answer:
            return wrong
    return None
