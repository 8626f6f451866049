"""Places labels: of many candidate positions the one that touches nothing and is nearest to what it labels.

Coordinates are pixels with y down. A label is a box around its center.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from starter.textbook.figure import Point, unit

Candidate = tuple[Point, float, Point]  # a center, its cost, and a point of what it labels

GAP = 2.0  # pixels between a label and anything else
CONFLICT = 100.0  # the cost of touching one stroke or label
OFF_PREFERRED = 6.0
RIVAL = 1.1  # a label is nearer to its own part than to any other, by this factor
CROSSED = 12.0  # the cost of a leader line across a stroke
CLEAR = 2.0  # pixels that the line from a label to its part keeps from the part


class Placer:
    """Places labels one by one among strokes.

    Example::

        placer = Placer([(0j, 100 + 0j)])                   # one level line
        placer.choose(list(along(0j, 100 + 0j, 8, 5, 1, -1j)), 8, 5)    # (50+8.5j), 0: below the middle
    """

    def __init__(self, strokes: Sequence[tuple[Point, Point]]) -> None:
        ends_S2 = np.array(strokes, dtype=complex).reshape(-1, 2)
        self._middle_S: NDArray[np.complex128] = ends_S2.mean(axis=1)
        self._half_S: NDArray[np.complex128] = np.asarray(np.diff(ends_S2)[:, 0] / 2, dtype=np.complex128)
        self.boxes: list[tuple[Point, float, float]] = []  # center, half width, half height

    def choose(
        self, candidates: Sequence[Candidate], half_x: float, half_y: float, rivals: Sequence[Point] = ()
    ) -> tuple[Point, int]:
        """Return the center of the cheapest candidate for a box, and how many conflicts it has.

        A candidate conflicts with each stroke or box that it touches, with each stroke between it and its part, and
        with each rival: a point that is not clearly farther from it than its part.
        """
        centers_C, costs_C, anchors_C = _columns(candidates)
        conflicts_C = self._touched(centers_C, half_x + GAP, half_y + GAP) + self._crossed(anchors_C, centers_C)
        if rivals:
            apart_CR = np.abs(centers_C[:, None] - np.array(rivals))
            conflicts_C += (apart_CR < RIVAL * np.abs(centers_C - anchors_C)[:, None]).sum(axis=1)
        best = int((costs_C + CONFLICT * conflicts_C).argmin())
        return complex(centers_C[best]), int(conflicts_C[best])

    def choose_led(self, candidates: Sequence[Candidate], half_x: float, half_y: float) -> tuple[Point, int]:
        """Return the same for a label whose leader line may cross strokes, at a cost."""
        centers_C, costs_C, anchors_C = _columns(candidates)
        conflicts_C = self._touched(centers_C, half_x + GAP, half_y + GAP)
        costs_C = costs_C + CONFLICT * conflicts_C + CROSSED * self._crossed(anchors_C, centers_C)
        best = int(costs_C.argmin())
        return complex(centers_C[best]), int(conflicts_C[best])

    def put(self, center: Point, half_x: float, half_y: float) -> None:
        """Keep the place of a box free from now on."""
        self.boxes.append((center, half_x, half_y))

    def draw(self, start: Point, end: Point) -> None:
        """Add a stroke."""
        self._middle_S = np.append(self._middle_S, (start + end) / 2)
        self._half_S = np.append(self._half_S, (end - start) / 2)

    def _touched(self, centers_C: NDArray[np.complex128], x: float, y: float) -> NDArray[np.int64]:
        """Return how many strokes and boxes a box at each center touches."""
        # Separating axes of a box and a segment: x, y and the segment's normal.
        off_CS = self._middle_S - centers_C[:, None]
        half_x_S = np.abs(self._half_S.real)
        half_y_S = np.abs(self._half_S.imag)
        across_CS = np.abs(_cross(self._half_S, off_CS))
        touched_CS = (
            (np.abs(off_CS.real) < x + half_x_S)
            & (np.abs(off_CS.imag) < y + half_y_S)
            & (across_CS < x * half_y_S + y * half_x_S + 1e-9)
        )
        touched_C = touched_CS.sum(axis=1)
        for center, half_x, half_y in self.boxes:
            apart_C = np.abs((centers_C - center).real) < x + half_x + 1
            touched_C += apart_C & (np.abs((centers_C - center).imag) < y + half_y)
        return touched_C

    def _crossed(self, anchors_C: NDArray[np.complex128], centers_C: NDArray[np.complex128]) -> NDArray[np.int64]:
        """Return how many strokes lie between each anchor and its center."""
        way_C = centers_C - anchors_C
        starts_C = anchors_C + CLEAR * way_C / np.maximum(np.abs(way_C), 1e-9)
        way_CS = (centers_C - starts_C)[:, None]
        off_CS = self._middle_S - starts_C[:, None]
        turn_CS = _cross(way_CS, self._half_S)
        safe_CS = np.where(np.abs(turn_CS) < 1e-9, np.inf, turn_CS)
        on_way_CS = _cross(off_CS, self._half_S) / safe_CS
        on_stroke_CS = _cross(off_CS, way_CS) / safe_CS
        crossed_CS = (on_way_CS > 0) & (on_way_CS < 1) & (np.abs(on_stroke_CS) <= 1) & np.isfinite(safe_CS)
        return crossed_CS.sum(axis=1)


def _columns(
    candidates: Sequence[Candidate],
) -> tuple[NDArray[np.complex128], NDArray[np.float64], NDArray[np.complex128]]:
    """Return centers, costs and anchors as arrays."""
    centers, costs, anchors = zip(*candidates, strict=True)
    return np.array(centers), np.array(costs), np.array(anchors)


def _cross(a: NDArray[np.complex128], b: NDArray[np.complex128]) -> NDArray[np.float64]:
    return a.real * b.imag - a.imag * b.real


def reach(direction: complex, half_x: float, half_y: float) -> float:
    """Return how far a box extends from its center towards a direction of length 1."""
    return half_x * abs(direction.real) + half_y * abs(direction.imag)


def along(start: Point, end: Point, half_x: float, half_y: float, clear: float, inside: Point) -> Iterator[Candidate]:
    """Yield positions beside a segment, `clear` pixels from it; the side away from `inside` comes first."""
    normal = unit(end - start) * 1j
    if ((inside - start) * normal.conjugate()).real > 0:
        normal = -normal
    distance = reach(normal, half_x, half_y) + clear + GAP
    for at in (0.5, 0.42, 0.58, 0.34, 0.66, 0.27, 0.73, 0.2, 0.8):
        for side, extra in ((normal, 0.0), (-normal, OFF_PREFERRED)):
            for farther in (0.5, 3.0, 6.0):
                anchor = start + (end - start) * at
                yield anchor + side * (distance + farther), abs(at - 0.5) * 30 + extra + farther, anchor


def within(vertex: Point, start: Point, end: Point, half_x: float, half_y: float, least: float) -> Iterator[Candidate]:
    """Yield positions inside an angle, at least `least` pixels from its vertex."""
    u = unit(start - vertex)
    v = unit(end - vertex)
    opening = cmath.phase(v / u)
    for share in (0.5, 0.42, 0.58, 0.35, 0.65):
        direction = u * cmath.rect(1, opening * share)
        near = min(abs(opening) * share, abs(opening) * (1 - share))
        widest = max(reach(ray * 1j, half_x, half_y) for ray in (u, v)) + GAP + 1.5
        distance = max(widest / math.sin(min(near, math.pi / 2)), least + reach(direction, half_x, half_y))
        for farther in (0.0, 2.0, 4.0, 7.0, 10.0, 14.0, 19.0, 25.0):
            cost = 40 * abs(share - 0.5) + 1.2 * (distance + farther)
            yield vertex + direction * (distance + farther), cost, vertex


def around(point: Point, away: complex, half_x: float, half_y: float, clear: float) -> Iterator[Candidate]:
    """Yield positions around a point; those towards `away` come first."""
    for turn in range(24):
        direction = cmath.rect(1, 2 * math.pi * turn / 24)
        extra = 5 * (1 - (direction * away.conjugate()).real)
        for farther in (0.0, 2.5, 5.0, 9.0):
            center = point + direction * (reach(direction, half_x, half_y) + clear + farther)
            yield center, extra + farther, point


def beside_arc(
    center: Point, radius: float, first: float, opening: float, half_x: float, half_y: float
) -> Iterator[Candidate]:
    """Yield positions outside, then inside, an arc that starts at `first` and spans `opening` radians."""
    for share in (0.5, 0.4, 0.6, 0.3, 0.7, 0.22, 0.78):
        direction = cmath.rect(1, first + opening * share)
        for farther in (0.0, 3.0, 6.0):
            for side, extra in ((1, 0.0), (-1, OFF_PREFERRED)):
                distance = radius + side * (reach(direction, half_x, half_y) + GAP + 1.5 + farther)
                yield (
                    center + direction * distance,
                    25 * abs(share - 0.5) + farther + extra,
                    center + direction * radius,
                )


def at_distance(target: Point, distances: Sequence[float]) -> Iterator[Candidate]:
    """Yield positions around a point at larger distances, for a label with a leader line."""
    for turn in range(24):
        for distance in distances:
            yield target + cmath.rect(distance, 2 * math.pi * turn / 24), 0.5 * distance, target
