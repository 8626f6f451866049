"""Exact arithmetic on integers that writes its steps as short reasoning and its answer in spaced LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fraction(numerator: int, denominator: int) -> str:
    r"""Return a reduced fraction: fraction(7, 2) is '\frac { 7 } { 2 }', fraction(8, 2) is '4'."""
    numerator, denominator = reduced(numerator, denominator)
    return over(str(numerator), denominator)


def reduced(numerator: int, denominator: int) -> tuple[int, int]:
    """Return both numbers without their common divisors."""
    common = math.gcd(numerator, denominator)
    return numerator // common, denominator // common


def over(term: str, denominator: int) -> str:
    r"""Return a fraction of a text, or the text alone over 1: over("\\pi", 3) is '\frac { \pi } { 3 }'."""
    if denominator == 1:
        return term
    return f"\\frac {{ {term} }} {{ {denominator} }}"


def radical(factor: int, radicand: int, denominator: int = 1) -> str:
    r"""Return factor * sqrt(radicand) / denominator in lowest terms: radical(1, 50) is '5 \sqrt { 2 }'."""
    for root in range(math.isqrt(radicand), 1, -1):
        if radicand % (root * root) == 0:
            factor = factor * root
            radicand = radicand // (root * root)
            break
    if radicand == 1:
        return fraction(factor, denominator)
    factor, denominator = reduced(factor, denominator)
    if factor == 1:
        surd = f"\\sqrt {{ {radicand} }}"
    else:
        surd = f"{factor} \\sqrt {{ {radicand} }}"
    return over(surd, denominator)


def root_of(square: int) -> tuple[str, str]:
    r"""Return the step of a square root and its value: 50 -> "\sqrt { 50 } = 5 \sqrt { 2 }.", "5 \sqrt { 2 }"."""
    answer = radical(1, square)
    root = f"\\sqrt {{ {square} }}"
    if answer == root:
        return f"{root}.", answer
    return f"{root} = {answer}.", answer


def calculation(a: int, sign: str, b: int) -> str:
    """Return one step: calculation(47, "+", 65) is "47 + 65 = 112."."""
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return f"{a} {sign} {b} = {result}."


def same(value: int) -> tuple[str, str]:
    """Return the solution of an unknown that equals a given."""
    return f"x = {value}.", str(value)


def twice(value: int) -> tuple[str, str]:
    """Return the solution of an unknown that is twice a given."""
    return calculation(2, "*", value), str(2 * value)


def add(values: Sequence[int]) -> tuple[list[str], int]:
    """Return the steps of a sum from left to right, and the sum: [47, 65, 10] -> two steps, 122."""
    steps = []
    total = values[0]
    for value in values[1:]:
        steps.append(f"{total} + {value} = {total + value}.")
        total += value
    return steps, total


def multiply(a: int, b: int) -> tuple[list[str], int]:
    """Return the steps of a product and the product; two factors above 12 are multiplied by tens and ones."""
    tens = b - b % 10
    ones = b % 10
    if min(a, b) <= 12 or ones == 0:
        return [f"{a} * {b} = {a * b}."], a * b
    return [
        f"{a} * {tens} = {a * tens}.",
        f"{a} * {ones} = {a * ones}.",
        f"{a * tens} + {a * ones} = {a * b}.",
    ], a * b


def divide(a: int, b: int) -> tuple[str, str]:
    r"""Return the step and the exact quotient: divide(7, 2) is ('7 / 2 = \frac { 7 } { 2 }.', '\frac { 7 } { 2 }')."""
    answer = fraction(a, b)
    return f"{a} / {b} = {answer}.", answer


def proportion(a: int, b: int, c: int) -> tuple[str, str]:
    """Return the solution of an unknown that is a * b / c."""
    steps, product = multiply(a, b)
    last, answer = divide(product, c)
    return " ".join([*steps, last]), answer


def mean(a: int, b: int) -> tuple[str, str]:
    """Return the solution of an unknown that is half the sum of two numbers."""
    step, answer = divide(a + b, 2)
    return f"{calculation(a, '+', b)} {step}", answer


def rest(whole: int, parts: Sequence[int]) -> tuple[str, str]:
    """Return the reasoning and answer of `whole` minus all parts; raise ValueError unless something is left.

    >>> rest(180, (47, 65))
    ('47 + 65 = 112. 180 - 112 = 68.', '68')
    """
    steps, total = add(parts)
    if total >= whole:
        raise ValueError(f"the parts must add up to less than {whole}")
    return " ".join([*steps, f"{whole} - {total} = {whole - total}."]), str(whole - total)
