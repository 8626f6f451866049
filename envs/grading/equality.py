r"""The rules by which two parsed answers are equal.

- `same_value`: the same number, list or expression, by exact arithmetic or, for other texts, by math-verify.
- `same_text_or_rational`: the same normalised text, or the same rational number.
- `within_5_percent`: two real numbers that differ by at most 5 % of the second.
"""

from __future__ import annotations

import cmath
from fractions import Fraction

from envs.grading.algebra import equal_by_algebra
from envs.grading.arithmetic import Number
from envs.grading.normal_form import Reading, read
from envs.grading.screening import are_comparable, is_readable, is_tower

#: Of a decimal with this many digits or more, which was rounded, against an irrational number.
RELATIVE_TOLERANCE = 1e-6
MIN_ROUNDED_DIGITS = 6
#: Of two ways to compute one number with floats.
FLOAT_TOLERANCE = 1e-12


def same_value(answer: Reading, label: Reading) -> bool:
    r"""Return whether both mean the same, such as ``\sqrt{50}`` and ``5\sqrt{2}``, or ``x+1`` and ``1+x``.

    Two rationals must be exactly equal; where one side is irrational, a decimal of six digits or more may differ by a
    relative 1e-6, because it was rounded. Matrices are equal cell by cell. The letter of a choice equals the choice
    with its text, but the text alone does not equal the letter.
    """
    if answer.form == label.form:
        return True
    if answer.choice and answer.choice == label.choice and answer.choice in (answer.form, label.form):
        return True
    if answer.values is not None and label.values is not None:
        is_rounded = _has_long_decimal(answer) or _has_long_decimal(label)
        return answer.shape == label.shape and _same_numbers(answer.values, label.values, is_rounded)
    if answer.matrix and label.matrix:
        return _same_cells(answer.matrix, label.matrix)
    if ("=" in answer.form) != ("=" in label.form):
        answer, label = answer.in_full(), label.in_full()
    if not are_comparable(answer, label):
        return False
    if not all(is_readable(reading) and not is_tower(reading) for reading in (answer, label)):
        return False
    return equal_by_algebra(answer.form, label.form)


def same_text_or_rational(answer: Reading, label: Reading) -> bool:
    r"""Return whether both have the same normalised text or are the same rational: ``\frac{1}{2}`` and ``0.5``.

    It evaluates rational arithmetic (``3+4`` is 7) but no roots: ``\sqrt{4}`` is not 2, nor ``\sqrt{8}`` ``2\sqrt{2}``.
    """
    if answer.form == label.form:
        return True
    rationals = [
        reading.number
        for reading in (answer, label)
        if isinstance(reading.number, Fraction) and "\\sqrt" not in reading.tokens
    ]
    return len(rationals) == 2 and rationals[0] == rationals[1]


def within_5_percent(answer: Reading, label: Reading) -> bool:
    """Return whether both are real numbers and differ by at most 5 % of the label."""
    if answer.number is None or label.number is None:
        return False
    if isinstance(answer.number, complex) or isinstance(label.number, complex):
        return False
    try:
        return abs(answer.number - label.number) <= abs(label.number) / 20
    except OverflowError:  # a Fraction beyond the range of a float
        return False


def _same_cells(answer: list[list[str]], label: list[list[str]]) -> bool:
    if [*map(len, answer)] != [*map(len, label)]:
        return False
    pairs = [pair for rows in zip(answer, label, strict=True) for pair in zip(*rows, strict=True)]
    return all(same_value(read(a), read(b)) for a, b in pairs)


def _same_numbers(answer: tuple[Number, ...], label: tuple[Number, ...], is_rounded: bool) -> bool:
    pairs = zip(answer, label, strict=False)
    return len(answer) == len(label) and all(_same_number(a, b, is_rounded) for a, b in pairs)


def _same_number(a: Number, b: Number, is_rounded: bool) -> bool:
    """Compare two numbers; `is_rounded`: a decimal with many digits is written in one of them."""
    rationals = [number for number in (a, b) if isinstance(number, Fraction)]
    if len(rationals) == 2:
        return a == b
    # An integer beside an irrational is not rounded, nor is a fraction: 355/113 is not pi.
    is_rounded = is_rounded and all(number.denominator > 1 for number in rationals)
    try:
        return cmath.isclose(a, b, rel_tol=RELATIVE_TOLERANCE if is_rounded else FLOAT_TOLERANCE)
    except OverflowError:  # a Fraction beyond the range of a float
        return False


def _has_long_decimal(reading: Reading) -> bool:
    decimals = (token.replace(".", "") for token in reading.tokens if "." in token)
    return any(len(digits.strip("0")) >= MIN_ROUNDED_DIGITS for digits in decimals)
