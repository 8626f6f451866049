"""Theorems about lengths in circles: tangents, chords and secants, arcs and sectors."""

from __future__ import annotations

import cmath
import math
from random import Random
from typing import ClassVar

from envs.geo3k.families.arithmetic import (
    calculation,
    divide,
    fraction,
    multiply,
    over,
    radical,
    reduced,
    rest,
    root_of,
)
from envs.geo3k.families.family import Case, Givens, Solution, require, require_angles
from starter.textbook.figure import Figure, meet, polar, unit
from starter.textbook.theorem import Theorem, pick_angle
from starter.textbook.theorems.circles import LOOKS_TANGENT, circle
from starter.textbook.theorems.lengths import Pythagoras, leg_of, scaled_triple


class TangentRadius(Theorem):
    """A tangent is perpendicular to the radius; unknown `angle`, or by Pythagoras `tangent`, `radius`, `distance`."""

    name = "tangent_radius"

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("angle", "tangent", "radius", "distance"))
        if unknown == "angle":
            return (pick_angle(rng, level, 27, 60),), unknown
        if level < 3:
            sides = ((3, 4, 5), (4, 3, 5), (5, 12, 13), (8, 15, 17), (15, 8, 17))
            a, b, c = scaled_triple(rng, 3 if level == 1 else 9, sides)
        else:
            a = rng.randint(3, 20)
            b = rng.randint(3, 25)
            c = a + b // 2 + 1
        return {"tangent": (c, a), "radius": (c, b), "distance": (a, b)}[unknown], unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        if unknown == "angle":
            require_angles(givens)
            return rest(90, givens)
        return Pythagoras().work(givens, "hypotenuse" if unknown == "distance" else "leg")

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "angle":
            radius = math.tan(math.radians(givens[0]))
            tangent = 1.0
        elif unknown == "distance":
            radius = float(givens[0])
            tangent = float(givens[1])
        else:
            other = leg_of(*givens)
            radius, tangent = (givens[1], other) if unknown == "tangent" else (other, givens[1])
        figure = Figure({"O": 0j, "T": complex(radius), "P": complex(radius, tangent)})
        figure.circle("OT")
        figure.line("OT", "TP", "PO")
        figure.right_angles.append("OTP")
        if unknown == "angle":
            figure.label(givens, "TPO", "POT")
            figure.spare_length(rng, "OT", "TP")
            return figure
        parts = {"tangent": ("OP", "OT", "TP"), "radius": ("OP", "TP", "OT"), "distance": ("OT", "TP", "OP")}[unknown]
        figure.label(givens, *parts)
        return figure


class TwoTangents(Theorem):
    """Two tangents from a point; unknown `angle` from the arc, `arc` from the angle, or `perimeter`.

    The perimeter is that of a triangle around the circle, from a tangent at each corner.
    """

    name = "two_tangents"
    note = LOOKS_TANGENT

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("angle", "arc", "perimeter"))
        if unknown == "perimeter":
            high = {1: 9, 2: 20, 3: 40}[level]
            low = max(3, high // 3)
            return tuple(rng.randint(low, high) for _ in range(3)), unknown
        return (pick_angle(rng, level, 40, 80) if unknown == "arc" else pick_angle(rng, level, 100, 140),), unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        if unknown != "perimeter":
            require_angles(givens)
            return rest(180, givens)
        a, b, c = givens
        total = a + b + c
        return f"{calculation(a, '+', b)} {a + b} + {c} = {total}. {calculation(2, '*', total)}", str(2 * total)

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown != "perimeter":
            if unknown == "angle":
                half = givens[0] / 2
            else:
                half = 90 - givens[0] / 2
            figure = Figure(circle(A=-half, B=half) | {"P": complex(1 / math.cos(math.radians(half)))})
            figure.circle("OA")
            figure.line("PA", "PB")
            if unknown == "arc":
                parts = ("APB", "arc OAB")
            else:
                parts = ("arc OAB", "APB")
            figure.label(givens, *parts)
            return figure
        x, y, z = givens  # tangents from A, B and C
        radius = math.sqrt(x * y * z / (x + y + z))
        a = 0j
        b = complex(x + y)
        center = complex(x, radius)
        c = a + unit(center) ** 2 * (x + z)
        figure = Figure({"A": a, "B": b, "C": c, "D": complex(x), "E": b + unit(c - b) * y})
        figure.points |= {"F": unit(c) * x, "o": center}
        figure.circles.append("oD")
        figure.dots += "DEF"
        figure.line("AB", "BC", "CA")
        figure.label(givens, "AD", "BE", "CF", "perimeter ABC")
        return figure


class SecantLengths(Theorem):
    """Secants or a tangent from a point: the products of the whole and the outer part are equal.

    Unknown `secant`: outer and inner part of one secant and the outer part of the other are given, its inner part is
    asked; `tangent`: outer and inner part are given, the tangent is asked.
    """

    name = "secant_lengths"
    note = LOOKS_TANGENT

    def numbers(self, rng: Random, level: int) -> Case:
        high = {1: 8, 2: 14, 3: 20}[level]
        if rng.random() < 0.5:
            root = rng.randint(3, high)
            outer = rng.randint(2, high)
            if level == 3:
                inner = rng.randint(2, 2 * high)
            else:
                inner = root * root // outer - outer
            return (outer, inner), "tangent"
        return (rng.randint(3, high), rng.randint(3, high), rng.randint(3, high)), "secant"

    def work(self, givens: Givens, unknown: str) -> Solution:
        outer, inner = givens[:2]
        require(inner > 0, "a length is above 0")
        steps, product = multiply(outer + inner, outer)
        start = " ".join([calculation(outer, "+", inner), *steps])
        if unknown == "tangent":
            last, answer = root_of(product)
            return f"{start} {last}", answer
        other = givens[2]
        require(product > other * other, "the whole secant is longer than its outer part")
        step, whole = divide(product, other)
        answer = fraction(product - other * other, other)
        return f"{start} {step} {whole} - {other} = {answer}.", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        outer, inner = givens[:2]
        power = float(outer * (outer + inner))
        middle = outer + inner / 2
        if unknown == "tangent":
            # The center is above the middle of the chord; the tangent has length sqrt(power) for any such center.
            height = inner * rng.uniform(0.1, 0.35)
            center = complex(middle, height)
            radius = abs(complex(inner / 2, height))
            reach = math.sqrt(power)
            lean = math.asin(radius / abs(center))
            touch = cmath.rect(reach, cmath.phase(center) + lean)
            figure = Figure({"P": 0j, "A": complex(outer), "B": complex(outer + inner), "T": touch, "o": center})
            figure.circles.append("oA")
            figure.line("PB")
            figure.line("PT")
            figure.label(givens, "PA", "AB", "PT")
            return figure
        other = givens[2]
        turn = polar(rng.uniform(28, 55))
        across = turn * (other + power / other) / 2
        center = meet(complex(middle), complex(middle, 1), across, across + 1j * turn)
        figure = Figure({"P": 0j, "A": complex(outer), "B": complex(outer + inner), "C": turn * other})
        figure.points |= {"D": turn * power / other, "o": center}
        figure.circles.append("oA")
        figure.line("PB", "PD")
        figure.label(givens, "PA", "AB", "PC", "CD")
        return figure


class ChordDistance(Theorem):
    """A line from the center perpendicular to a chord halves it; unknown `chord`, `distance` or `radius`."""

    name = "chord_distance"

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(("chord", "distance", "radius"))
        if level < 3:
            sides = ((3, 4, 5), (4, 3, 5), (5, 12, 13), (8, 15, 17), (20, 21, 29))
            far, half, radius = scaled_triple(rng, 3 if level == 1 else 9, sides)
        else:
            far = rng.randint(3, 15)
            half = rng.randint(3, 15)
            radius = max(far, half) + rng.randint(1, 6)
        return {"chord": (radius, far), "distance": (radius, 2 * half), "radius": (far, 2 * half)}[unknown], unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        first, second = givens
        steps = []
        if unknown != "chord":
            require(second % 2 == 0, "the chord is even")
            steps = [f"{second} / 2 = {second // 2}."]
            second = second // 2
        sign = "+" if unknown == "radius" else "-"
        square = first * first + (second * second if sign == "+" else -second * second)
        require(square > 0, "the radius is the longest side")
        steps += [calculation(first, "*", first), calculation(second, "*", second)]
        steps += [f"{first * first} {sign} {second * second} = {square}."]
        last, answer = root_of(square)
        if unknown != "chord" or "=" in last:
            steps += [last]
        if unknown == "chord":
            half = answer
            answer = radical(2, square)
            steps += [f"2 * {half} = {answer}."]
        return " ".join(steps), answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        if unknown == "chord":
            radius, far = givens
            half = leg_of(radius, far)
        else:
            half = givens[1] / 2
            if unknown == "radius":
                far = givens[0]
            else:
                far = leg_of(givens[0], half)
            radius = math.hypot(far, half)
        figure = Figure(
            {"O": 0j, "A": complex(-half, -far), "B": complex(half, -far), "M": complex(0, -far)}, spans=["AB"]
        )
        figure.circle("OA")
        figure.line("AB", "OM", "OA")
        figure.right_angles.append("OMB")
        parts = {"chord": ("OA", "OM", "AB"), "distance": ("OA", "AB", "OM"), "radius": ("OM", "AB", "OA")}[unknown]
        figure.label(givens, *parts)
        return figure


class _Round(Theorem):
    """A central angle and the radius of a circle are given."""

    note = "Write it in terms of \\pi."
    takes_algebra = is_whole = False
    is_ordered = True
    asked: ClassVar[str]

    def numbers(self, rng: Random, level: int) -> Case:
        opening = rng.choice(
            {1: (60, 90, 120), 2: (30, 45, 60, 90, 120, 135, 150), 3: tuple(range(30, 171, 10))}[level]
        )
        return (opening, rng.randint(2, {1: 12, 2: 24, 3: 40}[level])), "arc"

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        opening, radius = givens
        turn = rng.uniform(0, 360)
        figure = Figure({"O": 0j, "A": polar(turn, radius), "B": polar(turn + opening, radius)})
        figure.circle("OA")
        figure.line("OA", "OB")
        figure.label(givens, "AOB", "OA", f"{self.asked} OAB")
        return figure


def pi_times(numerator: int, denominator: int) -> str:
    r"""Return a multiple of pi: pi_times(5, 3) is '\frac { 5 \pi } { 3 }'."""
    numerator, denominator = reduced(numerator, denominator)
    if numerator == 1:
        times = "\\pi"
    else:
        times = f"{numerator} \\pi"
    return over(times, denominator)


class ArcLength(_Round):
    """A central angle and the radius are given; the length of the arc is asked in terms of pi."""

    name = asked = "arc_length"

    def work(self, givens: Givens, unknown: str) -> Solution:
        opening, radius = givens
        require(opening < 180, "the arc is below 180 degrees")
        steps, product = multiply(opening, radius)
        step, value = divide(product, 180)
        return f"{' '.join(steps)} {step} {value} * \\pi = {pi_times(product, 180)}.", pi_times(product, 180)


class SectorArea(_Round):
    """A central angle and the radius are given; the area of the shaded sector is asked in terms of pi."""

    name = "sector_area"
    asked = "sector"

    def work(self, givens: Givens, unknown: str) -> Solution:
        opening, radius = givens
        require(opening < 180, "the arc is below 180 degrees")
        steps, product = multiply(opening, radius * radius)
        step, value = divide(product, 360)
        square = calculation(radius, "*", radius)
        answer = pi_times(product, 360)
        return f"{square} {' '.join(steps)} {step} {value} * \\pi = {answer}.", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        figure = super().build(givens, unknown, rng)
        figure.shaded.append("OAB arc")
        return figure
