"""Families about the angles of a triangle: the angle sum, isosceles triangles, exterior angles."""

from __future__ import annotations

from random import Random

from envs.geo3k.canvas import Canvas
from envs.geo3k.families.arithmetic import calculation, divide
from envs.geo3k.families.family import AngleFamily, Case, Family, Givens, Solution, pick_angle, require, require_angles
from envs.geo3k.families.layout import left_to_right, polygon, rotated, soften, upright

LEAST_SHOWN = 40  # degrees; a narrower corner has no room for its label


class TriangleAngles(AngleFamily):
    """Two angles of a triangle are given, the third is x."""

    name = "triangle_angles"
    wholes = {"x": 180}  # noqa: RUF012 - read only

    def sample(self, rng: Random, level: int) -> Case:
        first = pick_angle(rng, level, 25, 115)
        return (first, pick_angle(rng, level, 25, 155 - first)), "x"

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        first, second = givens
        shown = soften((first, second, 180 - first - second), LEAST_SHOWN)
        points = polygon(shown, rng.uniform(0, 6.3))
        a, b, c = canvas.fit(left_to_right(points, points[0], points[1]), rng)
        canvas.polygon((a, b, c))
        for vertex, text in ((a, f"{first}°"), (b, f"{second}°"), (c, "x°")):
            start, end = (point for point in (a, b, c) if point != vertex)
            canvas.angle(vertex, start, end, text)
        canvas.expect_order(2)


class Isosceles(Family):
    """Ticks mark two equal sides; unknown `apex`: a base angle is given, `base`: the apex angle is given."""

    name = "isosceles"

    def sample(self, rng: Random, level: int) -> Case:
        if rng.random() < 0.5:
            return (pick_angle(rng, level, 20, 80),), "apex"
        if level != 2:
            apex = pick_angle(rng, level, 20, 140)
        else:
            apex = 2 * pick_angle(rng, level, 10, 70)
        return (apex,), "base"

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        (angle,) = givens
        if unknown == "base":
            step, answer = divide(180 - angle, 2)
            return f"{calculation(180, '-', angle)} {step}", answer
        require(angle < 90, "a base angle is below 90 degrees")
        return f"{calculation(2, '*', angle)} 180 - {2 * angle} = {180 - 2 * angle}.", str(180 - 2 * angle)

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        (angle,) = givens
        if unknown == "base":
            apex = angle
        else:
            apex = 180 - 2 * angle
        apex, left, right = soften((apex, (180 - apex) / 2, (180 - apex) / 2), LEAST_SHOWN)
        top, b, c = canvas.fit(rotated(polygon((apex, left, right), 0), rng.uniform(0, 6.3)), rng, stretch=1)
        canvas.polygon((top, b, c))
        canvas.ticks(top, b)
        canvas.ticks(top, c)
        corner, other = (b, c) if rng.random() < 0.5 else (c, b)
        canvas.angle(top, b, c, f"{angle}°" if unknown == "base" else "x°")
        canvas.angle(corner, top, other, "x°" if unknown == "base" else f"{angle}°")


class ExteriorAngle(Family):
    """One side of a triangle is extended; unknown `exterior`: the remote angles are given, `remote`: x is one of them.

    Givens of `remote` are the exterior angle, then the other remote angle.
    """

    name = "exterior_angle"

    def sample(self, rng: Random, level: int) -> Case:
        first = pick_angle(rng, level, 25, 100)
        second = pick_angle(rng, level, 25, 150 - first)
        if rng.random() < 0.5:
            return ((first, second), "exterior")
        return ((first + second, second), "remote")

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        first, second = givens
        if unknown == "exterior":
            require(first + second < 180, "an exterior angle is below 180 degrees")
            return calculation(first, "+", second), str(first + second)
        require(first > second, "an exterior angle is above each remote angle")
        return calculation(first, "-", second), str(first - second)

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        if unknown == "exterior":
            remote = givens
            texts = (f"{givens[0]}°", f"{givens[1]}°", "x°")
        else:
            exterior, known = givens
            remote = (exterior - known, known)
            texts = ("x°", f"{known}°", f"{exterior}°")
            if rng.random() < 0.5:
                remote = remote[::-1]
                texts = (texts[1], texts[0], texts[2])
        a, b, c = polygon(soften((*remote, 180 - sum(remote)), LEAST_SHOWN), 0)
        extends_a = rng.random() < 0.5
        near = a - c if extends_a else b - c
        # Turn the extended side level, so that the extension has room beside the triangle.
        shape = [(point - c) * abs(near) / near for point in (a, b, c)]
        shape = rotated([*shape, complex(-rng.uniform(0.35, 0.5) * abs(near))], upright(rng, 0.2))
        if rng.random() < 0.5:
            shape = [point.conjugate() for point in shape]
        if unknown == "exterior":
            shape = left_to_right(shape, shape[0], shape[1])
        a, b, c, end = canvas.fit(shape, rng)
        canvas.polygon((a, b, c))
        canvas.line(c, end)
        canvas.angle(a, b, c, texts[0])
        canvas.angle(b, c, a, texts[1])
        canvas.angle(c, b if extends_a else a, end, texts[2])
        if unknown == "exterior":
            canvas.expect_order(2)
