"""What the grader says of the table of pairs that `python -m benchmarks.graders` compares graders on."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.envs.grading.graded_pairs import ours, read_pairs

PAIRS = list(read_pairs())
KINDS = Counter(pair.kind for pair in PAIRS)
#: Right answers that are rejected: turned relations, the whole line, ratios, speeds, hours, repeating decimals and
#: words in other letters are compared as texts.
NOT_READ = {
    (r"2 \neq x", r"x \neq 2"),
    (r"(-\infty,\infty)", r"-\infty<x<\infty"),
    (r"\mathbb{R}", r"-\infty<x<\infty"),
    (r"x \in \mathbb{R}", r"-\infty<x<\infty"),
    ("3/5", "3:5"),
    (r"3\colon 5", "3:5"),
    ("18", r"18\text{ mph}"),
    ("18 miles per hour", r"18\text{ mph}"),
    (r"7:30\text{ p.m.}", "7:30"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"\text{monday}", r"\text{Monday}"),
}


def test_the_table_has_twenty_classes_with_right_and_wrong_answers_in_each() -> None:
    assert len(KINDS) >= 20 and len(PAIRS) >= 600
    assert all({pair.is_right for pair in PAIRS if pair.kind == kind} == {True, False} for kind in KINDS)
    assert len({(pair.answer, pair.label) for pair in PAIRS}) == len(PAIRS)


def test_what_is_not_read_is_rejected() -> None:
    assert {(pair.answer, pair.label) for pair in PAIRS if pair.is_right} >= NOT_READ
    assert [pair for pair in NOT_READ if ours(*pair)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_is_judged_rightly_in_both_directions(kind: str) -> None:
    chosen = [pair for pair in PAIRS if pair.kind == kind and (pair.answer, pair.label) not in NOT_READ]
    wrong = [
        (pair.answer, pair.label)
        for pair in chosen
        if (ours(pair.answer, pair.label), ours(pair.label, pair.answer)) != (pair.is_right, pair.is_right)
    ]
    assert wrong == []
