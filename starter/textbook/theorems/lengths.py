"""Theorems about lengths: right triangles, rectangles, rhombi and segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from envs.geo3k.families.arithmetic import calculation, divide, multiply, root_of
from envs.geo3k.families.family import Case, Givens, Solution, require
from envs.geo3k.families.right_triangles import RightTriangle, special_side
from starter.textbook.figure import Figure
from starter.textbook.theorem import Theorem

TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41))


def scaled_triple(rng: Random, most: int, triples: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return the sides of a right triangle, a whole multiple (1 to `most`) of one of these."""
    factor = rng.randint(1, most)
    return tuple(factor * side for side in rng.choice(triples))


def leg_of(hypotenuse: float, other: float) -> float:
    """Return a leg of a right triangle."""
    return math.sqrt(hypotenuse**2 - other**2)


def right(leg: float, other: float) -> dict[str, complex]:
    """Return the right triangle A, B, C with the right angle at C, CA = leg and CB = other."""
    return {"C": 0j, "A": complex(leg), "B": complex(0, other)}


class Pythagoras(Theorem):
    """Two sides of a right triangle are given; unknown `hypotenuse` or `leg`."""

    name = "pythagoras"

    def numbers(self, rng: Random, level: int) -> Case:
        if level == 3:
            a = rng.randint(3, 20)
            b = rng.randint(3, 20)
            if rng.random() < 0.5:
                return ((a, b), "hypotenuse")
            return ((a + b // 2 + 1, a), "leg")
        a, b, c = scaled_triple(rng, 6 if level == 1 else 9, TRIPLES[: 3 if level == 1 else 5])
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        if rng.random() < 0.5:
            return ((a, b), "hypotenuse")
        return ((c, a), "leg")

    def work(self, givens: Givens, unknown: str) -> Solution:
        return RightTriangle().solve(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens
        if unknown == "hypotenuse":
            legs = givens
        else:
            legs = (second, leg_of(first, second))
        figure = Figure(right(*legs))
        figure.polygon("ABC")
        figure.right_angles.append("ACB")
        if unknown == "hypotenuse":
            parts = ("CA", "CB", "AB")
        else:
            parts = ("AB", "CA", "CB")
        figure.label(givens, *parts)
        return figure


#: Unknown -> the printed angle at A, the given side, the asked side; C is the right angle.
_SPECIAL = {
    "45_hypotenuse": (45, "CA", "AB"),
    "45_leg": (45, "AB", "CB"),
    "30_hypotenuse": (30, "CB", "AB"),
    "30_short": (30, "AB", "CB"),
    "60_long": (60, "CA", "CB"),
    "60_hypotenuse": (60, "CA", "AB"),
    "30_long": (30, "AB", "CA"),
    "60_short": (60, "CB", "CA"),
}


class SpecialTriangles(Theorem):
    """One angle and one side of a 45-45-90 or 30-60-90 triangle are given, another side is asked."""

    name = "special_triangles"
    is_whole = False

    def numbers(self, rng: Random, level: int) -> Case:
        names = list(_SPECIAL)
        unknown = rng.choice({1: [names[2], names[3], names[5]], 2: names[:1] + names[2:6], 3: names}[level])
        side = rng.randint(2, {1: 20, 2: 40, 3: 40}[level])
        return (_SPECIAL[unknown][0], 2 * side if level < 3 and _SPECIAL[unknown][1] == "AB" else side), unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        opening, side = givens
        require(opening == _SPECIAL[unknown][0], "the angle belongs to the unknown")
        return special_side(unknown, side)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        opening, side = givens
        _, given, asked = _SPECIAL[unknown]
        unit = {"CA": math.cos, "CB": math.sin, "AB": lambda _: 1.0}[given](math.radians(opening))
        long = side / unit
        figure = Figure(right(long * math.cos(math.radians(opening)), long * math.sin(math.radians(opening))))
        figure.polygon("ABC")
        figure.right_angles.append("ACB")
        others = [side for side in ("CA", "CB", "AB") if side not in (given, asked)]
        figure.label(givens, "CAB", given, asked, also=others)
        return figure


class GeometricMean(Theorem):
    """The altitude to the hypotenuse; unknown `altitude` or `leg` from the two parts of the hypotenuse, or `part`."""

    name = "geometric_mean"

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("altitude", "leg", "part"))
        if level == 3:
            first = rng.randint(2, 15)
            second = rng.randint(2, 15)
        else:
            k = rng.randint(1, 3 if level == 1 else 6)
            a = rng.randint(1, 4)
            b = rng.randint(1, 4)
            first = k * a * a
            second = k * b * b
            if unknown == "leg":
                m, n = rng.choice(((1, 2), (2, 3), (3, 4), (3, 5), (2, 4), (4, 5)))
                first, second = k * m * m, k * (n * n - m * m)  # the leg is k * m * n
            elif unknown == "part":
                first = k * a * b
                second = k * a * a
        return (first, second), unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        first, second = givens
        if unknown == "part":
            steps, square = multiply(first, first)
            step, answer = divide(square, second)
            return f"{' '.join(steps)} {step}", answer
        start, factor = (
            ("", second) if unknown == "altitude" else (f"{calculation(first, '+', second)} ", first + second)
        )
        steps, product = multiply(first, factor)
        last, answer = root_of(product)
        return f"{start}{' '.join(steps)} {last}", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        near, far = givens if unknown != "part" else (givens[1], givens[0] ** 2 / givens[1])
        figure = Figure({"A": complex(-near), "B": complex(far), "C": 1j * math.sqrt(near * far), "D": 0j})
        figure.polygon("ABC")
        figure.line("CD")
        figure.right_angles += ["ACB", "CDB"]
        parts = {"altitude": ("AD", "DB", "CD"), "leg": ("AD", "DB", "AC"), "part": ("CD", "AD", "DB")}[unknown]
        figure.label(givens, *parts, also=("BC",))
        return figure


class RectangleDiagonals(Theorem):
    """A diagonal cuts a rectangle into right triangles; unknown `diagonal` or `side`."""

    name = "rectangle_diagonals"

    def numbers(self, rng: Random, level: int) -> Case:
        if level < 3:
            k = rng.randint(1, 6 if level == 1 else 12)
            a, b, c = (k * side for side in rng.choice(TRIPLES[:3]))
        else:
            a = rng.randint(4, 24)
            b = rng.randint(4, 24)
            c = a + b // 2 + 1
        if rng.random() < 0.5:
            return ((a, b), "diagonal")
        return ((c, a), "side")

    def work(self, givens: Givens, unknown: str) -> Solution:
        return Pythagoras().work(givens, "hypotenuse" if unknown == "diagonal" else "leg")

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens
        if unknown == "side":
            other = math.sqrt(first * first - second * second)
        else:
            other = second
        wide, high = (second, other) if unknown == "side" else (first, second)
        points = {"A": 0j, "B": complex(wide), "C": complex(wide, high), "D": complex(0, high)}
        figure = Figure(points)
        figure.polygon("ABCD")
        figure.line("AC")
        figure.right_angles += rng.choice((["ABC"], ["ABC", "CDA"], ["ABC", "BCD", "CDA", "DAB"]))
        if unknown == "diagonal":
            parts = ("AB", "BC", "AC")
        else:
            parts = ("AC", "AB", "BC")
        figure.label(givens, *parts)
        return figure


class RhombusDiagonals(Theorem):
    """Halves of a rhombus's diagonals are the legs of a right triangle; unknown `side`, or `half` a diagonal."""

    name = "rhombus_diagonals"

    def numbers(self, rng: Random, level: int) -> Case:
        if level < 3:
            sides = ((3, 4, 5), (4, 3, 5), (8, 15, 17), (20, 21, 29))
            a, b, c = scaled_triple(rng, 6 if level == 1 else 12, sides)
        else:
            a = rng.randint(3, 20)
            b = rng.randint(3, 20)
            c = max(a, b) + rng.randint(1, 8)
        if rng.random() < 0.5:
            return ((a, b), "side")
        return ((c, a), "half")

    def work(self, givens: Givens, unknown: str) -> Solution:
        return Pythagoras().work(givens, "hypotenuse" if unknown == "side" else "leg")

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens
        wide, high = (first, second) if unknown == "side" else (second, leg_of(first, second))
        figure = Figure(
            {"A": complex(-wide), "B": complex(0, -high), "C": complex(wide), "D": complex(0, high), "E": 0j}
        )
        figure.polygon("ABCD")
        figure.line("AC", "BD")
        figure.equal("AB", "BC", "CD", "DA")
        if unknown == "side":
            parts = ("EA", "ED", "AD")
        else:
            parts = ("AD", "EA", "ED")
        figure.label(givens, *parts)
        return figure


class SegmentAddition(Theorem):
    """Points on a line; unknown `whole` from two parts or `part` from the whole and the other part."""

    name = "segment_addition"

    def numbers(self, rng: Random, level: int) -> Case:
        high = {1: 12, 2: 40, 3: 80}[level]
        a = rng.randint(high // 3, high)
        b = rng.randint(high // 3, high)
        if rng.random() < 0.5:
            return ((a + b, a), "part")
        return ((a, b), "whole")

    def work(self, givens: Givens, unknown: str) -> Solution:
        whole, part = givens
        if unknown == "whole":
            return calculation(whole, "+", part), str(whole + part)
        require(whole > part, "the whole is longer than a part")
        return calculation(whole, "-", part), str(whole - part)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        whole, part = givens if unknown == "part" else (sum(givens), givens[0])
        figure = Figure({"A": 0j, "D": complex(part), "B": complex(whole)}, dots=list("ADB"), spans=["AB"])
        figure.line("AB")
        if unknown == "part":
            parts = ("AB", "AD", "DB")
        else:
            parts = ("AD", "DB", "AB")
        figure.label(givens, *parts)
        return figure
