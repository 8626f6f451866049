r"""What each grader counts as the same answer: THE table of conflicts, every real gold answer, and the final text."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.errors import UserError
from envs.grading import GRADERS, GraderName, get_grader, score_text
from tests.paths import SHARED

GEO3K = SHARED / "geo3k"

# Each row: answer, label, and the score under math, geo3k_strict and geo3k_tolerance.
CONFLICTS = [
    # --- digits, places and signs
    ("3", "300", 0, 0, 0),
    ("300", "3", 0, 0, 0),
    ("0.3", "30", 0, 0, 0),
    ("30", "0.3", 0, 0, 0),
    ("30.70", "30.7", 1, 1, 1),
    ("30.71", "30.7", 0, 0, 1),
    ("-5", "5", 0, 0, 0),
    ("−5", "-5", 1, 1, 1),
    ("+5", "5", 1, 1, 1),
    ("--5", "5", 1, 1, 1),
    ("0", "-0", 1, 1, 1),
    ("007", "7", 1, 1, 1),
    (".5", "0.5", 1, 1, 1),
    ("5.", "5", 1, 1, 1),
    ("3 + 4", "7", 1, 1, 1),
    # --- the 5 % of geo3k_tolerance are of the label, and count in it
    ("105", "100", 0, 0, 1),
    ("95", "100", 0, 0, 1),
    ("100", "95", 0, 0, 0),
    ("105.01", "100", 0, 0, 0),
    ("-95", "-100", 0, 0, 1),
    ("0.001", "0", 0, 0, 0),
    ("0", "0.001", 0, 0, 0),
    ("0.0", "0", 1, 1, 1),
    ("9" * 100, "10^{100}", 0, 0, 1),
    # --- thousands
    ("1,234", "1234", 1, 1, 1),
    ("1234", "1,234", 1, 1, 1),
    ("1{,}234", "1234", 1, 1, 1),
    (r"1\,234", "1234", 1, 1, 1),
    ("1,234,567.5", "1234567.5", 1, 1, 1),
    ("1,23", "123", 0, 0, 0),
    ("1,234", "1.234", 0, 0, 0),
    ("(1,234)", "1234", 0, 0, 0),
    ("1 2", "12", 0, 0, 0),
    ("2 3", "5", 0, 0, 0),
    # --- fractions and mixed numbers
    ("1/2", "0.5", 1, 1, 1),
    ("0.5", "1/2", 1, 1, 1),
    (r"\frac12", "0.5", 1, 1, 1),
    (r"\frac12", "1/2", 1, 1, 1),
    (r"\dfrac{1}{2}", r"\frac{1}{2}", 1, 1, 1),
    (r"\frac{6}{8}", r"\frac{3}{4}", 1, 1, 1),
    (r"\frac{-1}{2}", r"-\frac{1}{2}", 1, 1, 1),
    (r"\frac72", r"\frac92", 0, 0, 0),
    (r"\frac92", r"\frac72", 0, 0, 0),
    (r"\frac72", "3.5", 1, 1, 1),
    ("5", r"\frac { 5 } { 8 }", 0, 0, 0),
    ("0.333333", r"\frac{1}{3}", 0, 0, 1),
    ("0.67", "2/3", 0, 0, 1),
    ("3 1/2", "3.5", 1, 1, 1),
    (r"3\frac{1}{2}", r"\frac{7}{2}", 1, 1, 1),
    (r"4\frac{4}{11}", "44/11", 0, 0, 0),
    (r"4\frac{4}{11}", r"\frac{16}{11}", 0, 0, 0),
    (r"-1\frac12", "-1.5", 1, 1, 1),
    ("1/0", "5", 0, 0, 0),
    # --- roots and pi
    (r"2\sqrt{3}", r"5\sqrt{3}", 0, 0, 0),
    (r"5\sqrt{3}", r"2\sqrt{3}", 0, 0, 0),
    (r"8 \sqrt { 2 }", r"8 \sqrt { 2 }", 1, 1, 1),
    (r"8\sqrt{2}", r"8 \sqrt { 2 }", 1, 1, 1),
    ("8√2", r"8 \sqrt { 2 }", 1, 1, 1),
    ("8sqrt(2)", r"8 \sqrt { 2 }", 1, 1, 1),
    ("2", r"8 \sqrt { 2 }", 0, 0, 0),
    ("8", r"8 \sqrt { 2 }", 0, 0, 0),
    (r"8\sqrt{3}", r"8 \sqrt { 2 }", 0, 0, 0),
    (r"5\sqrt2", r"5\sqrt{2}", 1, 1, 1),
    (r"\sqrt{50}", r"5\sqrt{2}", 1, 0, 1),
    (r"5\sqrt{2}", r"\sqrt{50}", 1, 0, 1),
    (r"\sqrt{8}", r"2\sqrt{2}", 1, 0, 1),
    (r"\sqrt{4}", "2", 1, 0, 1),
    (r"\frac{2}{\sqrt{2}}", r"\sqrt{2}", 1, 0, 1),
    ("7.0710678", r"5\sqrt{2}", 1, 0, 1),
    ("7.07", r"5\sqrt{2}", 0, 0, 1),
    (r"\sqrt[3]{27}", "3", 1, 0, 1),
    (r"10\pi", r"10 \pi", 1, 1, 1),
    (r"\pi 10", r"10 \pi", 1, 0, 1),
    ("10π", r"10 \pi", 1, 1, 1),
    ("31.4", r"10 \pi", 0, 0, 1),
    ("10", r"10 \pi", 0, 0, 0),
    # --- degrees, percent and units carry no value
    ("30°", "30", 1, 1, 1),
    ("30", "30°", 1, 1, 1),
    (r"68^\circ", "68", 1, 1, 1),
    (r"68^{\circ}", "68", 1, 1, 1),
    ("68 degrees", "68", 1, 1, 1),
    (r"68\text{ degrees}", "68", 1, 1, 1),
    (r"37.5\%", "37.5", 1, 1, 1),
    ("37.5", r"37.5\%", 1, 1, 1),
    ("37.5%", "37.5", 1, 1, 1),
    (r"37.5\%", "0.375", 0, 0, 0),
    ("12 cm", "12", 1, 1, 1),
    ("12", "12 cm", 1, 1, 1),
    ("12 cm^2", "12", 1, 1, 1),
    (r"12\text{ cm}^2", "12", 1, 1, 1),
    ("12 cm²", "12", 1, 1, 1),
    ("12 square units", "12", 1, 1, 1),
    ("12 cm", "12 m", 1, 1, 1),
    ("12 cm", "120", 0, 0, 0),
    (r"\$5", "5", 1, 1, 1),
    ("$5$", "5", 1, 1, 1),
    ("12 apples", "12", 0, 0, 0),
    # --- names and equations
    ("x=5", "5", 1, 1, 1),
    ("x = 5", "5", 1, 1, 1),
    ("5", "x=5", 1, 1, 1),
    (r"m\angle A = 40", "40", 1, 1, 1),
    (r"m\angle ABC = 40^\circ", "40", 1, 1, 1),
    (r"x \approx 5.3", "5.3", 1, 1, 1),
    ("f(x) = 2x", "2x", 1, 1, 1),
    ("x=5", "6", 0, 0, 0),
    ("x=5", "y=5", 1, 1, 1),
    ("5=68", "68", 0, 0, 0),
    ("5=68", "5", 0, 0, 0),
    ("3y=2x", "2x", 0, 0, 0),
    ("y=2x+1", "y-2x=1", 1, 0, 1),
    ("y=2x+1", "2x+1=y", 1, 0, 1),
    ("y=2x+1", "y-2x=2", 0, 0, 0),
    ("2x=10", "5", 0, 0, 0),
    ("2x=10", "x=5", 0, 0, 0),
    ("x>5", "5<x", 1, 0, 1),
    ("x>5", r"x\geq 5", 0, 0, 0),
    ("x>5", "5", 0, 0, 0),
    ("x = 3, x = 5", "3, 5", 1, 1, 1),
    # --- intervals, pairs, lists and sets
    ("(1,2)", "(1,2)", 1, 1, 1),
    (r"\left( 1, 2 \right)", "(1,2)", 1, 1, 1),
    (r"\left( 1, 2 \right]", "(1,2]", 1, 1, 1),
    ("(1,2)", "[1,2]", 0, 0, 0),
    ("[1,2]", "(1,2)", 0, 0, 0),
    ("[1,2)", "[1,2]", 0, 0, 0),
    ("(1,2)", "(2,1)", 0, 0, 0),
    ("(1,2)", "12", 0, 0, 0),
    ("(1,2)", "1,2", 0, 0, 0),
    ("(1,2)", "1.5", 0, 0, 0),
    ("(0.5,2)", r"(\frac12, 2)", 1, 0, 1),
    ("(1.01,2)", "(1,2)", 0, 0, 0),
    (r"(1,\infty)", r"[1,\infty)", 0, 0, 0),
    ("x>1", r"(1,\infty)", 1, 0, 1),
    ("1<x<2", "(1,2)", 1, 0, 1),
    ("1<x<2", "[1,2]", 0, 0, 0),
    (r"\infty", r"+\infty", 1, 0, 1),
    (r"\infty", r"-\infty", 0, 0, 0),
    (r"\pi\sqrt{\infty}", "5", 0, 0, 0),
    (r"(3,5)\cup(1,2)", r"(1,2)\cup(3,5)", 1, 0, 1),
    (r"(3,5)\cup[1,2)", r"(1,2)\cup(3,5)", 0, 0, 0),
    ("(a,b)", "a,b", 0, 0, 0),
    ("3, 5", "5, 3", 1, 0, 1),
    ("3, 5", "3", 0, 0, 0),
    (r"\{3,5\}", "5, 3", 1, 0, 1),
    (r"\{1,2\}", "(1,2)", 0, 0, 0),
    (r"\pm 5", "5", 0, 0, 0),
    (r"\pm 5", "-5, 5", 1, 0, 1),
    # --- powers, factorials and scientific notation
    (r"2 \times 10^{3}", "2000", 1, 1, 1),
    ("2e3", "2000", 1, 1, 1),
    ("1.5E-2", "0.015", 1, 1, 1),
    (r"2 \times 10^{3}", "200", 0, 0, 0),
    ("2e3", "2e4", 0, 0, 0),
    ("2^{10}", "1024", 1, 1, 1),
    ("5!", "120", 1, 0, 1),
    ("5!", "5", 0, 0, 0),
    ("9^{9^{9}}", "9^{9^{9}}", 1, 1, 1),
    ("9^{9^{9}}", "9", 0, 0, 0),
    ("9", "9^{9^{9}}", 0, 0, 0),
    ("9^{9^{9}}", "9^{9^{8}}", 0, 0, 0),
    ("99999!", "5", 0, 0, 0),
    ("10^{400}", "10^{400}", 1, 1, 1),
    ("10^{400}", r"\pi", 0, 0, 0),
    ("10^{9999}", "10^{9998}", 0, 0, 0),
    # --- expressions
    ("x+1", "1+x", 1, 0, 1),
    ("x+1", "x+2", 0, 0, 0),
    ("x^2+2x+1", "(x+1)^2", 1, 0, 1),
    ("(x+1)(2)(3)", "6(x+1)", 1, 0, 1),
    ("(x+1)(2)(3)", "5(x+1)", 0, 0, 0),
    ("e^{-2x}", r"\frac{1}{e^{2x}}", 1, 0, 1),
    ("(n+1)!", "(n+1)n!", 1, 0, 1),
    (r"\log_2 8", "3", 1, 0, 1),
    (r"\tbinom52", "10", 1, 0, 1),
    ("2x", "2X", 0, 0, 0),
    ("x_1", "x_2", 0, 0, 0),
    ("5h", "5g", 0, 0, 0),
    ("5x", "5", 0, 0, 0),
    ("5", "5x", 0, 0, 0),
    # --- choice letters
    ("A", "A", 1, 1, 1),
    ("(A)", "A", 1, 1, 1),
    ("A", "(A)", 1, 1, 1),
    ("A.", "A", 1, 1, 1),
    ("A)", "A", 1, 1, 1),
    (r"\text{A}", "A", 1, 1, 1),
    (r"\textbf{(A)}", "A", 1, 1, 1),
    ("(A) 12 cm", "A", 1, 0, 1),
    ("A. 12", "A", 1, 0, 1),
    (r"\text{(A)}\ 8\sqrt{2}", "A", 1, 0, 1),
    ("A", "(A) 12 cm", 1, 0, 1),
    ("12 cm", "(A) 12 cm", 0, 0, 0),
    ("(A) 12 cm", "12", 0, 0, 0),
    ("(A) 12 cm", "(A) 13 cm", 0, 0, 0),
    ("(A) 12 cm", "B", 0, 0, 0),
    ("A", "B", 0, 0, 0),
    ("a", "A", 0, 0, 0),
    ("(A) or (B)", "A", 0, 0, 0),
    ("A, B, C, D", "A", 0, 0, 0),
    ("(A) (B) (C) (D)", "A", 0, 0, 0),
    ("3", "A", 0, 0, 0),
    ("A", "3", 0, 0, 0),
    ("1", "A", 0, 0, 0),
    ("(A) + 1", "A", 0, 0, 0),
    ("(A)^2", "A", 0, 0, 0),
    ("(A, B)", "A", 0, 0, 0),
    ("[A]", "A", 1, 0, 1),
    ("A + B", "B + A", 1, 0, 1),
    # --- texts, and no answer at all
    (r"\text{AD and BE}", "A D and B E", 1, 1, 1),
    ("BE and AD", "A D and B E", 0, 0, 0),
    ("3", r"\angle 3 \cong \angle Z", 0, 0, 0),
    ("angle 3 is congruent to angle Z", "3", 0, 0, 0),
    ("3 or 68", "68", 0, 0, 0),
    ("68 or so", "68", 0, 0, 0),
    ("unknown", "5", 0, 0, 0),
    ("", "5", 0, 0, 0),
    ("   ", "5", 0, 0, 0),
    ("", "", 0, 0, 0),
    (r"\,", r"\;", 0, 0, 0),
    ("5", "", 0, 0, 0),
]


def rows() -> list[dict[str, Any]]:
    if not GEO3K.is_dir():
        pytest.skip("the shared geometry problems are not here")
    names = ("test.jsonl", "train.jsonl", "train_rebuilt.jsonl")
    return [json.loads(line) for name in names for line in (GEO3K / name).read_text().splitlines()]


def boxed(answer: str) -> str:
    return f"So \\boxed{{1}} is wrong and it is \\boxed{{{answer}}}."


@pytest.mark.parametrize(("answer", "label", "math", "strict", "tolerance"), CONFLICTS)
def test_a_conflict_is_settled_as_the_table_says(
    answer: str, label: str, math: int, strict: int, tolerance: int
) -> None:
    expected = {"math": math, "geo3k_strict": strict, "geo3k_tolerance": tolerance}
    assert {name: grader(answer, label) for name, grader in GRADERS.items()} == expected
    assert {name: score_text(boxed(answer), label, name) for name in GRADERS} == expected


def test_the_graders_are_nested_strict_within_math_within_tolerance() -> None:
    assert all(strict <= math <= tolerance for _, _, math, strict, tolerance in CONFLICTS)


def test_math_and_strict_do_not_depend_on_which_side_is_the_label() -> None:
    for answer, label, math, strict, _ in CONFLICTS:
        assert (answer, label, GRADERS["math"](label, answer)) == (answer, label, math)
        assert (answer, label, GRADERS["geo3k_strict"](label, answer)) == (answer, label, strict)


def test_every_grader_name_has_its_grader() -> None:
    assert set(get_args(GraderName)) == set(GRADERS)
    assert all(get_grader(name) is grader and grader.name == name for name, grader in GRADERS.items())


def test_an_async_grader_is_awaited(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("async def same(answer, label):\n    return float(answer == label)\n")
    assert [score_text(text, "blue", f"{tmp_path / 'my.py'}:same") for text in ("Answer: blue", "red")] == [1.0, 0.0]


def test_an_unknown_grader_is_the_users_error_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="got geo3k_tolerence; did you mean 'geo3k_tolerance'"):
        score_text("\\boxed{5}", "5", "geo3k_tolerence")


@pytest.mark.parametrize("grader", GRADERS)
def test_a_text_without_an_answer_scores_0(grader: str) -> None:
    for text in ("", "68", "It is 68.", "\\boxed{68", "\\boxed{}", "\\boxed{ }", "Answer:", "Answer:\n68"):
        assert score_text(text, "68", grader) == 0.0


@pytest.mark.parametrize("grader", GRADERS)
def test_the_last_box_counts_and_not_the_text_after_answer(grader: str) -> None:
    assert score_text("\\boxed{90}, no: \\boxed{68}. Answer: 90", "68", grader) == 1.0
    assert score_text("\\boxed{68}, no: \\boxed{90}. Answer: 68", "68", grader) == 0.0
    assert score_text("\\boxed{} Answer: 68", "68", grader) == 0.0


def test_the_text_after_answer_counts_where_there_is_no_box_save_for_the_strict_grader() -> None:
    scores = {name: score_text("So it is 68.\n**Answer:** 68 cm\n", "68", name) for name in GRADERS}
    assert scores == {"math": 1.0, "geo3k_strict": 0.0, "geo3k_tolerance": 1.0}


@pytest.mark.parametrize("grader", GRADERS)
def test_a_long_answer_counts_if_it_is_the_labels_own_text(grader: str) -> None:
    label = "the lines " + "A B, " * 60
    assert score_text(boxed(label.replace(" ", "  ")), label, grader) == 1.0
    assert score_text(boxed(label + "C"), label, grader) == 0.0
    assert score_text(boxed("1" * 1_000_000), "1", grader) == 0.0


@given(st.fractions(-10_000, 10_000, max_denominator=500), st.fractions(-10_000, 10_000, max_denominator=500))
def test_a_fraction_is_near_exactly_when_it_is_within_a_twentieth_of_the_label(a: Fraction, b: Fraction) -> None:
    assert GRADERS["geo3k_tolerance"](str(a), str(b)) == float(20 * abs(a - b) <= abs(b))
    assert GRADERS["geo3k_strict"](str(a), str(b)) == float(a == b)


@pytest.mark.parametrize("grader", GRADERS)
def test_every_gold_answer_scores_1_against_itself(grader: str) -> None:
    golds = [row["answer"] for row in rows()]
    assert len(golds) == 1599
    assert [gold for gold in golds if score_text(boxed(gold), gold, grader) != 1.0] == []
    assert [gold for gold in golds if score_text(boxed(f"x = {gold}^\\circ"), gold, grader) != 1.0] == []


@pytest.mark.parametrize("grader", ["math", "geo3k_strict"])
def test_no_wrong_answer_scores_against_a_gold_answer(grader: str) -> None:
    """Wrong ones: value + 1, 10 value + 3, 1.04 value, and the next row's answer of another value."""
    all_rows = rows()
    accepted = []
    for index, row in enumerate(all_rows):
        value = row["answer_value"]
        others = (all_rows[(index + step) % len(all_rows)] for step in range(1, len(all_rows)))
        numeric = (other for other in others if other["answer_value"] is not None)
        wrong = [next(o["answer"] for o in numeric if value is None or abs(o["answer_value"] - value) > 0.1)]
        if value is not None:
            wrong += [repr(value + 1), repr(10 * value + 3), repr(1.04 * value)]
        accepted += [(a, row["answer"]) for a in wrong if score_text(boxed(a), row["answer"], grader) != 0.0]
    assert accepted == []


def test_the_tolerant_grader_takes_the_unrounded_value_of_a_gold_answer_and_none_11_percent_off() -> None:
    golds = [(row["answer"], row["answer_value"]) for row in rows() if row["answer_value"] is not None]
    near = [score_text(boxed(repr(value)), gold, "geo3k_tolerance") for gold, value in golds]
    far = [score_text(boxed(repr(f * value)), gold, "geo3k_tolerance") for gold, value in golds for f in (0.89, 1.11)]
    assert (len(golds), min(near), max(far)) == (1597, 1.0, 0.0)
