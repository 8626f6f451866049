"""Exact arithmetic on integers that writes its steps as short reasoning and its answer in spaced LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fraction(numerator: int, denominator: int) -> str:
    r"""Return a reduced fraction: fraction(7, 2) is '\frac { 7 } { 2 }', fraction(8, 2) is '4'."""
    common = math.gcd(numerator, denominator)
    numerator = numerator // common
    denominator = denominator // common
    if denominator == 1:
        return str(numerator)
    return f"\\frac {{ {numerator} }} {{ {denominator} }}"


def radical(factor: int, radicand: int, denominator: int = 1) -> str:
    r"""Return factor * sqrt(radicand) / denominator in lowest terms: radical(1, 50) is '5 \sqrt { 2 }'."""
    for root in range(math.isqrt(radicand), 1, -1):
        if radicand % (root * root) == 0:
            factor = factor * root
            radicand = radicand // (root * root)
            break
    if radicand == 1:
        return fraction(factor, denominator)
    common = math.gcd(factor, denominator)
    factor = factor // common
    denominator = denominator // common
    if factor == 1:
        surd = f"\\sqrt {{ {radicand} }}"
    else:
        surd = f"{factor} \\sqrt {{ {radicand} }}"
    if denominator == 1:
        return surd
    return f"\\frac {{ {surd} }} {{ {denominator} }}"


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


def rest(whole: int, parts: Sequence[int]) -> tuple[str, str]:
    """Return the reasoning and answer of `whole` minus all parts; raise ValueError unless something is left.

    >>> rest(180, (47, 65))
    ('47 + 65 = 112. 180 - 112 = 68.', '68')
    """
    steps, total = add(parts)
    if total >= whole:
        raise ValueError(f"the parts must add up to less than {whole}")
    return " ".join([*steps, f"{whole} - {total} = {whole - total}."]), str(whole - total)
