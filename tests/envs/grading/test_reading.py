r"""Claims about the reading of an answer and about what of it may reach math-verify, each part by itself."""

from __future__ import annotations

from fractions import Fraction

import pytest

from envs.grading.equality import same_text_or_rational, within_5_percent
from envs.grading.extraction import extract_answer, extract_boxed
from envs.grading.normal_form import read
from envs.grading.screening import MAX_DEPTH, are_comparable, is_readable, is_tower


def test_a_reading_has_the_form_without_spaces_its_tokens_its_value_and_no_choice() -> None:
    reading = read(r" 8  \sqrt { 4 } ")
    assert (reading.form, reading.full_form) == (r"8\sqrt{4}", r"8\sqrt{4}")
    assert reading.tokens == ("8", r"\sqrt", "{", "4", "}")
    assert (reading.values, reading.number, reading.shape, reading.choice) == ((16,), 16, "", "")
    assert reading.in_full() is reading


def test_a_name_before_an_equals_sign_is_left_out_of_the_form_and_kept_in_the_full_form() -> None:
    reading = read("y = 2x+1")
    assert (reading.form, reading.full_form, reading.values, reading.number) == ("2x+1", "y=2x+1", None, None)
    full = read("x = 5").in_full()
    assert (full.form, full.full_form, full.tokens) == ("x=5", "x=5", ("x", "=", "5"))
    assert (full.values, full.shape) == (None, "")


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("x=5", "5"),
        ("x = y = 5", "x=y=5"),  # which of them is the answer
        (r"x \approx 5", "5"),
        (r"x = y \approx 5", r"x=y\approx 5".replace(" ", "")),
        ("x = 2, x = 3", "2,3"),
        ("x = 2, y = 3", "x=2,y=3"),
        ("5 = x", "5=x"),
        (r"\frac{1}{2} = x", r"\frac{1}{2}=x"),
        (r"m\angle ABC = 40", "40"),
        ("x_1 = 4", "4"),
        ("f(x) = 4", "4"),
        ("1 2", "1 2"),
        ("1 .5", "1 .5"),
        (r"2 \cdot x", r"2\cdot x"),
        (r"2 \cdot 3", r"2\cdot3"),
        (r"\pi r", r"\pi r"),
        ("a b", "ab"),
        ("2 x", "2x"),
        (r"12 \, cm", "12"),
        ("5.", "5"),
        ("2e3", r"2\times10^{3}"),
        ("-2 1/2", "-(2+1/2)"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt 2", r"\sqrt{2}"),
        ("1,234", "1234"),
        ("12,345,678", "12345678"),
        ("(1,234)", "(1,234)"),
        ("[1,234]", "[1,234]"),
        (r"\{1,234\}", r"\{1,234\}"),
        ("1,23", "1,23"),
        (r"x \leqslant 5", r"x\leq5"),
        (r"x \geqslant 5", r"x\geq5"),
        (r"\varnothing", r"\emptyset"),
        (r"\lvert x \rvert", "|x|"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\tbinom{4}{2}", r"\binom{4}{2}"),
        (r"\binom42", r"\binom{4}{2}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\big( 1 \big)", "(1)"),
        (r"\displaystyle 5 \quad", "5"),
        (r"\mathrm{AB} + \text{c}", "AB+c"),
        ("sqrt(2)", r"\sqrt{2}"),
        ("2 pi", r"2\pi"),
        (r"\sqrt x", r"\sqrt{x}"),
        ("30°", "30"),
        ("5²", "5^2"),
        ("2π", r"2\pi"),
        ("3×4·5", r"3\times4\cdot5"),
        ("−5", "-5"),
        ("12 square feet", "12"),
        (r"12\text{ cm}^2", "12"),
        ("12 m", "12"),
        ("x m", "xm"),  # only behind a number
        (r"5\%", "5"),
        (r"\$5", "5"),
    ],
)
def test_the_form_is_what_carries_value(text: str, form: str) -> None:
    assert read(text).form == form


@pytest.mark.parametrize(
    ("text", "choice", "form"),
    [
        ("B", "B", "B"),
        ("(B)", "B", "B"),
        ("B.", "B", "B"),
        (r"\text{(B)}", "B", "B"),
        ("(B) 12 cm", "B", "(B)12"),
        ("B. 12", "B", "B.12"),
        ("b", "", "b"),
        ("AB", "", "AB"),
        ("(A) + 1", "", "(A)+1"),
        ("(A) or (B)", "", "(A)or(B)"),
        ("5", "", "5"),
        ("", "", ""),
    ],
)
def test_a_choice_is_the_letter_of_one_choice_alone(text: str, choice: str, form: str) -> None:
    assert (read(text).choice, read(text).form) == (choice, form)


@pytest.mark.parametrize(
    ("text", "boxed", "answer"),
    [
        (r"\boxed{3}", "3", "3"),
        (r"\boxed {3} and \boxed{ 4 }", "4", "4"),
        (r"\boxed{a\boxed{b}c}", "b", "b"),  # the one that begins last
        (r"\boxed{\{1\}}", r"\{1\}", r"\{1\}"),
        (r"\boxed{1} } \boxed{2", "1", "1"),
        (r"} \boxed{1}", "1", "1"),
        (r"\boxed{}", "", ""),
        (r"\boxed{1", None, None),
        (r"\boxed", None, None),
        ("Answer: 7", None, "7"),
        ("answer: 7", None, "7"),
        ("Answer: 7\nanswer: **8** \nDone.", None, "8"),
        ("answer: 8\nAnswer: 7", None, "7"),
        ("Answer:", None, None),
        ("Answer: \n5", None, None),
        ("ANSWER: 5", None, None),
        (r"\boxed{3} Answer: 4", "3", "3"),
    ],
)
def test_the_last_whole_box_counts_and_else_what_follows_the_last_answer(
    text: str, boxed: str | None, answer: str | None
) -> None:
    assert (extract_boxed(text), extract_answer(text)) == (boxed, answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x+1", True),
        ("X", True),
        ("AB", False),
        ("é+1", False),
        ("length+1", False),
        ("a or b", False),
        (r"\foo{x}", False),
        (r"\log_2 8", True),
        ("x_2", True),
        ("2_3", False),
        ("2 3", False),
        (r"(5,\infty)", True),
        (r"\infty", True),
        (r"-\infty", True),
        (r"2\infty", False),
        (r"\pi\sqrt{\infty}", False),
        ("x)", False),
        ("(x", False),
        (")x(", False),
        ("(" * MAX_DEPTH + "x" + ")" * MAX_DEPTH, True),
        ("(" * (MAX_DEPTH + 1) + "x" + ")" * (MAX_DEPTH + 1), False),
        ("(x)" * 20, True),
        ("[x,y)", True),
    ],
)
def test_only_what_is_mathematics_as_a_whole_is_readable(text: str, expected: bool) -> None:
    assert is_readable(read(text)) is expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("5", "x", False),
        ("5", "e^2", True),
        ("5", "2i", True),
        ("5", "<3", False),
        ("5", "(1,x)", False),
        ("5", r"\log_2(32)", True),
        ("5", r"\sqrt{25}_2", False),
        ("x=y=1", "x", False),
        ("x=y=1", "x=y=2", True),
        ("X+1", "x+1", False),
        ("X+x", "x+X", True),
        ("x+1", "y+1", True),
        ("(1,x)", "[1,x]", False),
        ("(1,x)", "(x,1)", True),
        ("(X,1)", "[X,1]", False),
        ("(1,[x])", "[1,(x)]", False),
        ("(1,x]", "(2,x]", True),
        ("1,x", "x,1", True),
        ("1,x", "(1,x)", False),
        ("(1),(x)", "1,x", True),
        (r"(1,x)\cup(2,y)", "[1,x]", True),
    ],
)
def test_two_texts_may_be_equal_only_if_both_are_of_one_kind(left: str, right: str, expected: bool) -> None:
    assert are_comparable(read(left), read(right)) is expected
    assert are_comparable(read(right), read(left)) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("999!", False),
        ("1000!", True),
        ("3!!", True),
        (r"\sqrt[99]{x}", False),
        (r"\sqrt[100]{x}", True),
        (r"\sqrt[n]{x}", False),
        ("2^3^2", True),
        ("2^{3}^2", True),
        ("2^{3^2}", True),
        ("2^{x^2}", False),
        ("2^{3!}", True),
        ("x^{1000}", False),
        ("x^{1001}", True),
        ("x^{20}+x^{50}", False),
        ("x^{20}+x^{51}", True),  # 1,020 if they were multiplied
        ("(x+y+z)^{20}", False),
        ("(x+y+z)^{50}", True),  # 23,426 terms and more
    ],
)
def test_towers_and_what_has_too_many_terms_are_told_from_honest_powers(text: str, expected: bool) -> None:
    assert is_tower(read(text)) is expected


@pytest.mark.parametrize(
    ("answer", "label", "is_strict", "is_near"),
    [
        ("0.5", r"\frac{1}{2}", True, True),
        ("3+4", "7", True, True),
        (r"\sqrt{4}", "2", False, True),
        ("x", "x", True, False),
        ("x", "y", False, False),
        ("21", "20", False, True),
        ("19", "20", False, True),
        ("21.01", "20", False, False),
        ("18.99", "20", False, False),
        ("20", "21", False, True),
        ("-19", "-20", False, True),
        ("19", "-20", False, False),
        ("0", "0.0", True, True),
        ("0.01", "0", False, False),
        ("(1,2)", "(1,2)", True, False),
        ("1,2", "2,1", False, False),
    ],
)
def test_the_strict_rule_is_text_or_rational_and_the_tolerant_one_five_percent_of_the_label(
    answer: str, label: str, is_strict: bool, is_near: bool
) -> None:
    assert same_text_or_rational(read(answer), read(label)) is is_strict
    assert within_5_percent(read(answer), read(label)) is is_near


def test_a_fraction_too_large_for_a_float_is_near_itself_alone() -> None:
    huge = read("10^{400}")
    assert isinstance(huge.number, Fraction)
    assert within_5_percent(huge, huge)
    assert not within_5_percent(huge, read(r"\pi"))
