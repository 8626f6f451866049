"""Families about area and perimeter: rectangle, triangle, parallelogram, trapezoid."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from envs.geo3k.canvas import Canvas, Point
from envs.geo3k.families.arithmetic import calculation, multiply, proportion
from envs.geo3k.families.family import Case, Family, Givens, Solution, require, require_lengths
from envs.geo3k.families.layout import LABEL_MARGIN, flipped, rotated

LENGTHS = {1: (2, 12), 2: (6, 30), 3: (11, 60)}  # what lengths a level draws from


def _lengths(rng: Random, level: int) -> tuple[int, int]:
    """Return two lengths of a level, the longer one first; at level 2 the shorter one has one digit."""
    low, high = LENGTHS[level]
    first = rng.randint(low, high)
    second = rng.randint(low, 9 if level == 2 else high)
    return max(first, second), min(first, second)


def _sway(rng: Random) -> float:
    return rng.uniform(-0.13, 0.13)


class _Figure(Family):
    """A family whose unknown is `area` or `perimeter`."""

    def question(self, givens: Givens, unknown: str) -> str:
        return f"Find the {unknown} of the figure."


class _FourSided(_Figure):
    """Two lengths are given, whose product is the area and whose doubled sum is the perimeter."""

    def sample(self, rng: Random, level: int) -> Case:
        return _lengths(rng, level), rng.choice(("area", "perimeter"))

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_lengths(givens)
        if unknown == "perimeter":
            half = sum(givens)
            return f"{calculation(givens[0], '+', givens[1])} {calculation(2, '*', half)}", str(2 * half)
        steps, area = multiply(*givens)
        return " ".join(steps), str(area)

    @staticmethod
    def label_sides(canvas: Canvas, corners: Sequence[Point], givens: Givens, rng: Random) -> None:
        """Label one side of each length."""
        a, b, c, d = corners
        canvas.side(*((a, b) if rng.random() < 0.5 else (d, c)), str(givens[0]), (a + c) / 2)
        canvas.side(*((a, d) if rng.random() < 0.5 else (b, c)), str(givens[1]), (a + c) / 2)


class Rectangle(_FourSided):
    """Width and height are given; unknown `area` or `perimeter`."""

    name = "rectangle"

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        if givens[0] != givens[1]:
            width = min(max(givens[0] / givens[1], 1.15), 1.9)
        else:
            width = 1.0
        shape = rotated([0j, complex(width), complex(width, 1), 1j], _sway(rng))
        a, b, c, d = canvas.fit(shape, rng, LABEL_MARGIN, stretch=1)
        canvas.polygon((a, b, c, d))
        for corner, start, end in ((a, b, d), (b, c, a), (c, d, b), (d, a, c)):
            canvas.right_angle(corner, start, end)
        self.label_sides(canvas, (a, b, c, d), givens, rng)


class Parallelogram(_FourSided):
    """Unknown `area`: base and height are given; `perimeter`: two neighbouring sides."""

    name = "parallelogram"

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        base = rng.uniform(1.3, 1.6)
        lean = rng.uniform(0.4, 0.55)
        foot = complex(lean)
        shape = [0j, complex(base), complex(base + lean, -1), complex(lean, -1), foot]
        shape = flipped(rotated(shape, _sway(rng)), rng)
        a, b, c, d, foot = canvas.fit(shape, rng, LABEL_MARGIN, stretch=1)
        canvas.polygon((a, b, c, d))
        if unknown == "perimeter":
            self.label_sides(canvas, (a, b, c, d), givens, rng)
            for start, end, count in ((a, b, 1), (d, c, 1), (a, d, 2), (b, c, 2)):
                canvas.ticks(start, end, count, at=0.2)
            return
        canvas.dashed(d, foot)
        canvas.right_angle(foot, b, d)
        canvas.side(a, b, str(givens[0]), (a + c) / 2)
        canvas.side(d, foot, str(givens[1]), a)


class TriangleArea(_Figure):
    """Base and height are given; unknown `area`. The right-angled form has its legs given. Level 3 may give halves."""

    name = "triangle_area"

    def sample(self, rng: Random, level: int) -> Case:
        base, height = _lengths(rng, level)
        return (base + (base * height % 2 if level < 3 else 0), height), "area"

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_lengths(givens)
        base, height = givens
        return proportion(base, height, 2)

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        right = rng.random() < 0.3
        width = rng.uniform(1.4, 1.8)
        at = 0.0 if right else rng.uniform(0.3, 0.45)
        shape = [0j, complex(width), complex(width * at, -1), complex(width * at)]
        shape = flipped(rotated(shape, _sway(rng)), rng)
        a, b, apex, foot = canvas.fit(shape, rng, LABEL_MARGIN if right else (10, 19), stretch=1)
        canvas.polygon((a, b, apex))
        canvas.right_angle(foot, b, apex)
        canvas.side(a, b, str(givens[0]), apex)
        if right:
            canvas.side(a, apex, str(givens[1]), b)
        else:
            canvas.dashed(apex, foot)
            canvas.side(apex, foot, str(givens[1]), a, at=0.6)


class TrapezoidArea(_Figure):
    """Both parallel sides (the shorter one first) and the height are given; unknown `area`."""

    name = "trapezoid_area"

    def sample(self, rng: Random, level: int) -> Case:
        long, height = _lengths(rng, level)
        short = rng.randint(max(2, long // 3), max(2, long - 1))
        if level < 3 and (short + long) * height % 2:
            long += 1
        return (short, long if long > short else short + 2, height), "area"

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_lengths(givens)
        short, long, height = givens
        require(short < long, "the second parallel side is the longer one")
        steps, answer = proportion(short + long, height, 2)
        return f"{calculation(short, '+', long)} {steps}", answer

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        return givens

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        short = rng.uniform(0.8, 1.0)
        lean = rng.uniform(0.25, 0.45)
        long = short + lean + rng.uniform(0.25, 0.45)
        shape = [0j, complex(long), complex(lean + short, -1), complex(lean, -1), complex(lean)]
        if rng.random() < 0.3:
            shape = [point.conjugate() for point in shape]
        shape = flipped(rotated(shape, _sway(rng)), rng)
        a, b, c, d, foot = canvas.fit(shape, rng, (12, 19), stretch=1)
        canvas.polygon((a, b, c, d))
        canvas.dashed(d, foot)
        canvas.right_angle(foot, b, d)
        inside = (a + c) / 2
        canvas.side(d, c, str(givens[0]), inside)
        canvas.side(a, b, str(givens[1]), inside)
        canvas.side(d, foot, str(givens[2]), a)
