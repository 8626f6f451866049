"""Theorems of trigonometry: ratios, the laws of sines and cosines, with answers to a tenth."""

from __future__ import annotations

import math
from random import Random

from envs.geo3k.families.arithmetic import calculation
from envs.geo3k.families.family import Case, Givens, Solution, require
from starter.textbook.figure import Figure, polar, triangle
from starter.textbook.theorem import Theorem, pick_angle
from starter.textbook.theorems.lengths import right

TO_TENTH = "Round to the nearest tenth."


def thousandths(value: float) -> int:
    """Return a sine, cosine or tangent in thousandths."""
    return round(1000 * value)


def to_tenth(value: float) -> str:
    """Return a number rounded to the nearest tenth, without a zero at its end: 7.04 is "7"."""
    return f"{value:.1f}".removesuffix(".0")


def decimal(thousandth: int) -> str:
    """Return thousandths as a decimal: 602 is "0.602"."""
    return f"{thousandth / 1000:.3f}".rstrip("0").rstrip(".")


def sure_tenth(value: float, exact: float) -> str:
    """Return a value, computed with three decimals, to the nearest tenth.

    Raises ValueError if the exact value rounds to another tenth, or is near the border between two.
    """
    answer = to_tenth(value)
    require(answer == to_tenth(exact) and abs(exact * 10 % 1 - 0.5) > 0.02, "three decimals suffice for the tenth")
    return answer


class TrigonometricRatio(Theorem):
    """An angle and a side of a right triangle are given; unknown `sin`, `cos` or `tan` of the angle times the side."""

    name = "trigonometric_ratio"
    note = TO_TENTH
    takes_algebra = is_whole = False
    is_ordered = True

    def numbers(self, rng: Random, level: int) -> Case:
        return (pick_angle(rng, level, 25, 65), rng.randint(4, {1: 12, 2: 25, 3: 60}[level])), rng.choice(
            ("sin", "cos", "tan")
        )

    def work(self, givens: Givens, unknown: str) -> Solution:
        opening, side = givens
        require(opening < 90, "the angle of a right triangle is below 90 degrees")
        ratio = {"sin": math.sin, "cos": math.cos, "tan": math.tan}[unknown](math.radians(opening))
        short = decimal(thousandths(ratio))
        answer = sure_tenth(side * thousandths(ratio) / 1000, side * ratio)
        return f"\\{unknown} {opening} = {short}. {side} * {short} = {answer}.", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        opening = math.radians(givens[0])
        side = givens[1]
        if unknown == "tan":
            long = side / math.cos(opening)
        else:
            long = float(side)
        figure = Figure(right(long * math.cos(opening), long * math.sin(opening)))
        figure.polygon("ABC")
        figure.right_angles.append("ACB")
        figure.label(givens, "CAB", "CA" if unknown == "tan" else "AB", "CA" if unknown == "cos" else "CB")
        return figure


class LawOfSines(Theorem):
    """Two angles and the side across from the second are given; the side across from the first is asked."""

    name = "law_of_sines"
    note = TO_TENTH
    takes_algebra = is_whole = False
    is_ordered = True

    def numbers(self, rng: Random, level: int) -> Case:
        first = pick_angle(rng, level, 30, 100)
        return (first, pick_angle(rng, level, 30, 145 - first), rng.randint(4, {1: 12, 2: 25, 3: 50}[level])), "side"

    def work(self, givens: Givens, unknown: str) -> Solution:
        first, second, side = givens
        require(first + second < 180, "the angles of a triangle add up to 180 degrees")
        sines = [math.sin(math.radians(opening)) for opening in (first, second)]
        top, bottom = (thousandths(sine) for sine in sines)
        require(bottom > 0, "an angle is above 0 degrees")
        answer = sure_tenth(side * top / bottom, side * sines[0] / sines[1])
        middle = decimal(side * top)
        steps = (
            f"\\sin {first} = {decimal(top)}. \\sin {second} = {decimal(bottom)}. {side} * {decimal(top)} = {middle}."
        )
        return f"{steps} {middle} / {decimal(bottom)} = {answer}.", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        first, second, side = givens
        third = 180 - first - second
        base = side * math.sin(math.radians(third)) / math.sin(math.radians(second))
        figure = Figure(triangle(first, second, base))
        figure.polygon("ABC")
        figure.label(givens, "CAB", "ABC", "AC", "BC")
        return figure


class LawOfCosines(Theorem):
    """Two sides and the angle between them are given; the third side is asked."""

    name = "law_of_cosines"
    note = TO_TENTH
    takes_algebra = is_whole = False

    def numbers(self, rng: Random, level: int) -> Case:
        low, high = {1: (4, 12), 2: (5, 20), 3: (6, 40)}[level]
        return (rng.randint(low, high), rng.randint(low, high), pick_angle(rng, level, 35, 125)), "side"

    def work(self, givens: Givens, unknown: str) -> Solution:
        b, c, opening = givens
        require(opening < 180, "an angle is below 180 degrees")
        cosine = math.cos(math.radians(opening))
        size = thousandths(abs(cosine))
        squares = b * b + c * c
        twice = 2 * b * c
        sign = "-" if cosine >= 0 else "+"
        square = squares - math.copysign(twice * size / 1000, cosine)
        require(square > 0, "the third side is above 0")
        answer = sure_tenth(math.sqrt(square), math.sqrt(squares - twice * cosine))
        product = decimal(twice * size)
        left = decimal(round(1000 * square))
        steps = (
            f"{calculation(b, '*', b)} {calculation(c, '*', c)} {b * b} + {c * c} = {squares}.",
            f"{calculation(2, '*', b)} {2 * b} * {c} = {twice}.",
            f"\\cos {opening} = {'-' if sign == '+' else ''}{decimal(size)}. {twice} * {decimal(size)} = {product}.",
            f"{squares} {sign} {product} = {left}. \\sqrt {{ {left} }} = {answer}.",
        )
        return " ".join(steps), answer

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        return (*sorted(givens[:2]), givens[2])

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        b, c, opening = givens
        figure = Figure({"A": 0j, "B": complex(c), "C": polar(opening, b)})
        figure.polygon("ABC")
        figure.label(givens, "AC", "AB", "CAB", "BC")
        return figure
