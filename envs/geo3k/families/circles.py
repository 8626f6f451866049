"""The family about angles in a circle."""

from __future__ import annotations

import cmath
import math
from random import Random

from envs.geo3k.canvas import Canvas, Point
from envs.geo3k.families.arithmetic import divide, rest, twice
from envs.geo3k.families.family import Case, Family, Givens, Solution, pick_angle, require, require_angles
from envs.geo3k.families.layout import flipped, rotated


class CircleAngles(Family):
    """A central angle is twice the inscribed angle on the same arc, and its consequences.

    Unknown `inscribed` or `central` gives the other of the two; `semicircle` (a triangle on a diameter) and
    `cyclic` (opposite angles of an inscribed quadrilateral, from level 2) give one angle.
    """

    name = "circle_angles"

    def sample(self, rng: Random, level: int) -> Case:
        if level == 1:
            unknowns = ("inscribed", "central", "semicircle")
        else:
            unknowns = ("inscribed", "central", "semicircle", "cyclic")
        unknown = rng.choice(unknowns)
        if unknown == "inscribed":
            half = pick_angle(rng, level, 20, 80)
            return (2 * half + (level == 3 and rng.random() < 0.5),), unknown
        low, high = {"central": (20, 80), "semicircle": (20, 70), "cyclic": (50, 130)}[unknown]
        return (pick_angle(rng, level, low, high),), unknown

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        (angle,) = givens
        if unknown == "inscribed":
            return divide(angle, 2)
        if unknown == "central":
            require(angle < 90, "a central angle below 180 degrees is drawn")
            return twice(angle)
        return rest(180 if unknown == "cyclic" else 90, givens)

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        (angle,) = givens
        if unknown == "semicircle":
            slope = math.radians(2 * min(max(angle, 40), 50))
            shape = [1 + 0j, -1 + 0j, cmath.rect(1, math.pi - slope)]
            joins = [(0, 1), (1, 2), (2, 0)]
        elif unknown == "cyclic":
            half = math.radians(min(max(angle, 70), 110))
            shape = [cmath.rect(1, math.pi), cmath.rect(1, half), 1 + 0j, cmath.rect(1, -half)]
            joins = [(0, 1), (1, 2), (2, 3), (3, 0)]
        else:
            half = math.radians(min(max(angle if unknown == "central" else angle / 2, 40), 62))
            shape = [cmath.rect(1, math.pi + rng.uniform(-0.25, 0.25)), cmath.rect(1, half), cmath.rect(1, -half), 0j]
            joins = [(0, 1), (0, 2), (3, 1), (3, 2)]
        shape = flipped(rotated(shape, rng.uniform(-0.4, 0.4) + math.pi / 2 * rng.randrange(4)), rng)
        extent: list[Point] = [0j, -1 + 0j, 1 + 0j, 1j, -1j]
        center, left, *rest_of = canvas.fit([*extent, *shape], rng, (8, 6), stretch=1)
        points = rest_of[3:]
        canvas.circle(center, abs(left - center))
        for start, end in joins:
            canvas.line(points[start], points[end])
        given = f"{angle}°"
        if unknown == "semicircle":
            canvas.angle(points[1], points[0], points[2], given)
            canvas.angle(points[0], points[1], points[2], "x°")
        elif unknown == "cyclic":
            canvas.angle(points[0], points[1], points[3], given)
            canvas.angle(points[2], points[1], points[3], "x°")
        else:
            canvas.angle(points[0], points[1], points[2], given if unknown == "central" else "x°")
            canvas.angle(points[3], points[1], points[2], "x°" if unknown == "central" else given)
