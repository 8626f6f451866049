"""Families about lines parallel to a side: midsegments and similar triangles."""

from __future__ import annotations

from random import Random

from envs.geo3k.canvas import Canvas
from envs.geo3k.families.arithmetic import divide, mean, proportion, twice
from envs.geo3k.families.family import Case, Family, Givens, Solution, require, require_lengths
from envs.geo3k.families.layout import flipped, rotated, upright


class Midsegment(Family):
    """A segment joins midpoints of two sides, which ticks mark.

    Unknown `midsegment` or `base` of a triangle gives the other of the two; `trapezoid` (from level 2) gives both
    parallel sides, the shorter one first. Level 3 may give halves.
    """

    name = "midsegment"

    def sample(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("midsegment", "base") if level == 1 else ("midsegment", "base", "trapezoid"))
        high = {1: 20, 2: 40, 3: 60}[level]
        if unknown == "base":
            return (rng.randint(2, high),), unknown
        if unknown == "midsegment":
            return (rng.randint(4, 2 * high) if level == 3 else 2 * rng.randint(2, high),), unknown
        short = rng.randint(3, high)
        more = rng.randint(1, high)
        return (short, short + (more if level == 3 else 2 * more)), unknown

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_lengths(givens)
        if unknown == "base":
            return twice(givens[0])
        if unknown == "midsegment":
            return divide(givens[0], 2)
        require(givens[0] < givens[1], "the second parallel side is the longer one")
        return mean(*givens)

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        wide = unknown == "trapezoid"
        top = rng.uniform(0.55, 0.75) if wide else 0.0
        lean = rng.uniform(0.35, 0.6)
        a = 0j
        b = complex(top + 2 * lean if wide else 1.6)
        d = complex(lean, -1)
        c = complex(lean + top, -1)
        if not wide:
            c = d = complex(rng.uniform(0.5, 1.1), -1)
        shape = flipped(rotated([a, b, c, d], upright(rng, 0.12)), rng)
        a, b, c, d = canvas.fit(shape, rng, (10, 19), stretch=1)
        left = (a + d) / 2
        right = (b + c) / 2
        canvas.polygon((a, b, c, d) if wide else (a, b, c))
        canvas.line(left, right)
        for start, end, count in ((a, left, 1), (left, d, 1), (b, right, 2), (right, c, 2)):
            canvas.ticks(start, end, count)
        texts = {
            "base": (f"{givens[0]}", "x"),
            "midsegment": ("x", f"{givens[0]}"),
            "trapezoid": ("x", f"{givens[-1]}"),
        }
        above, below = texts[unknown]
        canvas.side(left, right, above, d)
        canvas.side(a, b, below, d)
        if wide:
            canvas.side(d, c, str(givens[0]), a)


class SimilarTriangles(Family):
    """A segment parallel to the base cuts two sides of a triangle in the same ratio; one of the four parts is x.

    Unknown `upper` or `lower` says which part. Givens: the other part of the same side, the part across from x, and
    the part diagonal to x, so that x = first * second / third. Levels 1 and 2 have integer answers.
    """

    name = "similar_triangles"

    def sample(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("upper", "lower"))
        if level == 3:
            return (rng.randint(2, 15), rng.randint(2, 15), rng.randint(2, 15)), unknown
        low, high = {1: (1, 5), 2: (2, 9)}[level]
        a, b, c, d = (rng.randint(low, high) for _ in range(4))
        # Parts a*c and b*c of one side, a*d and b*d of the other: x = a*d.
        return (b * d, a * c, b * c), unknown

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_lengths(givens)
        return proportion(*givens)

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        first, second, third = givens
        return (min(first, second), max(first, second), third)

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        cut = min(max(self._share_above(givens, unknown), 0.42), 0.58)
        apex = complex(rng.uniform(0.6, 1.0), -1)
        d = apex * (1 - cut)
        e = apex + (1.6 - apex) * cut
        shape = flipped(rotated([0j, 1.6 + 0j, apex, d, e], upright(rng, 0.12)), rng)
        a, b, apex, d, e = canvas.fit(shape, rng, (24, 10), stretch=1)
        canvas.polygon((a, b, apex))
        canvas.line(d, e)
        canvas.arrow(a, b, 0.55)
        canvas.arrow(d, e, 0.6)
        same, across, diagonal = (str(given) for given in givens)
        if unknown == "upper":
            near = ("x", same)
            far = (across, diagonal)
        else:
            near = (same, "x")
            far = (diagonal, across)
        for start, middle, (above, below), inside in ((a, d, near, b), (b, e, far, a)):
            canvas.side(apex, middle, above, inside)
            canvas.side(middle, start, below, inside)

    def _share_above(self, givens: Givens, unknown: str) -> float:
        _, across, diagonal = givens
        share = across / (across + diagonal)
        if unknown == "upper":
            return share
        return 1 - share
