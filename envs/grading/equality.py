r"""The rules by which two parsed answers are equal.

- `same_value`: the same number, list or expression, by exact arithmetic or, for other texts, by math-verify.
- `same_text_or_rational`: the same normalised text, or the same rational number.
- `within_5_percent`: two real numbers that differ by at most 5 % of the second.
"""

from __future__ import annotations

import cmath
import math
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
#: A float shows what rounding left of its sum, such as 3.3000000000000003, behind this many significant digits.
FLOAT_DIGITS = 12
#: Every decimal of up to this many significant digits is its own float's shortest form.
EXACT_DIGITS = 15


def same_value(answer: Reading, label: Reading) -> bool:
    r"""Return whether both mean the same, such as ``\sqrt{50}`` and ``5\sqrt{2}``, or ``x+1`` and ``1+x``.

    Two rationals must be equal (`_same_rational`); where one side is irrational, a decimal of six digits or more may
    differ by a relative 1e-6, because it was rounded. Matrices are equal cell by cell. The letter of a choice equals
    the choice with its text, but the text alone does not equal the letter.
    """
    if answer.form == label.form:
        return True
    # At least one is the bare letter: "(A) 12 cm" does not equal "(A) 13 cm".
    if answer.choice and answer.choice == label.choice and answer.choice in (answer.form, label.form):
        return True
    if answer.values is not None and label.values is not None:
        # Numbers on both sides are decided here, so math-verify never sees them.
        return answer.shape == label.shape and _same_numbers(answer, label)
    if answer.matrix and label.matrix:
        return _same_cells(answer.matrix, label.matrix)
    if ("=" in answer.form) != ("=" in label.form):
        answer = answer.in_full()
        label = label.in_full()
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
    return len(rationals) == 2 and _same_rational(*rationals, has_decimal=_has_decimal(answer, label))


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


def _same_numbers(answer: Reading, label: Reading) -> bool:
    """Compare the numbers of two readings one by one."""
    given = answer.values or ()
    gold = label.values or ()
    has_decimal = _has_decimal(answer, label)
    is_rounded = _has_long_decimal(answer) or _has_long_decimal(label)
    pairs = zip(given, gold, strict=False)
    return len(given) == len(gold) and all(_same_number(a, b, has_decimal, is_rounded) for a, b in pairs)


def _same_number(a: Number, b: Number, has_decimal: bool, is_rounded: bool) -> bool:
    """Compare two numbers; `has_decimal`: one is written as a decimal; `is_rounded`: it has many digits."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _same_rational(a, b, has_decimal)
    # An integer beside an irrational is not rounded, nor is a fraction: 355/113 is not pi.
    is_rounded = is_rounded and all(not isinstance(number, Fraction) or number.denominator > 1 for number in (a, b))
    try:
        return cmath.isclose(a, b, rel_tol=RELATIVE_TOLERANCE if is_rounded else FLOAT_TOLERANCE)
    except OverflowError:  # a Fraction beyond the range of a float
        return False


def _same_rational(a: Fraction, b: Fraction, has_decimal: bool) -> bool:
    """Return whether two rationals are equal, or one is a decimal that equals the other to 12 significant digits.

    Labels of a float column are decimals such as 3.3000000000000003. Integers must be equal, as must decimals of 13 to
    15 digits among themselves: somebody has written these.

    >>> _same_rational(Fraction("3.3"), Fraction("3.3000000000000003"), has_decimal=True)
    True
    """
    if a == b:
        return True
    if not has_decimal or a.denominator == b.denominator == 1:
        return False
    rounded_a = _rounded(a, FLOAT_DIGITS)
    rounded_b = _rounded(b, FLOAT_DIGITS)
    if (rounded_a == b and _is_decimal(a)) or (rounded_b == a and _is_decimal(b)):
        return True
    is_float = any(_is_decimal(number) and _rounded(number, EXACT_DIGITS) != number for number in (a, b))
    # Two near numbers can round to different sides of a tie, so a float is compared by its distance.
    return is_float and abs(a - b) * 2 * 10**FLOAT_DIGITS <= max(abs(a), abs(b))


def _rounded(number: Fraction, num_digits: int) -> Fraction:
    """Return a number with this many significant digits; as it is where these would not reach its decimal point."""
    if not number:
        return number
    # The power of ten of the first significant digit: 2 for 345, -3 for 0.0012.
    exponent = math.floor(math.log10(abs(number.numerator)) - math.log10(number.denominator))
    if exponent < num_digits:
        return Fraction(round(number, num_digits - 1 - exponent))
    return number


def _is_decimal(number: Fraction) -> bool:
    """Return whether a number has finitely many decimal places."""
    return pow(10, number.denominator.bit_length(), number.denominator) == 0


def _has_decimal(answer: Reading, label: Reading) -> bool:
    return any("." in token for reading in (answer, label) for token in reading.tokens)


def _has_long_decimal(reading: Reading) -> bool:
    decimals = (token.replace(".", "") for token in reading.tokens if "." in token)
    return any(len(digits.strip("0")) >= MIN_ROUNDED_DIGITS for digits in decimals)
