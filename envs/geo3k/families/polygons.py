"""The family about the interior angles of quadrilaterals and pentagons."""

from __future__ import annotations

from random import Random

from envs.geo3k.canvas import Canvas, Point
from envs.geo3k.families.arithmetic import rest
from envs.geo3k.families.family import Case, Family, Givens, Solution, pick_angle, require_angles
from envs.geo3k.families.layout import TURN, arrange, in_order, polygon, soften

ANGLE_SUM = {"quadrilateral": 360, "pentagon": 540}


class QuadrilateralAngles(Family):
    """All interior angles but x are given; unknown `quadrilateral`, or `pentagon` (level 3)."""

    name = "quadrilateral_angles"

    def sample(self, rng: Random, level: int) -> Case:
        if level == 3 and rng.random() < 0.4:
            givens = tuple(pick_angle(rng, level, 90, 125) for _ in range(3))
            total = sum(givens)
            return (*givens, pick_angle(rng, level, max(80, 390 - total), min(140, 480 - total))), "pentagon"
        first = pick_angle(rng, level, 60, 125)
        second = pick_angle(rng, level, 60, 125)
        total = first + second
        return (first, second, pick_angle(rng, level, max(60, 210 - total), min(125, 310 - total))), "quadrilateral"

    def solve(self, givens: Givens, unknown: str) -> Solution:
        require_angles(givens)
        reasoning, answer = rest(ANGLE_SUM[unknown], givens)
        require_angles((int(answer),))
        return reasoning, answer

    def draw(self, canvas: Canvas, givens: Givens, unknown: str, rng: Random) -> None:
        *shown, last = soften((*givens, ANGLE_SUM[unknown] - sum(givens)), 58)

        def build() -> tuple[tuple[list[Point], list[int]], list[Point]]:
            phase = rng.uniform(0, TURN)
            corners, places = arrange(shown, last, phase, rng)
            shape = polygon(corners, phase - TURN / 2 / len(corners))
            return (shape, places), [shape[place] for place in places[:-1]]

        shape, places = in_order(build)
        points = canvas.fit(shape, rng, (8, 8), stretch=1.3)
        canvas.polygon(points)
        for place, text in zip(places, [*(f"{angle}°" for angle in givens), "x°"], strict=True):
            canvas.angle(points[place], points[place - 1], points[(place + 1) % len(points)], text)
        canvas.expect_order(len(givens))
