"""Families about angles where lines meet: on a line, around a point, at crossings, and at parallel lines."""

from __future__ import annotations

import cmath
import math
from random import Random

from envs.geo3k.canvas import Canvas, Point
from envs.geo3k.families.arithmetic import calculation
from envs.geo3k.families.family import AngleFamily, Case, Givens, Solution, pick_angle, require, require_angles
from envs.geo3k.families.layout import TURN, arrange, flipped, in_order, mirrored, rotated, soften

LEAST_SHOWN = 38  # degrees; a narrower corner has no room for its label


def _texts(givens: Givens) -> list[str]:
    return [f"{angle}°" for angle in givens]


class LinearPair(AngleFamily):
    """Angles that together make a straight line; unknown `one`, `two` or `right` says what is given.

    `two` gives two of three angles (levels 2 and 3), `right` one angle beside a right angle.
    """

    name = "linear_pair"
    wholes = {"one": 180, "two": 180, "right": 90}  # noqa: RUF012 - read only

    def sample(self, rng: Random, level: int) -> Case:
        unknown = rng.choice({1: ("one", "right"), 2: ("one", "two", "right"), 3: ("one", "two", "two")}[level])
        if unknown == "one":
            return (pick_angle(rng, level, 25, 155),), unknown
        if unknown == "right":
            return (pick_angle(rng, level, 15, 75),), unknown
        first = pick_angle(rng, level, 25, 115)
        return (first, pick_angle(rng, level, 25, 155 - first)), unknown

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        whole = 90 if unknown == "right" else 180
        *known, asked = soften((*givens, whole - sum(givens)), LEAST_SHOWN)
        parts = list(zip(known, _texts(givens), strict=True))
        parts.insert(rng.randint(0, len(parts)), (asked, "x°"))
        if unknown == "right":
            parts.insert(rng.choice((0, 2)), (90.0, ""))
        flip = rng.random() < 0.5  # below the line, the order from left to right is reversed
        tilt = rng.uniform(-0.2, 0.2)
        direction = math.pi
        rays = [cmath.rect(1, math.pi)]
        for angle, _ in parts:
            direction += math.radians(angle)
            rays.append(cmath.rect(0.9, direction))
        if flip:
            rays = [ray.conjugate() for ray in rays]
        rays[-1] = -rays[0] * rng.uniform(0.85, 1.15)
        vertex, *ends = canvas.fit(rotated([0j, *rays], tilt), rng, (7, 14), stretch=1)
        canvas.line(ends[0], ends[-1])
        for end in ends[1:-1]:
            canvas.line(vertex, end)
        for k, (_, text) in enumerate(parts):
            if text:
                canvas.angle(vertex, ends[k], ends[k + 1], text)
            else:
                canvas.right_angle(vertex, ends[k], ends[k + 1])


class VerticalAngles(AngleFamily):
    """Lines crossing at one point; unknown `vertical` (equal), `adjacent` (180 degrees together) or `three_lines`.

    `three_lines` (level 3) gives two angles next to each other; x is the third, or the one across from it.
    """

    name = "vertical_angles"
    wholes = {"adjacent": 180, "three_lines": 180}  # noqa: RUF012 - read only

    def sample(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("vertical", "adjacent") if level < 3 else ("vertical", "adjacent", "three_lines"))
        if unknown != "three_lines":
            return (pick_angle(rng, level, 20, 160),), unknown
        first = pick_angle(rng, level, 25, 115)
        return (first, pick_angle(rng, level, 25, 155 - first)), unknown

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        wedges = [*givens, 180 - sum(givens)]
        shown = soften(wedges, LEAST_SHOWN + 4)
        direction = rng.uniform(-0.3, 0.3)
        rays = [direction]
        for angle in shown:
            rays.append(rays[-1] + math.radians(angle))
        rays = rays[:-1] + [ray + math.pi for ray in rays[:-1]]
        start = rng.randrange(len(rays))
        count = len(rays)
        asked = {"vertical": [count // 2], "adjacent": [1, 3], "three_lines": [2, 5]}[unknown]
        first = start - start % len(shown)  # the givens begin at either end of the first line
        points = [cmath.rect(1, ray) for ray in rays]
        middle = [cmath.rect(1, (rays[k] + rays[k + 1]) / 2) for k in (first, (first + 1) % (count - 1))]
        if len(givens) == 2 and middle[0].real > middle[1].real:
            points = mirrored(points)
        vertex, *ends = canvas.fit([0j, *points], rng, (7, 7), stretch=1.35)
        for k in range(count // 2):
            canvas.line(ends[k], ends[k + count // 2])
        for k, text in [*enumerate(_texts(givens)), (rng.choice(asked), "x°")]:
            k += first
            canvas.angle(vertex, ends[k % count], ends[(k + 1) % count], text)
        canvas.expect_order(len(givens))


class AnglesAtPoint(AngleFamily):
    """Angles around a point that together make 360 degrees; `of_three` gives two, `of_four` (level 3) three."""

    name = "angles_at_point"
    wholes = {"of_three": 360, "of_four": 360}  # noqa: RUF012 - read only

    def sample(self, rng: Random, level: int) -> Case:
        first = pick_angle(rng, level, 70, 150)
        if level == 3 and rng.random() < 0.5:
            second = pick_angle(rng, level, 50, 110)
            return (first, second, pick_angle(rng, level, 50, min(110, 310 - first - second))), "of_four"
        return (first, pick_angle(rng, level, max(70, 190 - first), min(160, 310 - first))), "of_three"

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        *shown, last = soften((*givens, 360 - sum(givens)), 50)

        def build() -> tuple[tuple[list[float], list[int]], list[Point]]:
            phase = rng.uniform(0, TURN)
            wedges, places = arrange(shown, last, phase + TURN / 2 / (len(shown) + 1), rng)
            bounds = [phase]
            for angle in wedges:
                bounds.append(bounds[-1] + math.radians(angle))
            middles = [cmath.rect(1, (bounds[place] + bounds[place + 1]) / 2) for place in places[:-1]]
            return (bounds, places), middles

        bounds, places = in_order(build)
        rays = [cmath.rect(rng.uniform(0.9, 1.1), direction) for direction in bounds[:-1]]
        vertex, *ends = canvas.fit([0j, *rays], rng, stretch=1.1)
        for end in ends:
            canvas.line(vertex, end)
        for place, text in zip(places, [*_texts(givens), "x°"], strict=True):
            canvas.angle(vertex, ends[place], ends[(place + 1) % len(ends)], text)
        canvas.expect_order(len(givens))


#: Pairs of sectors at the upper and the lower crossing: 0 is above the line and right of the transversal, the
#: others follow anticlockwise.
PAIRS = {
    "corresponding": ((0, 0), (1, 1), (2, 2), (3, 3)),
    "alternate": ((2, 0), (3, 1), (0, 2), (1, 3)),
    "same_side": ((2, 1), (3, 0), (0, 3), (1, 2)),
}


class ParallelLines(AngleFamily):
    """Two parallel lines and a transversal; unknown `corresponding`, `alternate`, `same_side` or `bend`.

    `bend` (level 3) puts a corner between the lines, whose angle is the sum of the two angles at the lines, of which
    the upper one comes first.
    """

    name = "parallel_lines"
    wholes = {"same_side": 180}  # noqa: RUF012 - read only

    def sample(self, rng: Random, level: int) -> Case:
        unknown = rng.choice((*PAIRS, "bend", "bend") if level == 3 else tuple(PAIRS))
        if unknown == "bend":
            return (pick_angle(rng, level, 25, 75), pick_angle(rng, level, 25, 75)), unknown
        return (pick_angle(rng, level, 30, 150),), unknown

    def solve(self, givens: Givens, unknown: str) -> Solution:
        if unknown != "bend":
            return super().solve(givens, unknown)
        require_angles(givens)
        require(sum(givens) < 180, "the corner is below 180 degrees")
        return calculation(givens[0], "+", givens[1]), str(sum(givens))

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        if unknown == "bend":
            self._draw_bend(canvas, givens, rng)
            return
        sectors = rng.choice(PAIRS[unknown])
        given_above = rng.random() < 0.5
        if given_above:
            given_sector = sectors[0]
        else:
            given_sector = sectors[1]
        shown = soften((givens[0], 180 - givens[0]), 50)[0]
        slope = math.radians(shown if given_sector % 2 == 0 else 180 - shown)
        up = cmath.rect(1 / math.sin(slope), -slope)
        half, reach = 1.25, 0.78  # half the length of a line, and of the transversal beyond it, in line distances
        top = up / 2
        bottom = -up / 2
        shape = [
            top,
            bottom,
            top - half,
            top + half,
            bottom - half,
            bottom + half,
            top + up * reach,
            bottom - up * reach,
        ]
        shape = rotated(shape, rng.uniform(-0.15, 0.15))
        top, bottom, a, b, c, d, high, low = canvas.fit(shape, rng, (5, 5), stretch=1.3)
        canvas.line(a, b)
        canvas.line(c, d)
        canvas.line(high, low)
        at = rng.choice((0.1, 0.94))
        canvas.arrow(a, b, at)
        canvas.arrow(c, d, at)
        if given_above:
            texts = (f"{givens[0]}°", "x°")
        else:
            texts = ("x°", f"{givens[0]}°")
        for vertex, right, left, sector, text in (
            (top, b, a, sectors[0], texts[0]),
            (bottom, d, c, sectors[1], texts[1]),
        ):
            around: tuple[Point, ...] = (right, high, left, low)
            canvas.angle(vertex, around[sector], around[(sector + 1) % 4], text)

    def _draw_bend(self, canvas: Canvas, givens: Givens, rng: Random) -> None:
        upper, lower = (math.radians(min(max(angle, 38), 62)) for angle in givens)
        corner = 0j
        a = cmath.rect(1 / math.sin(upper), upper - math.pi)
        b = cmath.rect(1 / math.sin(lower), math.pi - lower)
        right = max(0.5, 2.2 + min(a.real, b.real))
        shape = [corner, a, b, complex(right, a.imag), complex(right, b.imag)]
        shape = flipped(rotated(shape, rng.uniform(-0.12, 0.12)), rng)
        corner, a, b, end_a, end_b = canvas.fit(shape, rng, (7, 11))
        for start, end in ((a, end_a), (b, end_b)):
            canvas.line(start, end)
            canvas.arrow(start, end, 0.88)
        canvas.line(a, corner)
        canvas.line(corner, b)
        canvas.angle(a, end_a, corner, f"{givens[0]}°")
        canvas.angle(b, corner, end_b, f"{givens[1]}°")
        canvas.angle(corner, a, b, "x°")
