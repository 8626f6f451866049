r"""Claims about exact arithmetic, with values worked out by hand; texts are written with spaces between tokens."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from envs.grading.arithmetic import MAX_DEPTH, Number, evaluate


def value(text: str) -> Number | None:
    """Return the value of a single number; None where it is not read as one."""
    values, shape = evaluate(tuple(text.split()))
    assert values is None or (len(values) == 1 and shape == "")
    return values[0] if values else None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 7),
        ("0.25", Fraction(1, 4)),
        (".5", Fraction(1, 2)),
        ("1 + 2 - 5", -2),
        ("1 - 2 - 3", -4),
        ("- 3 + 5", 2),
        ("+ 3", 3),
        ("- - 3", 3),
        ("- + 3", -3),
        ("2 * 3 / 4", Fraction(3, 2)),
        ("2 \\cdot 3 \\times 4", 24),
        ("12 \\div 4 \\div 3", 1),
        ("2 * - 3", -6),
        ("6 / - 3", -2),
        ("2 + 3 * 4", 14),
        ("( 2 + 3 ) * 4", 20),
        ("( 2 ) ( 3 )", 6),
        ("2 ( 3 )", 6),
        ("( 2 ) 3", 6),
        ("2 { 3 }", 6),
        ("{ 2 } 3", 6),
        ("- 2 ^ 2", -4),
        ("( - 2 ) ^ 2", 4),
        ("2 ^ { 3 }", 8),
        ("2 ^ - 2", Fraction(1, 4)),
        ("2 ^ { - 2 }", Fraction(1, 4)),
        ("2 ^ ( 1 + 2 )", 8),
        ("( 1 / 2 ) ^ 3", Fraction(1, 8)),
        ("1 ^ 512", 1),
        ("1 ^ { - 512 }", 1),
        ("0 ^ 2", 0),
        ("\\frac { 3 } { 4 }", Fraction(3, 4)),
        ("\\frac 3 4", Fraction(3, 4)),
        ("\\frac { - 3 } { 4 }", Fraction(-3, 4)),
        ("2 \\frac { 3 } { 2 }", 3),  # no proper fraction: a product
        ("2 \\frac { 1 } { 2 }", Fraction(5, 2)),  # a mixed number
        ("2.5 \\frac { 1 } { 2 }", Fraction(5, 4)),  # not behind a whole number
        ("4 \\frac { 4 } { 11 }", Fraction(48, 11)),
        ("4 \\frac { 2 } { 2 }", 4),
        ("4 \\frac { 1 } { 2 } + 1", Fraction(11, 2)),
        ("\\sqrt { 9 }", 3),
        ("\\sqrt { 4 / 9 }", Fraction(2, 3)),
        ("\\sqrt { 0 }", 0),
        ("2 \\sqrt { 4 }", 4),
        ("\\sqrt 9", 3),
    ],
)
def test_rationals_are_exact(text: str, expected: Fraction | int) -> None:
    found = value(text)
    assert isinstance(found, Fraction)
    assert found == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\pi", math.pi),
        ("2 \\pi", 2 * math.pi),
        ("\\pi 2", 2 * math.pi),
        ("3 \\pi / 4", 0.75 * math.pi),
        ("\\sqrt { 2 }", math.sqrt(2)),
        ("8 \\sqrt { 2 }", 8 * math.sqrt(2)),
        ("\\sqrt [ 3 ] { 27 }", 3.0),
        ("\\sqrt [ 2 + 1 ] { 8 }", 2.0),
        ("\\sqrt [ 4 ] { 16 }", 2.0),
        ("2 ^ { 0.5 }", math.sqrt(2)),
        ("\\pi ^ 2", math.pi**2),
        ("\\pi ^ { - 1 }", 1 / math.pi),
        ("\\frac { \\pi } { 2 }", math.pi / 2),
    ],
)
def test_roots_and_pi_are_floats(text: str, expected: float) -> None:
    found = value(text)
    assert isinstance(found, float)
    assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "2 x",
        "1 2",
        "1 +",
        "* 2",
        "( 1",
        "1 )",
        "( 1 }",
        "{ 1 )",
        "( )",
        ".",
        "1 / 0",
        "0 ^ { - 1 }",
        "\\frac { 1 }",
        "\\frac { 1 } { 0 }",
        "\\frac x 2",
        "\\frac - 1 2",  # only an exponent has a sign of its own
        "\\frac 1.5 2",
        "\\sqrt",
        "\\sqrt [ 4 ] { - 4 }",
        "\\sqrt [ 0 ] { 4 }",
        "\\sqrt [ - 1 ] { 4 }",
        "\\sqrt [ 3 { 27 }",
        "( - 8 ) ^ { 0.5 }",
        "0 ^ { 0.5 }",
        "2 ^ 3 ^ 2",
        "1 ^ 513",
        "1 ^ { - 513 }",
        "\\pi ^ 513",
        "9999999999 ^ 512",  # over 4,096 bits
        "0.001 ^ 512",
        "( 10 ^ 400 ) * \\pi",  # no float
    ],
)
def test_what_is_no_number_or_too_large_is_not_read(text: str) -> None:
    assert evaluate(tuple(text.split()) or ("",)) == (None, "")


def test_a_power_is_exact_up_to_4096_bits() -> None:
    assert value("2 ^ 511") == 2**511
    assert value("127 ^ 512") == 127**512  # (7 + 1) bits a factor, one for the denominator
    assert value("128 ^ 512") is None


def test_brackets_nest_as_deep_as_the_limit() -> None:
    inner = MAX_DEPTH - 1
    assert value("( " * inner + "1" + " )" * inner) == 1
    assert value("( " * MAX_DEPTH + "1" + " )" * MAX_DEPTH) is None
    assert value(" + ".join(["( 1 )"] * 50)) == 50  # side by side is not deep


@pytest.mark.parametrize(
    ("text", "values", "shape"),
    [
        ("( 2 , 1 )", (2, 1), "()"),
        ("[ 2 , 1 )", (2, 1), "[)"),
        ("( 2 , 1 ]", (2, 1), "(]"),
        ("[ 1 , 1 / 2 ]", (1, Fraction(1, 2)), "[]"),
        ("\\{ 2 , 1 \\}", (1, 2), ","),
        ("2 , 1", (1, 2), ","),
        ("3 , 1 , 2", (1, 2, 3), ","),
        ("( 1 ) , 2", (1, 2), ","),
        ("1 , ( 2 )", (1, 2), ","),
        ("( 1 )", (1,), ""),
    ],
)
def test_a_list_has_its_values_and_its_brackets_as_shape_and_a_set_has_no_order(
    text: str, values: tuple[Number, ...], shape: str
) -> None:
    assert evaluate(tuple(text.split())) == (values, shape)


@pytest.mark.parametrize("text", ["1 ,", ", 1", "1 , , 2", "( 1 , x )", "( 1 , 2", "1 , 2 )", "\\{ 1 \\}"])
def test_a_list_with_an_item_that_is_no_number_is_not_read(text: str) -> None:
    assert evaluate(tuple(text.split())) == (None, "")


@pytest.mark.parametrize(
    "text",
    [
        "\\sqrt { 1 + 10 ^ { - 17 } }",
        "2 ^ { 10 ^ { - 20 } }",
        "10 ^ { 10 ^ { - 10 } }",
        "\\sqrt { 2 } + 10 ^ { - 17 }",
    ],
)
def test_what_floats_cannot_tell_from_a_nearby_number_is_not_read(text: str) -> None:
    assert evaluate(tuple(text.split())) == (None, "")


@pytest.mark.parametrize("text", ["\\sqrt { 2 } ^ 2 - 2", "2 \\pi - \\pi - \\pi"])
def test_what_rounding_leaves_of_zero_is_zero(text: str) -> None:
    assert value(text) == 0


def test_the_root_of_a_negative_number_is_imaginary() -> None:
    assert value("\\sqrt { - 4 }") == 2j
