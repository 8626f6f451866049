"""A figure in plane coordinates: named points, what is drawn between them, and which part each label measures.

Points are complex numbers with y up, in the unit of the printed lengths, so every printed number can be measured in
the figure. A capital letter names a point that may get a letter; a small one names the end of a line.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal, cast

Point = complex
Kind = Literal["length", "angle", "arc", "area", "perimeter", "sector", "arc_length"]
Ends = Literal["", "end", "both"]

#: Parts that carry no label; the question names them.
WHOLES = {
    "area": "the area of the figure",
    "perimeter": "the perimeter of the figure",
    "sector": "the area of the shaded sector",
    "arc_length": "the length of the arc",
}


@dataclass(frozen=True)
class Part:
    """What a label measures: a segment "AB", the angle "ABC" at B, the arc "OAB" around O, or a polygon "ABCD".

    An arc runs anticlockwise from its second to its third point. "ABCD-pqrs" is a polygon with a hole.
    """

    kind: Kind
    points: str

    @property
    def has_name(self) -> bool:
        """Whether all its points may have letters."""
        return self.points.isupper()

    def name(self, letters: Mapping[str, str]) -> str:
        r"""Return how a question names the part: "A B", "m \\angle A B C" or "m \\widehat A B"."""
        named = " ".join(letters[point] for point in self.points)
        prefix = {"length": "", "angle": "m \\angle ", "arc": "m \\widehat "}[self.kind]
        return prefix + (named[2:] if self.kind == "arc" else named)


def named_part(name: str) -> Part:
    """Return a part by its name: "AB" is a segment, "ABC" the angle at B; others have their kind before: "arc OAB"."""
    kind, _, points = name.rpartition(" ")
    usual: Kind = "length" if len(points) == 2 else "angle"
    return Part(cast(Kind, kind) or usual, points)


@dataclass(frozen=True)
class Label:
    """A text at a part; `x` in it stands for the variable, and `givens` are the places of the numbers it shows."""

    part: Part
    text: str
    givens: tuple[int, ...] = ()


@dataclass
class Figure:
    """Points, strokes, marks and labels of one problem.

    Example::

        figure = Figure(triangle(47, 65))                  # A, B and C; the angles at A and B
        figure.polygon("ABC")
        figure.label((47,), "CAB", "BCA")                  # 47° at A; the question is about the angle at C
    """

    points: dict[str, Point]
    strokes: list[tuple[str, Ends]] = field(default_factory=list)  # "AB"; arrow heads at B or at both ends
    dashes: list[str] = field(default_factory=list)
    circles: list[str] = field(default_factory=list)  # "OA": around O, through A
    dots: list[str] = field(default_factory=list)
    right_angles: list[str] = field(default_factory=list)  # "ABC": at B
    ticks: list[tuple[str, int]] = field(default_factory=list)  # equal segments have the same number
    parallels: list[tuple[str, int]] = field(default_factory=list)  # parallel segments have the same number
    equal_angles: list[tuple[str, int]] = field(default_factory=list)  # equal angles have the same number of arcs
    spans: list[str] = field(default_factory=list)  # segments whose label stands on a dimension line outside
    shaded: list[str] = field(default_factory=list)  # "ABCD", "ABCD-pqrs" with a hole, or the sector "OAB arc"
    labels: list[Label] = field(default_factory=list)
    asked: Label | None = None
    others: list[Part] = field(default_factory=list)  # further unknown parts, which may get another variable
    spare: Label | None = None  # a true number that the solution does not need
    upright: bool = False  # drawn as it stands: with its base level

    def line(self, *pairs: str, ends: Ends = "") -> None:
        """Draw straight lines between pairs of points."""
        self.strokes.extend((pair, ends) for pair in pairs)

    def polygon(self, points: str) -> None:
        """Draw a closed polygon."""
        self.line(*(a + b for a, b in zip(points, points[1:] + points[0], strict=True)))

    def circle(self, center_and_point: str) -> None:
        """Draw a circle around the first point through the second, with a dot at the center."""
        self.circles.append(center_and_point)
        self.dots.append(center_and_point[0])

    def equal(self, *segments: str, count: int = 1) -> None:
        """Mark segments as equal."""
        self.ticks += [(segment, count) for segment in segments]

    def parallel(self, *segments: str, count: int = 1) -> None:
        """Mark segments as parallel; give them in the same direction."""
        self.parallels += [(segment, count) for segment in segments]

    def label(self, givens: Sequence[int], *names: str, also: Sequence[str] = ()) -> None:
        """Label parts with the givens in order; the part after them is asked. `also` are further unknown ones."""
        for place, (name, given) in enumerate(zip(names, givens, strict=False)):
            part = named_part(name)
            self.labels.append(Label(part, with_unit(part, str(given)), (place,)))
        if len(names) > len(givens):
            part = named_part(names[len(givens)])
            self.asked = Label(part, "" if part.kind in WHOLES else with_unit(part, "x"))
        self.others += map(named_part, also)

    def express(self, name: str, givens: Sequence[int], factor: int, sign: str = "+") -> None:
        """Label a part with an expression in x, whose factor is the given at a place, and its constant the next."""
        part = named_part(name)
        text = expression(givens[factor], givens[factor + 1], sign)
        self.labels.append(Label(part, with_unit(part, text), (factor, factor + 1)))

    def spare_length(self, rng: Random, segment: str, *others: str) -> None:
        """Scale a figure that shows angles alone so that one of these segments measures a number to be printed."""
        if others:
            segment = rng.choice((segment, *others))
        number = rng.randint(3, 40)
        a, b = self.ends(segment)
        scale = number / abs(b - a)
        self.points = scaled(self.points, scale)
        self.spare = Label(named_part(segment), str(number))

    def spare_angle(self, points: str, number: int) -> None:
        """Offer the size of an angle, in whole degrees, as a number that may be printed."""
        self.spare = Label(named_part(points), f"{number}°")

    def ends(self, names: str) -> list[Point]:
        """Return the points of a text of names."""
        return [self.points[name] for name in names]

    def turned(self, radians: float, mirrored: bool) -> Figure:
        """Return the figure turned, and mirrored first if asked."""
        turn = cmath.rect(1, radians)
        if not mirrored:
            return replace(self, points=scaled(self.points, turn))
        return replace(
            self,
            points={name: -point.conjugate() * turn for name, point in self.points.items()},
            shaded=[_reversed(shape) if shape.endswith(" arc") else shape for shape in self.shaded],
            labels=[_mirrored(label) for label in self.labels],
            asked=_mirrored(self.asked) if self.asked else None,
            others=[_mirrored(Label(part, "")).part for part in self.others],
        )

    def is_clear(self) -> bool:
        """Return whether points keep apart, labelled angles are open, and labelled segments have room for a label."""
        points = list(self.points.values())
        size = max(abs(p - q) for p in points for q in points)
        if any(abs(p - q) < 0.09 * size for k, p in enumerate(points) for q in points[:k]):
            return False
        shown = [label.part for label in self.labels] + ([self.asked.part] if self.asked else []) + self.others
        for part in shown:
            if part.kind == "length" and abs(complex.__sub__(*self.ends(part.points))) < 0.16 * size:
                return False
            if part.kind == "angle" and not 17 <= self.opening(part.points) <= 165:
                return False
        return True

    def opening(self, points: str) -> float:
        """Return the angle at the second of three points, in degrees, below 180."""
        a, b, c = self.ends(points)
        return abs(math.degrees(cmath.phase((a - b) / (c - b))))


def _reversed(arc_points: str) -> str:
    """Return the same arc in a mirrored figure: "OAB" becomes "OBA"."""
    center, a, b, *rest = arc_points
    return "".join((center, b, a, *rest))


def _mirrored(label: Label) -> Label:
    if label.part.kind not in ("arc", "sector", "arc_length"):
        return label
    return replace(label, part=replace(label.part, points=_reversed(label.part.points)))


def with_unit(part: Part, text: str) -> str:
    """Return a label's text with the degree sign of an angle or arc: "2x + 3" becomes "(2x + 3)°"."""
    if part.kind not in ("angle", "arc"):
        return text
    if " " in text:
        return f"({text})°"
    return f"{text}°"


def expression(factor: int, constant: int, sign: str = "+") -> str:
    """Return "2x + 3" for 2 and 3."""
    return f"{'' if factor == 1 else factor}x {'+' if sign == '+' else '−'} {constant}"


def polar(degrees: float, radius: float = 1.0) -> Point:
    """Return the point at a direction and a distance from the origin."""
    return cmath.rect(radius, math.radians(degrees))


def triangle(a: float, b: float, base: float = 1.0) -> dict[str, Point]:
    """Return the triangle A, B, C with these angles at A and B, AB level and C above it."""
    c = 180 - a - b
    side = base * math.sin(math.radians(b)) / math.sin(math.radians(c))
    return {"A": 0j, "B": complex(base), "C": polar(a, side)}


def triangle_of_sides(a: float, b: float, c: float) -> dict[str, Point]:
    """Return the triangle A, B, C with BC = a, CA = b, AB = c; AB is level and C above it."""
    x = (b * b + c * c - a * a) / (2 * c)
    return {"A": 0j, "B": complex(c), "C": complex(x, math.sqrt(b * b - x * x))}


def unit(vector: complex) -> complex:
    """Return the vector of length 1 in the same direction."""
    return vector / abs(vector)


def scaled(points: Mapping[str, Point], factor: complex) -> dict[str, Point]:
    """Return points times a factor."""
    return {name: point * factor for name, point in points.items()}


def meet(p: Point, q: Point, r: Point, s: Point) -> Point:
    """Return where the lines pq and rs meet."""
    u = q - p
    v = s - r
    w = r - p
    return p + u * ((w.conjugate() * v).imag / (u.conjugate() * v).imag)


def foot(point: Point, a: Point, b: Point) -> Point:
    """Return the foot of the perpendicular from a point to the line ab."""
    along = unit(b - a)
    return a + along * ((point - a) * along.conjugate()).real
