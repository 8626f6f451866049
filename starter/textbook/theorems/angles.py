"""Theorems about angles: in triangles, at parallel lines, at crossings."""

from __future__ import annotations

import math
from random import Random

from envs.geo3k.families.arithmetic import add, calculation, divide, rest
from envs.geo3k.families.family import Case, Givens, Solution, require, require_angles
from envs.geo3k.families.triangles import ExteriorAngle, Isosceles
from starter.textbook.figure import Figure, foot, meet, polar, triangle
from starter.textbook.theorem import AngleTheorem, Theorem, pick_angle


class AngleSum(AngleTheorem):
    """Two angles of a triangle are given; the third is asked."""

    name = "angle_sum"
    wholes = {"angle": 180}  # noqa: RUF012 - read only

    def numbers(self, rng: Random, level: int) -> Case:
        first = pick_angle(rng, level, 25, 110)
        return (first, pick_angle(rng, level, 25, 150 - first)), "angle"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        figure = Figure(triangle(*givens))
        figure.polygon("ABC")
        figure.label(givens, "CAB", "ABC", "BCA")
        figure.spare_length(rng, "AB", "BC", "CA")
        return figure


class ExteriorAngleTheorem(Theorem):
    """A side of a triangle is extended; unknown `exterior` from both remote angles, `remote` from it and the other."""

    name = "exterior_angle_theorem"

    def numbers(self, rng: Random, level: int) -> Case:
        first = pick_angle(rng, level, 25, 100)
        second = pick_angle(rng, level, 25, 145 - first)
        if rng.random() < 0.5:
            return ((first, second), "exterior")
        return ((first + second, second), "remote")

    def work(self, givens: Givens, unknown: str) -> Solution:
        return ExteriorAngle().solve(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens if unknown == "exterior" else (givens[0] - givens[1], givens[1])
        points = triangle(first, 180 - first - second)
        figure = Figure(points | {"D": points["B"] + rng.uniform(0.35, 0.6)})
        figure.polygon("ABC")
        figure.line("BD", ends=rng.choice(("", "end")))
        if unknown == "exterior":
            parts = ("CAB", "BCA", "CBD")
        else:
            parts = ("CBD", "BCA", "CAB")
        figure.label(givens, *parts, also=("ABC",))
        figure.spare_length(rng, "BC", "CA")
        return figure


class IsoscelesTriangle(Theorem):
    """Ticks mark two equal sides; unknown `apex`: a base angle is given, `base`: the apex, `outside`: outside angle."""

    name = "isosceles_triangle"

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("apex", "base", "outside"))
        if unknown == "base":
            return (2 * pick_angle(rng, level, 12, 65) - (level == 3 and rng.random() < 0.3),), unknown
        return (pick_angle(rng, level, 27, 77),), unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        if unknown != "outside":
            return Isosceles().solve(givens, unknown)
        require_angles(givens)
        require(givens[0] < 90, "a base angle is below 90 degrees")
        return rest(180, givens)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "base":
            base = (180 - givens[0]) / 2
        else:
            base = givens[0]
        points = triangle(base, base)
        if unknown == "outside":
            points["D"] = points["B"] + rng.uniform(0.35, 0.6)
        figure = Figure(points)
        figure.polygon("ABC")
        figure.equal("AC", "BC")
        if unknown == "outside":
            figure.line("BD")
            figure.label(givens, "CAB", "CBD")
        else:
            if unknown == "base":
                parts = ("BCA", "CAB")
            else:
                parts = ("CAB", "BCA")
            figure.label(givens, *parts, also=("ABC",))
        figure.spare_length(rng, "AB", "AC")
        return figure


class BisectedAngle(Theorem):
    """Arcs mark the halves of an angle; unknown `half` from the other two angles, `foot` from one and a half."""

    name = "bisected_angle"

    def numbers(self, rng: Random, level: int) -> Case:
        if rng.random() < 0.5:
            first = pick_angle(rng, level, 30, 80)
            second = pick_angle(rng, level, 30, 125 - first)
            return (first, second), "half"
        return (pick_angle(rng, level, 30, 85), pick_angle(rng, level, 25, 45)), "foot"

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        first, second = givens
        if unknown == "foot":
            require(first + 2 * second < 180, "the angles of a triangle add up to 180 degrees")
            return rest(180, givens)
        steps, whole = rest(180, givens)
        step, answer = divide(int(whole), 2)
        return f"{steps} {step}", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens
        if unknown == "foot":
            apex = 2 * second
        else:
            apex = 180 - first - second
        points = triangle(first, 180 - first - apex)
        inward = polar(first + apex / 2 + 180)
        points["D"] = meet(points["C"], points["C"] + inward, points["A"], points["B"])
        figure = Figure(points)
        figure.polygon("ABC")
        figure.line("CD")
        figure.equal_angles += [("ACD", 1), ("DCB", 1)]
        figure.label(givens, "CAB", "ACD" if unknown == "foot" else "ABC", "ADC" if unknown == "foot" else "DCB")
        figure.spare_length(rng, "AC", "BC")
        return figure


class CrossingLines(AngleTheorem):
    """Two lines cross; unknown `vertical` from the angle across, `adjacent` from the next one, `right` beside 90°."""

    name = "crossing_lines"
    wholes = {"adjacent": 180, "right": 90}  # noqa: RUF012 - read only

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("vertical", "adjacent", "right"))
        return (pick_angle(rng, level, *((25, 65) if unknown == "right" else (35, 145))),), unknown

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        turn = rng.uniform(0, 360)
        given = givens[0]
        ends = {"A": 0, "B": given, "C": 180, "D": 180 + given}
        if unknown == "right":
            ends = {"A": 0, "B": given, "C": 180, "D": 180 + given, "E": 90}
        figure = Figure({"O": 0j} | {name: polar(turn + at, rng.uniform(0.85, 1.1)) for name, at in ends.items()})
        figure.line("AC", "BD", ends=rng.choice(("", "both")))
        if unknown == "right":
            figure.line("OE", ends="end")
            figure.right_angles.append("EOC")
            figure.label(givens, "AOB", "BOE")
        else:
            figure.label(givens, "AOB", "COD" if unknown == "vertical" else "BOC", also=("DOA",))
        return figure


class Transversal(AngleTheorem):
    """A line cuts two parallels; unknown `corresponding`, `alternate`, `same_side` or `outer`: same side, outside."""

    name = "transversal"
    wholes = {"same_side": 180, "outer": 180}  # noqa: RUF012 - read only

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("corresponding", "alternate", "same_side", "outer"))
        return (pick_angle(rng, level, 40, 140),), unknown

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        up = polar(givens[0], 1 / math.sin(math.radians(givens[0])))
        reach = rng.uniform(0.75, 1.1)
        over = rng.uniform(0.45, 0.6)
        points = {"P": up / 2, "Q": -up / 2}
        points |= {"a": up / 2 - reach, "b": up / 2 + reach, "c": -up / 2 - reach, "d": -up / 2 + reach}
        figure = Figure(points | {"t": up / 2 + up * over, "s": -up / 2 - up * over})
        figure.line("ab", "cd", "st", ends=rng.choice(("", "both", "both")))
        figure.parallel("ab", "cd")
        # The given is the angle between the line to the right and the transversal upwards, at P.
        pairs = {
            "corresponding": (("bPt", "dQP"), ("aPQ", "cQs")),
            "alternate": (("bPt", "cQs"), ("aPQ", "dQP")),
            "same_side": (("aPQ", "cQP"), ("dQP", "bPQ")),
            "outer": (("bPt", "dQs"), ("cQs", "aPt")),
        }
        known, asked = rng.choice(pairs[unknown])
        figure.label(givens, known, asked)
        return figure


class ParallelInTriangle(AngleTheorem):
    """A segment is parallel to a side; unknown `same`: the angle equal to the given one, `other`: the third one."""

    name = "parallel_in_triangle"
    wholes = {"other": 180}  # noqa: RUF012 - read only

    def numbers(self, rng: Random, level: int) -> Case:
        if rng.random() < 0.4:
            return (pick_angle(rng, level, 35, 100),), "same"
        first = pick_angle(rng, level, 35, 85)
        return (first, pick_angle(rng, level, 35, 145 - first)), "other"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "other":
            second = givens[1]
        else:
            second = rng.randint(max(35, 80 - givens[0]), min(85, 145 - givens[0]))
        # The angle at A is the first given, the apex C the second.
        points = triangle(givens[0], 180 - givens[0] - second)
        share = rng.uniform(0.4, 0.62)
        for name, end in (("D", "A"), ("E", "B")):
            points[name] = points[end] + (points["C"] - points[end]) * (1 - share)
        figure = Figure(points, upright=True)
        figure.polygon("ABC")
        figure.line("DE")
        figure.parallel("AB", "DE")
        if unknown == "other":
            figure.label(givens, "CDE", "BCA", "ABC", also=("CAB",))
        else:
            figure.label(givens, "CDE", "CAB")
        figure.spare_length(rng, "AB", "DE")
        return figure


class AltitudeAngle(Theorem):
    """An altitude of a triangle; unknown `beside` it from a base angle, or the `apex` from both base angles."""

    name = "altitude_angles"

    def numbers(self, rng: Random, level: int) -> Case:
        if rng.random() < 0.5:
            return (pick_angle(rng, level, 30, 65),), "beside"
        first = pick_angle(rng, level, 40, 75)
        return (first, pick_angle(rng, level, max(40, 105 - first), 75)), "apex"

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        require(max(givens) < 90, "the foot of an altitude lies inside the base")
        if unknown == "beside":
            return rest(90, givens)
        first, second = givens
        steps, total = add((90 - first, 90 - second))
        return " ".join([f"{calculation(90, '-', first)} {calculation(90, '-', second)}", *steps]), str(total)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "apex":
            second = givens[1]
        else:
            second = rng.randint(40, 65)
        points = triangle(givens[0], second)
        figure = Figure(points | {"D": foot(points["C"], points["A"], points["B"])})
        figure.polygon("ABC")
        figure.line("CD")
        figure.right_angles.append("CDB")
        if unknown == "apex":
            figure.label(givens, "CAB", "ABC", "ACB")
        else:
            figure.label(givens, "CAB", "ACD", also=("DCB",))
        figure.spare_length(rng, "AC", "BC")
        return figure
