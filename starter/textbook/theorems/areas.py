"""Theorems about areas, perimeters and coordinates; figures put together from rectangles and triangles."""

from __future__ import annotations

import math
from random import Random

from envs.geo3k.families.areas import Parallelogram, Rectangle, TrapezoidArea, TriangleArea
from envs.geo3k.families.arithmetic import calculation, divide, multiply
from envs.geo3k.families.family import Case, Givens, Solution, require
from starter.textbook.figure import Figure, Label, named_part, polar
from starter.textbook.theorem import Theorem

LENGTHS = {1: (2, 12), 2: (4, 20), 3: (5, 45)}


def two_lengths(rng: Random, level: int) -> tuple[int, int]:
    """Return two lengths of a level whose ratio is at most 3."""
    low, high = LENGTHS[level]
    first = rng.randint(low, high)
    return first, rng.randint(max(low, -(-first // 3)), min(high, 3 * first))


class _Area(Theorem):
    takes_algebra = False
    is_ordered = True


class AreaOfTriangle(_Area):
    """Base and altitude of a triangle are given; the altitude lies inside, or outside the base."""

    name = "area_of_triangle"

    def numbers(self, rng: Random, level: int) -> Case:
        base, high = two_lengths(rng, level)
        return (base + (base * high % 2 if level < 3 else 0), high), rng.choice(("inside", "outside"))

    def work(self, givens: Givens, unknown: str) -> Solution:
        return TriangleArea().solve(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        base, high = givens
        if unknown == "inside":
            at = base * rng.uniform(0.3, 0.6)
        else:
            at = -base * rng.uniform(0.25, 0.45)
        figure = Figure({"A": 0j, "B": complex(base), "C": complex(at, high), "D": complex(at)}, upright=True)
        figure.spans += ["AB"] if unknown == "inside" else []
        figure.polygon("ABC")
        figure.dashes.append("CD")
        figure.right_angles.append("CDB")
        if unknown == "outside":
            figure.dashes.append("DA")
        figure.label(givens, "AB", "CD", "area ABC")
        return figure


class AreaOfParallelogram(_Area):
    """Base and height of a parallelogram are given for its `area`, two sides for its `perimeter`."""

    name = "area_of_parallelogram"

    def numbers(self, rng: Random, level: int) -> Case:
        return two_lengths(rng, level), rng.choice(("area", "perimeter"))

    def work(self, givens: Givens, unknown: str) -> Solution:
        return Parallelogram().solve(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        base, second = givens
        if unknown == "perimeter":
            up = polar(rng.uniform(55, 75), second)
        else:
            slant = second + rng.randint(1, max(1, second // 4))
            up = complex(math.sqrt(slant**2 - second**2), second)
        points = {"A": 0j, "B": complex(base), "C": base + up, "D": up}
        figure = Figure(points, upright=True)
        figure.polygon("ABCD")
        if unknown == "perimeter":
            figure.equal("AB", "DC")
            figure.equal("AD", "BC", count=2)
            figure.label(givens, "AB", "BC", "perimeter ABCD")
        else:
            figure.points["e"] = complex(up.real)
            figure.dashes.append("De")
            figure.right_angles.append("DeB")
            figure.parallel("AB", "DC")
            figure.parallel("AD", "BC", count=2)
            figure.spans.append("AB")
            figure.label(givens, "AB", "De", "area ABCD")
            figure.spare = Label(named_part("AD"), str(round(abs(up))))
        return figure


class AreaOfTrapezoid(_Area):
    """Both parallel sides and the height of a trapezoid are given."""

    name = "area_of_trapezoid"

    def numbers(self, rng: Random, level: int) -> Case:
        long, high = two_lengths(rng, level)
        short = rng.randint(max(2, long // 3), max(2, long - 1))
        if level < 3 and (short + long) * high % 2:
            high += 1
        return (short, long, high), "area"

    def work(self, givens: Givens, unknown: str) -> Solution:
        return TrapezoidArea().solve(givens, unknown)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        short, long, high = givens
        lean = (long - short) * rng.choice((0.0, rng.uniform(0.3, 0.7)))
        points = {"A": 0j, "B": complex(long), "C": complex(lean + short, high), "D": complex(lean, high)}
        figure = Figure(points, upright=True)
        figure.polygon("ABCD")
        figure.parallel("AB", "DC")
        if lean:
            figure.spans.append("AB")
            figure.points["e"] = complex(lean)
            figure.dashes.append("De")
            figure.right_angles.append("DeB")
        else:
            figure.right_angles += ["DAB", "CDA"]
        figure.label(givens, "DC", "AB", "De" if lean else "AD", "area ABCD")
        return figure


class AreaOfRhombus(_Area):
    """The area of a rhombus is half the product of its diagonals; their halves are given."""

    name = "area_of_rhombus"

    def numbers(self, rng: Random, level: int) -> Case:
        return two_lengths(rng, level), "area"

    def work(self, givens: Givens, unknown: str) -> Solution:
        steps, product = multiply(*givens)
        return f"{' '.join(steps)} {calculation(2, '*', product)}", str(2 * product)

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        return tuple(sorted(givens))

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        wide, high = givens
        figure = Figure(
            {"A": complex(-wide), "B": complex(0, -high), "C": complex(wide), "D": complex(0, high), "E": 0j}
        )
        figure.polygon("ABCD")
        figure.line("AC", "BD")
        figure.equal("AB", "BC", "CD", "DA")
        figure.label(givens, "EC", "ED", "area ABCD")
        return figure


class CompositeArea(_Area):
    """Rectangles put together with a triangle (`roof`) or without a part (`corner`, `frame`, `perimeter`).

    `perimeter` is that of a rectangle without a corner, the others are areas; `frame` is shaded.
    """

    name = "composite_figure"
    note = "Angles that look right are right."

    def numbers(self, rng: Random, level: int) -> Case:
        low, high = {1: (5, 12), 2: (6, 18), 3: (8, 30)}[level]
        wide = rng.randint(low, high)
        tall = rng.randint(low, high)
        small = (rng.randint(2, max(2, wide * 6 // 10)), rng.randint(2, max(2, tall * 6 // 10)))
        unknown = rng.choice(("corner", "roof", "frame", "perimeter"))
        if unknown == "roof":
            return (wide, tall, rng.randint(2, max(2, wide // 2)) * 2), unknown
        return (wide, tall, *small), unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        wide, tall = givens[:2]
        if unknown == "perimeter":
            require(givens[2] < wide and givens[3] < tall, "the corner is smaller than the rectangle")
            return Rectangle().solve((wide, tall), unknown)
        steps, area = multiply(wide, tall)
        if unknown == "roof":
            more, product = multiply(wide, givens[2])
            step, half = divide(product, 2)
            require(product % 2 == 0, "the area is whole")
            return f"{' '.join([*steps, *more])} {step} {area} + {half} = {area + product // 2}.", str(
                area + product // 2
            )
        require(givens[2] < wide and givens[3] < tall, "the part is smaller than the rectangle")
        more, part = multiply(givens[2], givens[3])
        return f"{' '.join([*steps, *more])} {calculation(area, '-', part)}", str(area - part)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        wide, tall = givens[:2]
        if unknown == "roof":
            top = complex(wide / 2, tall + givens[2])
            points = {"A": 0j, "B": complex(wide), "C": complex(wide, tall), "D": top, "E": complex(0, tall)}
            figure = Figure(points | {"f": complex(wide / 2, tall)}, upright=True)
            figure.polygon("ABCDE")
            figure.dashes += ["EC", "Df"]
            figure.right_angles += ["EAB", "ABC", "DfC"]
            figure.label(givens, "AB", "BC", "Df", "area ABCDE")
        elif unknown == "frame":
            left = (wide - givens[2]) * rng.uniform(0.4, 0.6)
            low = (tall - givens[3]) * rng.uniform(0.4, 0.6)
            inner = complex(left, low)
            points = {"A": 0j, "B": complex(wide), "C": complex(wide, tall), "D": complex(0, tall)}
            points |= {
                "p": inner,
                "q": inner + givens[2],
                "r": inner + complex(*givens[2:]),
                "s": inner + 1j * givens[3],
            }
            figure = Figure(points, upright=True)
            figure.polygon("ABCD")
            figure.polygon("pqrs")
            figure.shaded.append("ABCD-pqrs")
            figure.right_angles += ["DAB", "spq"]
            figure.label(givens, "AB", "BC", "pq", "qr", "area ABCD-pqrs")
        else:
            cut_wide, cut_tall = givens[2:]
            points = {"A": 0j, "B": complex(wide), "C": complex(wide, tall - cut_tall)}
            points |= {
                "D": complex(wide - cut_wide, tall - cut_tall),
                "E": complex(wide - cut_wide, tall),
                "F": complex(0, tall),
            }
            figure = Figure(points, upright=True)
            figure.polygon("ABCDEF")
            figure.right_angles += ["FAB", "ABC", "BCD", "DEF", "EFA"]
            if unknown == "perimeter":
                asked = "perimeter"
            else:
                asked = "area"
            figure.label(givens, "AB", "FA", "CD", "DE", f"{asked} ABCDEF")
        return figure
