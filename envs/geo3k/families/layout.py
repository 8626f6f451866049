"""Computes the points of shapes from angles and proportions, in any unit; `Canvas.fit` scales them to pixels."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import TypeVar

from envs.geo3k.canvas import Point

TURN = 2 * math.pi
LABEL_MARGIN = (26, 19)  # pixels around a figure for labels outside it

Shape = TypeVar("Shape")


def soften(angles: Sequence[float], least: float) -> list[float]:
    """Return angles with the same sum and order and none below `least` degrees, so that each has room for a label."""
    if min(angles) >= least:
        return list(angles)
    above = [max(angle - least, 0.0) for angle in angles]
    share = (sum(angles) - least * len(angles)) / sum(above)
    return [least + extra * share for extra in above]


def polygon(angles: Sequence[float], phase: float) -> list[Point]:
    """Return the polygon with these interior angles (degrees, clockwise on screen) whose sides touch a unit circle."""
    points = []
    direction = phase
    for angle in angles:
        half_turn = math.radians(180 - angle) / 2
        direction += half_turn
        points.append(cmath.rect(1 / math.cos(half_turn), direction))
        direction += half_turn
    return points


def upright(rng: Random, sway: float = 0.35) -> float:
    """Return a rotation in radians, close to upright or to upside down."""
    return rng.uniform(-sway, sway) + (math.pi if rng.random() < 0.5 else 0)


def rotated(points: Sequence[Point], angle: float) -> list[Point]:
    """Turn points about the origin by radians."""
    turn = cmath.rect(1, angle)
    return [point * turn for point in points]


def mirrored(points: Sequence[Point]) -> list[Point]:
    """Swap left and right."""
    return [-point.conjugate() for point in points]


def flipped(points: list[Point], rng: Random) -> list[Point]:
    """Return the points, mirrored half of the time."""
    if rng.random() < 0.5:
        return mirrored(points)
    return points


def left_to_right(points: Sequence[Point], first: Point, second: Point) -> list[Point]:
    """Return the points, mirrored if necessary, so that `first` lies left of `second`."""
    if first.real <= second.real:
        return list(points)
    return mirrored(points)


def in_order(build: Callable[[], tuple[Shape, Sequence[Point]]]) -> Shape:
    """Build shapes until the returned anchors go clearly from left to right; after 8 tries return the next one."""
    for _ in range(8):
        shape, anchors = build()
        if all(b.real - a.real > 0.15 for a, b in pairwise(anchors)):
            return shape
    return build()[0]


def arrange(givens: Sequence[float], last: float, phase: float, rng: Random) -> tuple[list[float], list[int]]:
    """Deal givens and one last angle to places around a center so that the givens read from left to right.

    Returns the angle at each place, clockwise from `phase` radians, and for each given, then the last, its place.
    """
    count = len(givens) + 1
    places = list(range(count))
    place_of_last = places.pop(rng.randrange(count))
    places.sort(key=lambda place: math.cos(phase + TURN * place / count))
    dealt = [0.0] * count
    for place, angle in zip([*places, place_of_last], [*givens, last], strict=True):
        dealt[place] = angle
    return dealt, [*places, place_of_last]
