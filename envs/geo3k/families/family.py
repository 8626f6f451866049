"""What a family of problems is: it samples numbers for a level, solves them exactly, and draws them.

Givens are the numbers printed in the diagram, in the order in which the reasoning uses them. Where two givens play the
same part (two angles of a triangle), the diagram shows them in that order from left to right, so that a reader who
reads from left to right writes the same reasoning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import ClassVar

from envs.geo3k.canvas import Canvas

Givens = tuple[int, ...]

#: Angles are multiples of this many degrees at each level.
ANGLE_STEP = {1: 10, 2: 5, 3: 1}


class Family(ABC):
    """One kind of problem; its objects hold no state.

    Example::

        family = FAMILIES["triangle_angles"]
        givens, unknown = family.sample(Random(0), level=3)        # (47, 65), "x"
        family.solve(givens, unknown)                              # ("47 + 65 = 112. 180 - 112 = 68.", "68")
        family.draw(canvas, givens, unknown, Random(1))
    """

    name: ClassVar[str]

    @abstractmethod
    def sample(self, rng: Random, level: int) -> tuple[Givens, str]:
        """Return givens of a level (1, 2 or 3) and the variant tag that says what is asked."""

    @abstractmethod
    def solve(self, givens: Givens, unknown: str) -> tuple[str, str]:
        """Return the reasoning and the exact answer; raise ValueError where no such figure exists."""

    @abstractmethod
    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        """Draw the figure with its givens; the arrangement varies with `rng`."""

    def question(self, givens: Givens, unknown: str) -> str:
        """Return the question; it never tells a given."""
        return "Find x."

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        """Return the givens so that the same problem gives the same tuple, in whatever order it shows them."""
        return tuple(sorted(givens))


def pick_angle(rng: Random, level: int, low: int, high: int) -> int:
    """Return an angle in [low, high] degrees that is round enough for the level; the range must hold one."""
    step = ANGLE_STEP[level]
    return step * rng.randint(-(-low // step), high // step)


def require(condition: bool, rule: str) -> None:
    """Raise ValueError naming the rule that the givens break."""
    if not condition:
        raise ValueError(rule)


def require_angles(givens: Givens) -> None:
    """Raise ValueError unless every given can be an angle between two sides: 1 to 179 degrees."""
    require(all(0 < angle < 180 for angle in givens), "an angle lies between 0 and 180 degrees")
