"""Theorems about angles: in triangles, at parallel lines, at crossings."""

from __future__ import annotations

import math
from random import Random

from envs.geo3k.families.arithmetic import add, divide, rest
from envs.geo3k.families.family import Givens, require, require_angles
from envs.geo3k.families.triangles import ExteriorAngle, Isosceles
from envs.geo3k.textbook.figure import Figure, angle, foot, meet, polar, triangle
from envs.geo3k.textbook.theorem import Theorem, pick_angle


def spare(rng: Random) -> int:
    """Return a length that a figure of angles may show without need."""
    return rng.randint(3, 40)


class AngleSum(Theorem):
    """Two angles of a triangle are given; the third is asked."""

    name = "angle_sum"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        first = pick_angle(rng, level, 25, 110)
        return (first, pick_angle(rng, level, 25, 150 - first)), "angle"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        return rest(180, givens)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        figure = Figure(triangle(*givens))
        figure.polygon("ABC")
        figure.give(angle("CAB"), givens, 0)
        figure.give(angle("ABC"), givens, 1)
        figure.ask(angle("BCA"))
        figure.spare_length(rng.choice(("AB", "BC", "CA")), spare(rng))
        return figure


class ExteriorAngleTheorem(Theorem):
    """A side of a triangle is extended; unknown `exterior` from both remote angles, `remote` from it and the other."""

    name = "exterior_angle_theorem"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        first = pick_angle(rng, level, 25, 100)
        second = pick_angle(rng, level, 25, 145 - first)
        return ((first, second), "exterior") if rng.random() < 0.5 else ((first + second, second), "remote")

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        return ExteriorAngle().solve(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second = givens if unknown == "exterior" else (givens[0] - givens[1], givens[1])
        points = triangle(first, 180 - first - second)
        figure = Figure(points | {"D": points["B"] + rng.uniform(0.35, 0.6)})
        figure.polygon("ABC")
        figure.line("BD", ends=rng.choice(("", "end")))
        parts = (angle("CAB"), angle("BCA"), angle("CBD"))
        order = (parts[0], parts[1], parts[2]) if unknown == "exterior" else (parts[2], parts[1], parts[0])
        figure.give(order[0], givens, 0)
        figure.give(order[1], givens, 1)
        figure.ask(order[2])
        figure.also(angle("ABC"))
        figure.spare_length(rng.choice(("BC", "CA")), spare(rng))
        return figure


class IsoscelesTriangle(Theorem):
    """Ticks mark two equal sides; unknown `apex`: a base angle is given, `base`: the apex, `outside`: outside angle."""

    name = "isosceles_triangle"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("apex", "base", "outside"))
        if unknown == "base":
            return (2 * pick_angle(rng, level, 12, 65) - (level == 3 and rng.random() < 0.3),), unknown
        return (pick_angle(rng, level, 27, 77),), unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        if unknown != "outside":
            return Isosceles().solve(givens, unknown)
        require_angles(givens)
        require(givens[0] < 90, "a base angle is below 90 degrees")
        return rest(180, givens)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        base = (180 - givens[0]) / 2 if unknown == "base" else givens[0]
        points = triangle(base, base)
        if unknown == "outside":
            points["D"] = points["B"] + rng.uniform(0.35, 0.6)
        figure = Figure(points)
        figure.polygon("ABC")
        figure.equal("AC", "BC")
        if unknown == "outside":
            figure.line("BD")
            figure.give(angle("CAB"), givens, 0)
            figure.ask(angle("CBD"))
        else:
            parts = (angle("BCA"), angle("CAB"))
            figure.give(parts[0] if unknown == "base" else parts[1], givens, 0)
            figure.ask(parts[1] if unknown == "base" else parts[0])
            figure.also(angle("ABC"))
        figure.spare_length(rng.choice(("AB", "AC")), spare(rng))
        return figure


class BisectedAngle(Theorem):
    """Arcs mark the halves of an angle; unknown `half` from the other two angles, `foot` from one and a half."""

    name = "bisected_angle"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if rng.random() < 0.5:
            first = pick_angle(rng, level, 30, 80)
            second = pick_angle(rng, level, 30, 125 - first)
            return (first, second), "half"
        return (pick_angle(rng, level, 30, 85), pick_angle(rng, level, 25, 45)), "foot"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
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
        apex = 2 * second if unknown == "foot" else 180 - first - second
        points = triangle(first, 180 - first - apex)
        inward = polar(first + apex / 2 + 180)
        points["D"] = meet(points["C"], points["C"] + inward, points["A"], points["B"])
        figure = Figure(points)
        figure.polygon("ABC")
        figure.line("CD")
        figure.equal_angles += [("ACD", 1), ("DCB", 1)]
        figure.give(angle("CAB"), givens, 0)
        figure.give(angle("ACD") if unknown == "foot" else angle("ABC"), givens, 1)
        figure.ask(angle("ADC") if unknown == "foot" else angle("DCB"))
        figure.spare_length(rng.choice(("AC", "BC")), spare(rng))
        return figure


class CrossingLines(Theorem):
    """Two lines cross; unknown `vertical` from the angle across, `adjacent` from the next one, `right` beside 90°."""

    name = "crossing_lines"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("vertical", "adjacent", "right"))
        return (pick_angle(rng, level, *((25, 65) if unknown == "right" else (35, 145))),), unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        return (
            (f"x = {givens[0]}.", str(givens[0]))
            if unknown == "vertical"
            else rest(90 if unknown == "right" else 180, givens)
        )

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        turn, given = rng.uniform(0, 360), givens[0]
        ends = {"A": 0, "B": given, "C": 180, "D": 180 + given}
        if unknown == "right":
            ends = {"A": 0, "B": given, "C": 180, "D": 180 + given, "E": 90}
        figure = Figure({"O": 0j} | {name: polar(turn + at, rng.uniform(0.85, 1.1)) for name, at in ends.items()})
        figure.line("AC", "BD", ends=rng.choice(("", "both")))
        figure.give(angle("AOB"), givens, 0)
        if unknown == "right":
            figure.line("OE", ends="end")
            figure.right_angles.append("EOC")
            figure.ask(angle("BOE"))
        else:
            figure.ask(angle("COD") if unknown == "vertical" else angle("BOC"))
            figure.also(angle("DOA"))
        return figure


class Transversal(Theorem):
    """A line cuts two parallels; unknown `corresponding`, `alternate`, `same_side` or `outer`: same side, outside."""

    name = "transversal"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        unknown = rng.choice(("corresponding", "alternate", "same_side", "outer"))
        return (pick_angle(rng, level, 40, 140),), unknown

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        if unknown in ("same_side", "outer"):
            return rest(180, givens)
        return f"x = {givens[0]}.", str(givens[0])

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        up = polar(givens[0], 1 / math.sin(math.radians(givens[0])))
        reach, over = rng.uniform(0.75, 1.1), rng.uniform(0.45, 0.6)
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
        figure.give(angle(known), givens, 0)
        figure.ask(angle(asked))
        return figure


class ParallelInTriangle(Theorem):
    """A segment is parallel to a side; unknown `same`: the angle equal to the given one, `other`: the third one."""

    name = "parallel_in_triangle"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if rng.random() < 0.4:
            return (pick_angle(rng, level, 35, 100),), "same"
        first = pick_angle(rng, level, 35, 85)
        return (first, pick_angle(rng, level, 35, 145 - first)), "other"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        return (f"x = {givens[0]}.", str(givens[0])) if unknown == "same" else rest(180, givens)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        second = givens[1] if unknown == "other" else rng.randint(max(35, 80 - givens[0]), min(85, 145 - givens[0]))
        # The angle at A is the first given, the apex C the second.
        points = triangle(givens[0], 180 - givens[0] - second)
        share = rng.uniform(0.4, 0.62)
        for name, end in (("D", "A"), ("E", "B")):
            points[name] = points[end] + (points["C"] - points[end]) * (1 - share)
        figure = Figure(points, upright=True)
        figure.polygon("ABC")
        figure.line("DE")
        figure.parallel("AB", "DE")
        figure.give(angle("CDE"), givens, 0)
        if unknown == "other":
            figure.give(angle("BCA"), givens, 1)
            figure.ask(angle("ABC"))
            figure.also(angle("CAB"))
        else:
            figure.ask(angle("CAB"))
        figure.spare_length(rng.choice(("AB", "DE")), spare(rng))
        return figure


class AltitudeAngle(Theorem):
    """An altitude of a triangle; unknown `beside` it from a base angle, or the `apex` from both base angles."""

    name = "altitude_angles"

    def numbers(self, rng: Random, level: int) -> tuple[Givens, str]:
        if rng.random() < 0.5:
            return (pick_angle(rng, level, 30, 65),), "beside"
        first = pick_angle(rng, level, 40, 75)
        return (first, pick_angle(rng, level, max(40, 105 - first), 75)), "apex"

    def work(self, givens: Givens, unknown: str) -> tuple[str, str]:
        require_angles(givens)
        require(max(givens) < 90, "the foot of an altitude lies inside the base")
        if unknown == "beside":
            return rest(90, givens)
        first, second = givens
        steps, total = add((90 - first, 90 - second))
        return " ".join([f"90 - {first} = {90 - first}. 90 - {second} = {90 - second}.", *steps]), str(total)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        second = givens[1] if unknown == "apex" else rng.randint(40, 65)
        points = triangle(givens[0], second)
        figure = Figure(points | {"D": foot(points["C"], points["A"], points["B"])})
        figure.polygon("ABC")
        figure.line("CD")
        figure.right_angles.append("CDB")
        figure.give(angle("CAB"), givens, 0)
        if unknown == "apex":
            figure.give(angle("ABC"), givens, 1)
            figure.ask(angle("ACB"))
        else:
            figure.ask(angle("ACD"))
            figure.also(angle("DCB"))
        figure.spare_length(rng.choice(("AC", "BC")), spare(rng))
        return figure
