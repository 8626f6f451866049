"""Theorems whose labels are expressions in x: equal parts, and parts that make a whole."""

from __future__ import annotations

import math
from random import Random

from envs.geo3k.families.arithmetic import calculation, divide
from envs.geo3k.families.family import Case, Givens, Solution, require
from starter.textbook.figure import Figure, polar, scaled, triangle
from starter.textbook.theorem import Theorem
from starter.textbook.theorems.circles import LOOKS_TANGENT, circle

_EQUAL = ("isosceles", "parallelogram", "diagonal", "tangents", "vertical", "bisector", "kite")
_OF_ANGLES = ("vertical", "bisector")
_SUMS = {"line": 180, "same_side": 180, "right": 90, "cyclic": 180, "parallelogram": 180}


class EqualExpressions(Theorem):
    """Two equal parts are ax - b and cx + d with a above c; x is asked. Unknown says which parts are equal."""

    name = "equal_expressions"
    takes_algebra = False
    is_ordered = True

    def numbers(self, rng: Random, level: int) -> Case:
        x = rng.randint(2, {1: 8, 2: 14, 3: 25}[level])
        small = rng.randint(1, {1: 2, 2: 4, 3: 6}[level])
        large = small + rng.randint(1, {1: 2, 2: 3, 3: 5}[level])
        total = (large - small) * x
        less = rng.randint(1, max(1, total - 1))
        return (large, less, small, total - less), rng.choice(_EQUAL)

    def remark(self, unknown: str) -> str:
        if unknown == "tangents":
            return LOOKS_TANGENT
        return ""

    def work(self, givens: Givens, unknown: str) -> Solution:
        large, less, small, more = givens
        require(large > small, "the first factor is the larger one")
        total = less + more
        factor = large - small
        start = f"{more} + {less} = {total}. {large} - {small} = {factor}."
        step, answer = divide(total, factor)
        part = large * total - less * factor  # the size of each part, times the factor
        require(part > 0, "a part is above 0")
        require(unknown not in _OF_ANGLES or 25 * factor <= part <= 80 * factor, "the angle has room for its label")
        return f"{start} {step}", answer

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        large, less, small, more = givens
        size = large * (less + more) / (large - small) - less
        if unknown == "isosceles":
            figure = Figure(triangle(base := rng.uniform(40, 70), base, 2 * size * math.cos(math.radians(base))))
            figure.polygon("ABC")
            figure.equal_angles += [("CAB", 1), ("ABC", 1)]
            parts = "AC", "BC"
        elif unknown in ("parallelogram", "diagonal"):
            a = 0j
            b = complex(size * rng.uniform(0.6, 0.8))
            d = polar(rng.uniform(60, 75), size)
            figure = Figure({"A": a, "B": b, "C": b + d, "D": d})
            figure.polygon("ABCD")
            figure.parallel("AD", "BC")
            figure.parallel("AB", "DC", count=2)
            parts = "AD", "BC"
            if unknown == "diagonal":
                half = (b + d) / 2
                points = {name: point * size / abs(half) for name, point in figure.points.items()}
                figure.points = points | {"E": half * size / abs(half)}
                figure.line("AC", "BD")
                parts = "AE", "EC"
        elif unknown == "tangents":
            half = rng.uniform(52, 66)
            points = circle(A=-half, B=half) | {"P": complex(1 / math.cos(math.radians(half)))}
            scale = size / math.tan(math.radians(half))
            figure = Figure(scaled(points, scale))
            figure.circle("OA")
            figure.line("PA", "PB")
            parts = "PA", "PB"
        elif unknown == "kite":
            points = {"A": 1j * 0.6, "B": -1 + 0j, "C": -1j * rng.uniform(1.3, 1.8), "D": 1 + 0j}
            scale = size / abs(points["C"] - points["D"])
            figure = Figure(scaled(points, scale))
            figure.polygon("ABCD")
            figure.equal("AB", "AD")
            figure.equal("CB", "CD", count=2)
            parts = "CB", "CD"
        elif unknown == "vertical":
            turn = rng.uniform(-30, 30)
            ends = {"A": 0.0, "B": size, "C": 180.0, "D": 180 + size}
            figure = Figure({"O": 0j} | {name: polar(turn + at) for name, at in ends.items()})
            figure.line("AC", "BD", ends="both")
            parts = "AOB", "COD"
        else:
            figure = Figure({"A": 0j, "B": polar(size, 1.1), "C": polar(0), "D": polar(-size, 1.1)})
            figure.line("AB", "AC", "AD", ends="end")
            figure.equal_angles += [("BAC", 1), ("CAD", 1)]
            parts = "BAC", "CAD"
        if rng.random() < 0.5:
            parts = parts[::-1]
        figure.express(parts[0], givens, 0, "-")
        figure.express(parts[1], givens, 2)
        return figure


class SumOfExpressions(Theorem):
    """Two angles are ax + b and cx + d, and make 180 or 90 degrees together; x is asked."""

    name = "sum_of_expressions"
    takes_algebra = False

    def numbers(self, rng: Random, level: int) -> Case:
        unknown = rng.choice(tuple(_SUMS))
        high = {1: 3, 2: 6, 3: 9}[level]
        a = rng.randint(1, high)
        c = rng.randint(1, high)
        x = rng.randint(4, max(4, (_SUMS[unknown] - 20) // (a + c)))
        left = _SUMS[unknown] - (a + c) * x
        b = rng.randint(1, max(1, left - 1))
        return (a, b, c, left - b), unknown

    def work(self, givens: Givens, unknown: str) -> Solution:
        a, b, c, d = givens
        whole = _SUMS[unknown]
        left = _SUMS[unknown] - b - d
        require(left > 0, "x is above 0")
        start = f"{calculation(b, '+', d)} {whole} - {b + d} = {left}. {calculation(a, '+', c)}"
        step, answer = divide(left, a + c)
        return f"{start} {step}", answer

    def canonical(self, givens: Givens, unknown: str) -> Givens:
        a, b, c, d = givens
        return (*min((a, b), (c, d)), *max((a, b), (c, d)))

    def build(self, givens: Givens, unknown: str, rng: Random) -> Figure:
        a, b, c, d = givens
        first = a * (_SUMS[unknown] - b - d) / (a + c) + b
        if unknown in ("line", "right"):
            whole = _SUMS[unknown]
            figure = Figure({"O": 0j, "A": 1 + 0j, "B": polar(first), "C": polar(whole)})
            figure.line("OB")
            if unknown == "line":
                figure.line("AC")
            else:
                figure.line("OA", "OC", ends="end")
                figure.right_angles.append("AOC")
            parts = "AOB", "BOC"
        elif unknown == "same_side":
            up = polar(first, 1 / math.sin(math.radians(first)))
            points = {"P": -up / 2, "Q": up / 2, "t": up * 1.1, "s": -up * 1.1}
            points |= {"a": -up / 2 - 1, "b": -up / 2 + 1.2, "c": up / 2 - 1, "d": up / 2 + 1.2}
            figure = Figure(points)
            figure.line("ab", "cd", "st", ends="both")
            figure.parallel("ab", "cd")
            parts = "bPQ", "dQP"
        elif unknown == "parallelogram":
            points = {"A": 0j, "B": complex(rng.uniform(1.4, 1.8)), "D": polar(first)}
            figure = Figure(points | {"C": points["B"] + points["D"]})
            figure.polygon("ABCD")
            figure.parallel("AB", "DC")
            figure.parallel("AD", "BC", count=2)
            parts = "DAB", "ABC"
        else:
            cut = first * rng.uniform(0.85, 1.15)
            after = (360 - 2 * first) * rng.uniform(0.42, 0.58)
            end = 360 - after
            figure = Figure(circle(A=0, D=end, C=end - cut, B=end - 2 * first))
            figure.points["o"] = figure.points.pop("O")
            figure.circles.append("oA")
            figure.polygon("ABCD")
            parts = "DAB", "BCD"
        figure.express(parts[0], givens, 0)
        figure.express(parts[1], givens, 2)
        return figure
