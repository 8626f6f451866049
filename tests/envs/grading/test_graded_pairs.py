"""What the grader says of the table of pairs that `python -m benchmarks.graders` compares graders on."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.envs.grading.graded_pairs import ours, read_pairs

PAIRS = list(read_pairs())
KINDS = Counter(pair.kind for pair in PAIRS)
#: Nothing turns a relation round; math-verify does not do it for this one either.
NOT_READ = {(r"2 \neq x", r"x \neq 2")}


def test_the_table_has_twenty_classes_with_right_and_wrong_answers_in_each() -> None:
    assert len(KINDS) >= 20 and len(PAIRS) >= 600
    assert all({pair.is_right for pair in PAIRS if pair.kind == kind} == {True, False} for kind in KINDS)
    assert len({(pair.answer, pair.label) for pair in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_is_judged_rightly_in_both_directions(kind: str) -> None:
    chosen = [pair for pair in PAIRS if pair.kind == kind and (pair.answer, pair.label) not in NOT_READ]
    wrong = [
        (pair.answer, pair.label)
        for pair in chosen
        if (ours(pair.answer, pair.label), ours(pair.label, pair.answer)) != (pair.is_right, pair.is_right)
    ]
    assert wrong == []
