"""What the grader says of the table of pairs that `python -m benchmarks.graders` compares graders on."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.envs.grading.graded_pairs import ours, read_pairs

PAIRS = list(read_pairs())
KINDS = Counter(pair.kind for pair in PAIRS)
#: Right answers that are rejected. Turned relations, the whole line, ratios, speeds, times and currencies are compared
#: as texts: a colon is a clock's too, and 5 hours are not 5 minutes. The last two are no answers of a person.
NOT_READ = {
    (r"2 \neq x", r"x \neq 2"),
    (r"(-\infty,\infty)", r"-\infty<x<\infty"),
    (r"\mathbb{R}", r"-\infty<x<\infty"),
    (r"x \in \mathbb{R}", r"-\infty<x<\infty"),
    ("3/5", "3:5"),
    (r"\frac34", "3:4"),
    ("6:8", "3:4"),
    ("2:4:6", "1:2:3"),
    (r"3\text{ to }4", "3:4"),
    ("18", r"18\text{ mph}"),
    ("18 miles per hour", r"18\text{ mph}"),
    ("5", r"5\text{ km/h}"),
    *((answer, "3600") for answer in (r"3{,}600\text{ seconds}", r"3600\text{ s}", "3600 seconds")),
    *((answer, "7.5") for answer in (r"7.5\text{ kg}", "7.5 kg", r"7.50\mathrm{kg}", r"7\frac12\text{ kg}")),
    *((answer, "15") for answer in ("£15", "€15", "15€", "15 euros")),
    (r"7:30\text{ p.m.}", "7:30"),
    ("⑫", "12"),
    ("1^{999999999}", "1"),
    (r"e^{i\pi}", "-1"),
}


def test_the_table_has_twenty_classes_with_right_and_wrong_answers_in_each() -> None:
    assert len(KINDS) >= 20 and len(PAIRS) >= 600
    assert all({pair.is_right for pair in PAIRS if pair.kind == kind} == {True, False} for kind in KINDS)
    assert len({(pair.answer, pair.label) for pair in PAIRS}) == len(PAIRS)


def test_what_is_not_read_is_rejected() -> None:
    assert {(pair.answer, pair.label) for pair in PAIRS if pair.is_right} >= NOT_READ
    assert [pair for pair in NOT_READ if ours(*pair)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_is_judged_rightly_and_some_the_other_way_round(kind: str) -> None:
    chosen = [pair for pair in PAIRS if pair.kind == kind and (pair.answer, pair.label) not in NOT_READ]
    turned = [(pair.label, pair.answer, pair.is_right) for pair in chosen[::4]]  # each asks math-verify once more
    pairs = [(pair.answer, pair.label, pair.is_right) for pair in chosen] + turned
    assert [(answer, label) for answer, label, is_right in pairs if ours(answer, label) != is_right] == []
