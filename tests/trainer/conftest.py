"""Fixtures of all tests of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.runs import drawing


@pytest.fixture(scope="session", autouse=True)
def no_curves() -> Iterator[None]:
    """Runs draw no curves; the tests whose claim they are switch them on."""
    with drawing(False):
        yield
