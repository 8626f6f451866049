"""`envs.check` finds every fault of the catalogue, in the time that it states before, and none in what is sound."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.catalogue.base import Row
from tests.catalogue.table import FAULTY, HEALTHY, KINDS, NOT_FOUND, check

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
HANGING = KINDS["hangs"]


def found(row: Row) -> None:
    checked = check(row)
    told = {finding.check: finding.detail for finding in checked.findings if finding.passed is row.is_remark}
    assert row.word in told.get(row.check, ""), told
    assert checked.is_found and checked.seconds < checked.bound_s


def name_of(row: Row) -> str:
    return row.spec.id


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in FAULTY if row not in HANGING], ids=name_of)
def test_a_faulty_environment_is_found_by_its_check_and_its_word(row: Row) -> None:
    found(row)


@pytest.mark.alone
@pytest.mark.parametrize("row", HANGING, ids=name_of)
def test_an_environment_that_hangs_is_found_in_the_time_that_was_stated_before(row: Row) -> None:
    found(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", HEALTHY, ids=name_of)
def test_a_sound_environment_passes_however_odd_it_is(row: Row) -> None:
    assert check(row).failed == []


@pytest.mark.slow
@pytest.mark.parametrize("row", NOT_FOUND, ids=name_of)
def test_what_no_play_can_find_is_not_found_and_the_reason_is_given(row: Row) -> None:
    assert check(row).failed == [] and row.word


def test_the_catalogue_is_as_large_as_it_claims() -> None:
    assert len(FAULTY) >= 140 and len(HEALTHY) >= 10 and len(NOT_FOUND) <= 5
    assert all(row.check and row.word for row in FAULTY)
    for kind, rows in KINDS.items():
        assert [name for name, count in Counter(map(name_of, rows)).items() if count > 1] == [], kind
