"""Families about the sides of right triangles: Pythagoras and the 45-45-90 and 30-60-90 triangles."""

from __future__ import annotations

import math
from functools import cache
from random import Random

from envs.geo3k.canvas import Canvas
from envs.geo3k.families.arithmetic import calculation, divide, radical, root_of, twice
from envs.geo3k.families.family import Case, Family, Givens, Solution, require
from envs.geo3k.families.layout import LABEL_MARGIN, left_to_right, rotated

LONGEST = {1: 30, 2: 65}  # the longest hypotenuse of levels 1 and 2, whose sides are all integers


@cache
def _triples(longest: int) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (a, b, math.isqrt(a * a + b * b))
        for a in range(3, longest)
        for b in range(a + 1, longest)
        if a * a + b * b <= longest**2 and math.isqrt(a * a + b * b) ** 2 == a * a + b * b
    )


class RightTriangle(Family):
    """Two sides of a right triangle are given; unknown `hypotenuse` (from both legs) or `leg` (from hypotenuse, leg).

    Levels 1 and 2 have integer sides; level 3 has any sides, so most answers are roots.
    """

    name = "right_triangle"

    def sample(self, rng: Random, level: int) -> Case:
        if level < 3:
            first, second, hypotenuse = rng.choice(_triples(LONGEST[level]))
            if rng.random() < 0.5:
                first, second = second, first
        else:
            first = rng.randint(2, 20)
            second = rng.randint(2, 20)
            hypotenuse = 0
        if rng.random() < 0.5:
            return (first, second), "hypotenuse"
        return (hypotenuse or first + second, second), "leg"

    def solve(self, givens: Givens, unknown: str) -> Solution:
        first, second = givens
        require(first > 0 and second > 0, "a side is longer than 0")
        if unknown == "hypotenuse":
            sign = "+"
            square = first * first + second * second
        else:
            require(first > second, "the hypotenuse is the longest side")
            sign = "-"
            square = first * first - second * second
        last, answer = root_of(square)
        squares = f"{calculation(first, '*', first)} {calculation(second, '*', second)}"
        return f"{squares} {first * first} {sign} {second * second} = {square}. {last}", answer

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        first, second = givens
        if unknown == "hypotenuse":
            other = second
        else:
            other = math.sqrt(first * first - second * second)
        leg = first if unknown == "hypotenuse" else second
        slope = min(max(math.atan2(other, leg), 0.6), 0.97)
        shape = [0j, complex(math.cos(slope)), complex(0, -math.sin(slope))]
        shape = rotated(shape, math.pi / 2 * rng.randrange(4) + rng.uniform(-0.2, 0.2))
        if unknown == "hypotenuse":
            shape = left_to_right(shape, shape[0] + shape[1], shape[0] + shape[2])
            texts = (str(first), str(second), "x")
        else:
            shape = left_to_right(shape, rng.uniform(-1, 1), 0)
            texts = (str(second), "x", str(first))
        corner, b, c = canvas.fit(shape, rng, LABEL_MARGIN, stretch=1)
        canvas.polygon((corner, b, c))
        canvas.right_angle(corner, b, c)
        for start, end, inside, text in zip((corner, corner, b), (b, c, c), (c, b, corner), texts, strict=True):
            canvas.side(start, end, text, inside)


#: Unknown -> the angle printed, the side given, the side asked; `short` is opposite 30, `long` opposite 60 degrees.
SPECIAL = {
    "45_hypotenuse": (45, "leg", "hypotenuse"),
    "45_leg": (45, "hypotenuse", "leg"),
    "30_hypotenuse": (30, "short", "hypotenuse"),
    "30_short": (30, "hypotenuse", "short"),
    "60_long": (60, "short", "long"),
    "60_hypotenuse": (60, "short", "hypotenuse"),
    "30_long": (30, "hypotenuse", "long"),
}


def special_side(unknown: str, side: int) -> Solution:
    """Return the solution of an unknown of `SPECIAL`, or of `60_short`: the leg across from 30 from the other one."""
    if unknown in ("30_hypotenuse", "60_hypotenuse"):
        return twice(side)
    if unknown == "30_short":
        return divide(side, 2)
    if unknown == "30_long":
        step, half = divide(side, 2)
        answer = radical(side, 3, 2)
        return f"{step} {half} * \\sqrt {{ 3 }} = {answer}.", answer
    if unknown in ("60_long", "60_short"):
        root = 3
    else:
        root = 2
    if unknown in ("45_leg", "60_short"):
        answer = radical(side, root, root)
        sign = "/"
    else:
        answer = radical(side, root)
        sign = "*"
    return f"{side} {sign} \\sqrt {{ {root} }} = {answer}.", answer


class SpecialRight(Family):
    """One angle and one side of a 45-45-90 or 30-60-90 triangle are given, another side is x.

    Level 1 asks for integers in 30-60-90 triangles, level 2 adds 45-45-90, level 3 the long leg.
    """

    name = "special_right"

    def sample(self, rng: Random, level: int) -> Case:
        unknowns = {
            1: ("30_hypotenuse", "30_short", "60_hypotenuse"),
            2: ("30_hypotenuse", "30_short", "60_hypotenuse", "45_hypotenuse"),
            3: tuple(SPECIAL),
        }[level]
        unknown = rng.choice(unknowns)
        side = rng.randint(2, {1: 20, 2: 40, 3: 60}[level])
        even = level < 3 and SPECIAL[unknown][1] == "hypotenuse"
        return (SPECIAL[unknown][0], 2 * side if even else side), unknown

    def solve(self, givens: Givens, unknown: str) -> Solution:
        angle, side = givens
        require(angle == SPECIAL[unknown][0] and side > 0, "the angle belongs to the unknown")
        return special_side(unknown, side)

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        angle, side = givens
        _, given, asked = SPECIAL[unknown]
        # The printed angle is at b. Shown angles stay near 45 degrees, where every label has room.
        slope = math.radians({30: 37, 45: 45, 60: 53}[angle])
        shape = [0j, complex(math.cos(slope)), complex(0, -math.sin(slope))]
        shape = rotated(shape, math.pi / 2 * rng.randrange(4) + rng.uniform(-0.2, 0.2))
        shape = left_to_right(shape, rng.uniform(-1, 1), 0)
        corner, b, c = canvas.fit(shape, rng, LABEL_MARGIN, stretch=1)
        sides = {"hypotenuse": (b, c, corner), "leg": (corner, c, b)}
        adjacent = (corner, b, c)
        opposite = (corner, c, b)
        sides["short"], sides["long"] = (opposite, adjacent) if angle == 30 else (adjacent, opposite)
        if angle == 45:
            legs = [adjacent, opposite]
            rng.shuffle(legs)
            sides["leg"] = legs[0]
        canvas.polygon((corner, b, c))
        canvas.right_angle(corner, b, c)
        canvas.angle(b, corner, c, f"{angle}°")
        for (start, end, inside), text in ((sides[given], str(side)), (sides[asked], "x")):
            canvas.side(start, end, text, inside)
