"""The interface of a family of problems: it samples numbers for a level, solves the problem exactly, and draws it.

Givens are the numbers printed in the diagram, in the order in which the reasoning uses them. If two givens have the
same role (two angles of a triangle), the diagram shows them from left to right in that order. Reading from left to
right then gives the same reasoning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from random import Random
from typing import ClassVar

from envs.geo3k.canvas import Canvas
from envs.geo3k.families.arithmetic import rest, same

Givens = tuple[int, ...]
Case = tuple[Givens, str]  # givens, and the name of the unknown
Solution = tuple[str, str]  # reasoning, and the exact answer

#: Angles are multiples of this many degrees at each level.
ANGLE_STEP = {1: 10, 2: 5, 3: 1}


class Family(ABC):
    """One kind of problem; objects have no state.

    Example::

        family = FAMILIES["triangle_angles"]
        givens, unknown = family.sample(Random(0), level=3)        # (47, 65), "x"
        family.solve(givens, unknown)                              # ("47 + 65 = 112. 180 - 112 = 68.", "68")
        family.draw(canvas, givens, unknown, Random(1))
    """

    name: ClassVar[str]

    @abstractmethod
    def sample(self, rng: Random, level: int) -> Case:
        """Return givens for a level (1, 2 or 3) and the name of the unknown."""

    @abstractmethod
    def solve(self, givens: Givens, unknown: str) -> Solution:
        """Return the reasoning and the exact answer; raise ValueError if no such figure exists."""

    @abstractmethod
    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        """Draw the figure with its givens; the arrangement varies with `rng`."""

    def question(self, givens: Givens, unknown: str) -> str:
        """Return the question; it never contains a given."""
        return "Find x."

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        """Return the givens in a canonical order, so that the same problem always gives the same tuple."""
        return tuple(sorted(givens))


class AngleFamily(Family):
    """A family whose unknown makes a whole together with the given angles, or equals the given one.

    `wholes` has the whole of each unknown of the first kind, in degrees.
    """

    wholes: ClassVar[Mapping[str, int]]

    def solve(self, givens: Givens, unknown: str) -> Solution:
        return solve_angle(givens, self.wholes.get(unknown))


def solve_angle(givens: Givens, whole: int | None) -> Solution:
    """Return the solution of an angle that makes a whole with the given ones; without a whole it equals the first."""
    require_angles(givens)
    if whole is None:
        return same(givens[0])
    return rest(whole, givens)


def pick_angle(rng: Random, level: int, low: int, high: int, steps: Mapping[int, int] = ANGLE_STEP) -> int:
    """Return an angle in [low, high] degrees, a multiple of the level's step; the range must contain one."""
    step = steps[level]
    return step * rng.randint(-(-low // step), high // step)


def require(condition: bool, rule: str) -> None:
    """Raise ValueError with the broken rule unless the condition holds."""
    if not condition:
        raise ValueError(rule)


def require_lengths(givens: Givens) -> None:
    """Raise ValueError unless every given can be a length."""
    require(min(givens) > 0, "a length is above 0")


def require_angles(givens: Givens) -> None:
    """Raise ValueError unless every given can be an angle between two sides: 1 to 179 degrees."""
    require(all(0 < angle < 180 for angle in givens), "an angle lies between 0 and 180 degrees")
