"""Theorems about angles of polygons: their sum, parallelograms, rhombi, kites."""

from __future__ import annotations

import math
from random import Random

from envs.geo3k.families.arithmetic import divide, rest, twice
from envs.geo3k.families.family import Case, Givens, Solution, require, require_angles
from starter.textbook.figure import Figure, meet, polar, triangle
from starter.textbook.theorem import AngleTheorem, Theorem, pick_angle


class PolygonAngles(Theorem):
    """All interior angles of a quadrilateral, pentagon or hexagon but one are given; unknown is its name."""

    name = "polygon_angles"

    def numbers(self, rng: Random, level: int) -> Case:
        count = {1: 4, 2: rng.choice((4, 5)), 3: rng.choice((4, 5, 5, 6))}[level]
        mean = 180 * (count - 2) / count
        low = int(mean - 25)
        high = int(mean + 25)
        return tuple(pick_angle(rng, level, low, high) for _ in range(count - 1)), {4: "four", 5: "five", 6: "six"}[
            count
        ]

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        count = len(givens) + 1
        reasoning, answer = rest(180 * (count - 2), givens)
        require(60 <= int(answer) <= 150, "the last angle is that of a convex polygon")
        return f"180 * {count - 2} = {180 * (count - 2)}. {reasoning}", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        count = len(givens) + 1
        angles = [*givens, 180 * (count - 2) - sum(givens)]
        directions = []
        heading = 0.0
        for corner in angles:
            directions.append(polar(heading))
            heading += 180 - corner
        # All sides but the last two are free; those close the polygon.
        corners = [0j]
        for direction in directions[: count - 2]:
            corners.append(corners[-1] + direction * rng.uniform(0.85, 1.15))
        last = meet(corners[-1], corners[-1] + directions[-2], 0j, directions[-1])
        closing = ((last - corners[-1]) / directions[-2]).real, (-last / directions[-1]).real
        require(min(closing) > 0.4, "the last sides have a length")
        figure = Figure(dict(zip("ABCDEF", [*corners, last], strict=False)))
        letters = "ABCDEF"[:count]
        figure.polygon(letters)
        # Side k leads from corner k to k + 1, so `angles[k]` is the angle at corner k + 1.
        around = letters + letters[:2]
        figure.label(givens, *(around[place : place + 3] for place in range(count)))
        return figure


class ParallelogramAngles(AngleTheorem):
    """Unknown `opposite` or `next` angle of a parallelogram, or `diagonal`: an angle beside the diagonal."""

    name = "parallelogram_angles"
    wholes = {"next": 180, "diagonal": 180}  # noqa: RUF012 - read only

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("opposite", "next", "diagonal"))
        if unknown != "diagonal":
            return (pick_angle(rng, level, 50, 130),), unknown
        return (pick_angle(rng, level, 60, 110), pick_angle(rng, level, 25, 50)), unknown

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "diagonal":  # the corner A, and the angle ABD
            points = triangle(*givens)
            a = points["A"]
            b = points["B"]
            d = points["C"]
        else:
            a = 0j
            b = complex(rng.uniform(1.2, 1.7))
            d = polar(givens[0])
        figure = Figure({"A": a, "B": b, "C": b + d - a, "D": d})
        figure.polygon("ABCD")
        if rng.random() < 0.5:
            figure.parallel("AB", "DC")
            figure.parallel("AD", "BC", count=2)
        else:
            figure.equal("AB", "DC")
            figure.equal("AD", "BC", count=2)
        if unknown == "diagonal":
            figure.line("BD")
            figure.label(givens, "DAB", "ABD", "CBD")
        else:
            figure.label(givens, "DAB", "BCD" if unknown == "opposite" else "ABC", also=("CDA",))
        figure.spare_length(rng, "AB", "BC")
        return figure


class RhombusAngles(Theorem):
    """The diagonals of a rhombus meet at right angles and halve its angles; unknown `beside` or `corner`."""

    name = "rhombus_angles"

    def numbers(self, rng: Random, level: int) -> Case:
        return (pick_angle(rng, level, 26, 64),), rng.choice(("beside", "corner"))

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        (given,) = givens
        require(given < 90, "half an angle of a rhombus is below 90 degrees")
        if unknown == "beside":
            return rest(90, givens)
        return twice(given)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        high = math.tan(math.radians(givens[0]))
        figure = Figure({"A": -1 + 0j, "B": -1j * high, "C": 1 + 0j, "D": 1j * high, "E": 0j})
        figure.polygon("ABCD")
        figure.equal("AB", "BC", "CD", "DA")
        figure.line("AC")
        figure.label(givens, "CAB", "ADB" if unknown == "beside" else "DCB")
        if unknown == "beside":
            figure.line("BD")
        else:
            del figure.points["E"]
        figure.spare_length(rng, "AB")
        return figure


class KiteAngles(Theorem):
    """Ticks mark the sides of a kite; its top and bottom angles are given, one of the equal side angles is asked."""

    name = "kite_angles"

    def numbers(self, rng: Random, level: int) -> Case:
        top = 2 * pick_angle(rng, level, 35, 65)
        return (top, 2 * pick_angle(rng, level, 20, top // 2 - 5)), "side"

    def work(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        steps, both = rest(360, givens)
        require(givens[0] > givens[1], "the first angle is the wider one")
        step, answer = divide(int(both), 2)
        return f"{steps} {step}", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        top, bottom = (1 / math.tan(math.radians(given / 2)) for given in givens)
        figure = Figure({"A": 1j * top, "B": -1 + 0j, "C": -1j * bottom, "D": 1 + 0j})
        figure.polygon("ABCD")
        figure.equal("AB", "AD")
        figure.equal("CB", "CD", count=2)
        figure.label(givens, "BAD", "BCD", "ABC", also=("CDA",))
        figure.spare_length(rng, "AB", "CD")
        return figure
