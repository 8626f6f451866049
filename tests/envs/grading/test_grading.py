"""What counts as the same answer: a table of conflicts, every real gold answer, and texts built to hang a grader."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.grading import GRADERS, extract_answer, extract_boxed, grade
from tests.budget import examples
from tests.paths import SHARED

GEO3K = SHARED / "geo3k"

EQUAL = [
    (r"8 \sqrt { 2 }", r"8\sqrt{2}"),
    (r"8\sqrt2", r"8 \sqrt { 2 }"),
    ("8√2", r"8 \sqrt { 2 }"),
    (r"\sqrt{50}", r"5\sqrt{2}"),
    ("128^{0.5}", r"8\sqrt{2}"),
    (r"\frac{8\sqrt{3}\pi}{3}", r"\frac { 8 } { \sqrt 3 } \pi"),
    (r"4\frac{4}{11}", r"\frac{48}{11}"),
    ("4 4/11", r"4 \frac { 4 } { 11 }"),
    ("1/2", "0.5"),
    (r"\dfrac12", ".5"),
    (r"\frac{-1}{2}", "-0.5"),
    ("30.70", "30.7"),
    ("30°", "30"),
    (r"30^\circ", "30"),
    (r"30^{ \circ }", "30"),
    ("30 degrees", "30"),
    ("1,234", "1234"),
    (r"1\,234", "1234"),
    ("1{,}234.5", "1234.5"),
    ("x=5", "5"),
    ("x = 5", "5"),
    (r"m\angle ABC = 5^\circ", "5"),
    (r"37.5\%", "37.5"),
    ("37.5%", "37.5"),
    (r"\$5.", "5"),
    ("12 cm", "12"),
    (r"12\text{ cm}^2", "12"),
    (r"10\pi \text{ in.}", r"10 \pi"),
    ("12 square units", "12"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    ("(1,2)", "(1, 2)"),
    ("3, 5", "5, 3"),
    (r"2\times 10^{3}", "2000"),
    ("B", "B"),
    (r"\text{AD and BE}", "A D and B E"),
    ("x+1", "1+x"),
    ("x^2+2x+1", "(x+1)^2"),
    ("5!", "120"),
    # What a float column makes of a sum, in 64 bits.
    ("3.3", str(1.1 + 2.2)),
    ("0.3", str(0.1 + 0.2)),
    ("-0.3", str(-0.1 - 0.2)),
    ("3/10", str(0.1 + 0.2)),
    ("0.8", str(0.1 + 0.7)),
    ("1/3", str(1 / 3)),
    ("0.33333333333333", str(1 / 3)),
    ("3", "3.0000000000000004"),
    ("2, 3.3", f"{1.1 + 2.2}, 2"),
    ("x = 3.3", str(1.1 + 2.2)),
    ("0.00003", str(1e-5 + 2e-5)),
    ("3.30000000000049", "3.3"),
]
DIFFERENT = [
    ("3", "300"),
    ("0.3", "30"),
    ("-5", "5"),
    (r"2\sqrt{3}", r"5\sqrt{3}"),
    (r"\frac72", r"\frac92"),
    ("2", r"8 \sqrt { 2 }"),
    ("8", r"8 \sqrt { 2 }"),
    ("5", r"\frac { 5 } { 8 }"),
    ("30.71", "30.7"),
    ("30.700001", "30.7"),
    ("0.333333", r"\frac{1}{3}"),
    ("3.14", r"\pi"),
    ("11.31", r"8\sqrt{2}"),
    ("(1,2)", "[1,2]"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", "12"),
    ("(1,2)", "(2,1)"),
    ("(1,234)", "1234"),
    ("1,23", "123"),
    ("1,2,3", "123"),
    ("1 2", "12"),
    (r"4\frac{4}{11}", "44/11"),
    ("B", "C"),
    ("b", "B"),
    ("B", "5"),
    ("", "5"),
    ("5", ""),
    ("5x", "5"),
    ("3", r"\angle 3 \cong \angle Z"),
    ("5=68", "68"),
    ("3 or 68", "68"),
    ("5;68", "68"),
    ("5 or 68", "5"),
    (r"\pm 5", "5"),
    ("1/0", "5"),
    ("x+2", "1+x"),
    # Twelve significant digits tell numbers apart, and all digits tell integers apart.
    ("3.3000000001", str(1.1 + 2.2)),
    ("3.30000000001", "3.3"),
    ("3.2999", str(1.1 + 2.2)),
    ("1000000000001", "1000000000002"),
    ("1000000000001", "1000000000001.5"),
    ("1000000000001", "1000000000000.9"),
    ("10000000000000001", "10000000000000000"),
    ("12345678901.23", "12345678901.24"),
    ("0", "0.00000000000000005"),
    ("0.333333333333", r"\frac{1}{3}"),
    ("*".join(["10^{512}"] * 20), "*".join(["10^{512}"] * 20) + "+0.5"),
]


def rows() -> list[dict[str, Any]]:
    if not GEO3K.is_dir():
        pytest.skip("the shared geometry problems are not here")
    names = ("test.jsonl", "train.jsonl", "train_rebuilt.jsonl")
    return [json.loads(line) for name in names for line in (GEO3K / name).read_text().splitlines()]


@pytest.mark.parametrize(("answer", "label"), EQUAL)
def test_two_spellings_of_one_value_are_equal_both_ways(answer: str, label: str) -> None:
    assert grade(answer, label) == 1.0
    assert grade(label, answer) == 1.0


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_different_values_are_not_equal_either_way(answer: str, label: str) -> None:
    assert grade(answer, label) == 0.0
    assert grade(label, answer) == 0.0


def test_every_gold_answer_scores_1_against_itself_bare_and_boxed() -> None:
    golds = [row["answer"] for row in rows()]
    bare = sum(grade(gold, gold) for gold in golds)
    boxed = sum(grade(extract_answer(f"So it is \\boxed{{{gold}}}.") or "", gold) for gold in golds)
    unspaced = sum(grade(row["answer"].replace(" ", ""), row["answer"]) for row in rows() if row["answer_value"])
    print(f"\nright: {len(golds)} golds, bare {bare:.0f}, boxed {boxed:.0f}, without spaces {unspaced:.0f}")
    assert len(golds) == 1599
    assert (bare, boxed, unspaced) == (1599, 1599, 1597)


def test_the_numeric_value_of_a_gold_answer_scores_1_where_it_is_irrational() -> None:
    irrational = [row for row in rows() if "\\sqrt" in row["answer"] or "\\pi" in row["answer"]]
    missed = [row["answer"] for row in irrational if grade(repr(row["answer_value"]), row["answer"]) == 0.0]
    assert len(irrational) > 100
    assert missed == []


def test_no_wrong_answer_scores_against_a_gold_answer() -> None:
    """Wrong ones: value + 1, 10 value + 3, and the next row's answer of another value, each bare and boxed."""
    all_rows = rows()
    accepted, tried = [], 0
    for index, row in enumerate(all_rows):
        value = row["answer_value"]
        others = (all_rows[(index + step) % len(all_rows)] for step in range(1, len(all_rows)))
        numeric = (other for other in others if other["answer_value"] is not None)
        wrong = [next(o["answer"] for o in numeric if value is None or abs(o["answer_value"] - value) > 0.1)]
        if value is not None:
            wrong += [repr(value + 1), repr(10 * value + 3)]
        tried += len(wrong)
        accepted += [(answer, row["answer"]) for answer in wrong if grade(answer, row["answer"]) != 0.0]
        accepted += [(answer, row["answer"]) for answer in wrong if grade(f"x = {answer}", row["answer"]) != 0.0]
    print(f"\nwrong: {tried} answers against {len(all_rows)} golds, {len(accepted)} accepted")
    assert tried == 3 * 1597 + 2
    assert accepted == []


@pytest.mark.alone
@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9}}",
        "9^9^9^9",
        "10^{10^{10}}",
        "((9^{99})^{99})^{99}",
        "(((x+y+z)^{9})^{9})^{9}",
        "99999!",
        "5!!!!",
        r"\sqrt[0.0000001]{9}",
        "(" * 60 + "1" + ")" * 60,
        "{" * 100,
        "(a+b)(c+d)(e+f)(g+h)(i+j)(k+l)(m+n)(o+p)(q+r)(s+t)(u+v)(w+x)(y+z)",
        r"\sum_{n=1}^{999999999} n",
        "9" * 200,
        "1" * 1_000_000,
        "{" * 1_000_000,
        "\\" * 200,
        "\ud800\x00",
    ],
)
def test_an_answer_built_to_hang_a_computer_algebra_system_scores_0_at_once(answer: str) -> None:
    start = time.perf_counter()
    assert grade(answer, "5") == 0.0
    assert grade(answer, "x+5") == 0.0
    assert time.perf_counter() - start < 2.0


def test_a_long_answer_counts_if_it_is_the_labels_own_text() -> None:
    label = "the lines " + "A B, " * 60
    assert grade(label.replace(" ", "  "), label) == 1.0
    assert grade(label + "C", label) == 0.0


def test_grading_works_outside_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(grade("y + y + 3", "2y+3")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_a_numeric_pair_takes_microseconds() -> None:
    answers = [f"{n}\\sqrt{{{n + 1}}}" for n in range(2000)]
    start = time.thread_time()
    for answer in answers:
        grade(answer, r"8 \sqrt { 2 }")
    assert (time.thread_time() - start) / len(answers) < 500e-6


MATH = st.sampled_from(
    [
        *"0123456789xym+-*/^=,.(){}[]!<>|_ %$°√π²",
        "\\frac",
        "\\sqrt",
        "\\pi",
        "\\{",
        "\\}",
        "\\text{",
        "^{9}",
        "cm",
        "\\left(",
    ]
)


@examples(300)
@given(
    st.one_of(st.text(), st.lists(MATH, max_size=20).map("".join)), st.sampled_from(["5", r"8\sqrt{2}", "x+1", "(1,2)"])
)
def test_no_text_makes_the_grader_raise(answer: str, label: str) -> None:
    assert grade(answer, label) in (0.0, 1.0)
    assert extract_answer(answer) is None or grade(answer, answer) in (0.0, 1.0)
    assert grade(label, label) == 1.0


@given(st.integers(-10_000, 10_000), st.integers(1, 500), st.integers(-10_000, 10_000), st.integers(1, 500))
def test_fractions_are_equal_exactly_when_their_values_are(a: int, b: int, c: int, d: int) -> None:
    assert grade(f"\\frac{{{a}}}{{{b}}}", f"{c}/{d}") == float(a * d == b * c)


@example(value=33554432.14555013, places=5)  # the 13th digit is a tie
@given(st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9), st.integers(0, 6))
def test_a_decimal_equals_the_float_that_a_sum_made_of_it_under_every_grader(value: float, places: int) -> None:
    """The sum of a decimal and 0.1 less 0.1 is it again, up to the rounding of floats."""
    written = f"{value:.{places}f}"
    rounded = f"{float(written) + 0.1 - 0.1:.17g}"
    is_near = abs(float(rounded) - float(written)) <= 4e-13 * abs(float(written))
    for grader in GRADERS.values():
        assert grader(written, rounded) == grader(rounded, written) >= float(is_near)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{3} no, \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{6 \boxed{5}", "5"),
        (r"\boxed{}", ""),
        ("Answer: 7\nAnswer: 8 cm\nbye", "8 cm"),
        ("**Answer:** 7", "7"),
        (r"\boxed{5} Answer: 7", "5"),
        ("Answer:\n7", None),
        (r"\boxed{5", None),
        ("68", None),
        ("", None),
    ],
)
def test_the_stated_answer_is_found(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "unit", ["\\boxed{", "{", "}", "\\boxed ", "\\boxed{5}", "Answer:", "\\", " ", "\\boxed{" + "{" * 50, "\\boxed{\\}"]
)
def test_a_megabyte_is_searched_in_linear_time(unit: str) -> None:
    text = "\\boxed" + unit * (1_000_000 // len(unit))
    start = time.thread_time()
    extract_answer(text)
    extract_boxed(text)
    assert time.thread_time() - start < 3.0
