"""Theorems about similar triangles: midsegments, proportions, the centroid."""

from __future__ import annotations

from random import Random

from envs.geo3k.families.arithmetic import calculation, divide, proportion, twice
from envs.geo3k.families.family import Case, Givens, Solution, require
from envs.geo3k.families.proportions import Midsegment
from starter.textbook.figure import Figure, polar, scaled, triangle, triangle_of_sides
from starter.textbook.theorem import Theorem


class TriangleMidsegment(Theorem):
    """Ticks mark midpoints of two sides of a triangle; unknown `midsegment` or `base`."""

    name = "triangle_midsegment"

    def numbers(self, rng: Random, level: int) -> Case:
        half = rng.randint(2, {1: 30, 2: 60, 3: 90}[level])
        if rng.random() < 0.5:
            return (half,), "base"
        return (2 * half + (level == 3 and rng.random() < 0.4),), "midsegment"

    def work(self, givens: Givens, unknown: str) -> Solution:
        return Midsegment().solve(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "base":
            base = 2 * givens[0]
        else:
            base = givens[0]
        first = rng.randint(45, 75)
        second = rng.randint(45, 75)
        points = triangle(first, second, base)
        points |= {"D": (points["A"] + points["C"]) / 2, "E": (points["B"] + points["C"]) / 2}
        figure = Figure(points)
        figure.polygon("ABC")
        figure.line("DE")
        figure.equal("AD", "DC")
        figure.equal("BE", "EC", count=2)
        if unknown == "base":
            parts = ("DE", "AB")
        else:
            parts = ("AB", "DE")
        figure.label(givens, *parts)
        figure.spare_angle("CAB", first)
        return figure


class TrapezoidMidline(Theorem):
    """The midline of a trapezoid; unknown `midline` from both parallel sides, or `base` from it and one side."""

    name = "trapezoid_midline"

    def numbers(self, rng: Random, level: int) -> Case:
        high = {1: 12, 2: 25, 3: 45}[level]
        short = rng.randint(4, high)
        more = rng.randint(max(1, short // 4), short)
        if rng.random() < 0.5:
            return (short, short + (more if level == 3 else 2 * more)), "midline"
        return (short + more, short), "base"

    def work(self, givens: Givens, unknown: str) -> Solution:
        first, second = givens
        if unknown == "midline":
            return Midsegment().solve(givens, "trapezoid")
        require(first > second, "the midline is longer than the shorter side")
        return f"{calculation(2, '*', first)} {2 * first} - {second} = {2 * first - second}.", str(2 * first - second)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        short, long = givens if unknown == "midline" else (givens[1], 2 * givens[0] - givens[1])
        lean = (long - short) * rng.uniform(0.2, 0.8)
        high = 1j * (short + long) / 2 * rng.uniform(0.5, 0.75)
        points = {"A": 0j, "B": complex(long), "C": lean + short + high, "D": lean + high}
        points |= {"E": (points["A"] + points["D"]) / 2, "F": (points["B"] + points["C"]) / 2}
        figure = Figure(points)
        figure.polygon("ABCD")
        figure.line("EF")
        figure.parallel("AB", "DC")
        figure.equal("AE", "ED")
        figure.equal("BF", "FC", count=2)
        if unknown == "midline":
            parts = ("DC", "AB", "EF")
        else:
            parts = ("EF", "DC", "AB")
        figure.label(givens, *parts)
        return figure


def _proportion(rng: Random, level: int) -> Givens:
    """Return three numbers whose first two, multiplied, are divided by the third; whole up to level 2."""
    if level == 3:
        return rng.randint(3, 18), rng.randint(3, 18), rng.randint(3, 18)
    low, high = {1: (1, 5), 2: (2, 8)}[level]
    a, b, c, d = (rng.randint(low, high) for _ in range(4))
    return b * d, a * c, b * c


class _Proportional(Theorem):
    """Three lengths are given; the asked one is first * second / third."""

    def numbers(self, rng: Random, level: int) -> Case:
        return _proportion(rng, level), "part"

    def work(self, givens: Givens, unknown: str) -> Solution:
        return proportion(*givens)


class SideSplitter(_Proportional):
    """A segment parallel to the base cuts the other sides in the same ratio; one of the four parts is asked."""

    name = "side_splitter"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        same, across, diagonal = givens  # CD : DA = CE : EB
        asked = same * across / diagonal
        opening = rng.randint(40, 80)
        upper, lower = (asked, same) if rng.random() < 0.5 else (same, asked)
        if upper == asked:
            other = (across, diagonal)
        else:
            other = (diagonal, across)
        u = polar(-90 - opening / 2)
        v = polar(-90 + opening / 2)
        points = {"C": 0j, "D": u * upper, "A": u * (upper + lower), "E": v * other[0], "B": v * (other[0] + other[1])}
        figure = Figure(points)
        figure.polygon("ABC")
        figure.line("DE")
        figure.parallel("AB", "DE")
        first, second = ("DA", "CD") if upper == asked else ("CD", "DA")
        near, far = ("CE", "EB") if upper == asked else ("EB", "CE")
        figure.label(givens, first, near, far, second)
        figure.spare_angle("ACB", opening)
        return figure


class BisectorRatio(_Proportional):
    """The bisector of an angle cuts the opposite side in the ratio of the other sides; a part of that side is asked."""

    name = "bisector_ratio"

    def work(self, givens: Givens, unknown: str) -> Solution:
        first, second, third = givens  # AD, BC and AC; DB = AD * BC / AC
        require(abs(second - third) * third < first * (second + third) < (second + third) * third, "a triangle exists")
        return super().work(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        near, other, side = givens
        far = near * other / side
        points = triangle_of_sides(other, side, near + far)
        figure = Figure(points | {"D": complex(near)})
        figure.polygon("ABC")
        figure.line("CD")
        figure.equal_angles += [("ACD", 1), ("DCB", 1)]
        figure.label(givens, "AD", "BC", "AC", "DB")
        return figure


class CrossedTriangles(_Proportional):
    """Two parallel segments whose ends are joined crosswise make similar triangles."""

    name = "crossed_triangles"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second, third = givens  # AE : EB = CE : ED, so ED = CE * EB / AE
        opening = rng.randint(45, 85)
        u = polar(opening / 2)
        v = polar(180 - opening / 2)
        points = {"E": 0j, "A": u * third, "B": -u * first, "C": v * second, "D": -v * (first * second / third)}
        figure = Figure(points)
        figure.line("AB", "CD", "AC", "BD")
        figure.parallel("CA", "BD")
        figure.label(givens, "EB", "CE", "AE", "ED")
        return figure


class SimilarPair(_Proportional):
    """Two similar triangles side by side with equal angles marked; a side of the second is asked."""

    name = "similar_pair"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second, third = givens  # AB = third, DE = first, AC = second, DF = first * second / third
        opening = rng.randint(45, 95)
        scale = first / third
        a = 0j
        b = complex(third)
        c = polar(opening, second)
        shift = max(b.real, c.real) - min(0.0, c.real * scale) + 0.35 * max(first, third)
        points = {"A": a, "B": b, "C": c, "D": a + shift, "E": b * scale + shift, "F": c * scale + shift}
        figure = Figure(points, upright=True)
        figure.polygon("ABC")
        figure.polygon("DEF")
        figure.equal_angles += [("BAC", 1), ("EDF", 1), ("ABC", 2), ("DEF", 2)]
        figure.label(givens, "DE", "AC", "AB", "DF")
        return figure


class Centroid(Theorem):
    """Medians meet at two thirds of their length; unknown `long` or `short` part of a median from the other one."""

    name = "centroid"

    def numbers(self, rng: Random, level: int) -> Case:
        part = rng.randint(2, {1: 30, 2: 60, 3: 90}[level])
        if rng.random() < 0.5:
            return (part,), "long"
        return (2 * part - (level == 3 and rng.random() < 0.3),), "short"

    def work(self, givens: Givens, unknown: str) -> Solution:
        (given,) = givens
        if unknown == "long":
            return twice(given)
        return divide(given, 2)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        points = triangle(rng.uniform(48, 70), rng.uniform(48, 70))
        a = points["A"]
        b = points["B"]
        c = points["C"]
        points |= {"D": (b + c) / 2, "E": (c + a) / 2, "G": (a + b + c) / 3}
        known, asked = ("GD", "AG") if unknown == "long" else ("AG", "GD")
        scale = givens[0] / abs(complex.__sub__(*(points[name] for name in known)))
        figure = Figure(scaled(points, scale), upright=True)
        figure.polygon("ABC")
        figure.line("AD", "BE")
        figure.equal("BD", "DC")
        figure.equal("CE", "EA", count=2)
        figure.label(givens, known, asked)
        return figure
