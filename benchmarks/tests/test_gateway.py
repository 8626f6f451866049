"""The claim about `python -m benchmarks.gateway`: every way that stands here plays all turns."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.gateway import WAYS, measure


@pytest.mark.parametrize("way", [way for way in WAYS if way != "verifiers' server"])
def test_each_way_plays_to_the_end(way: str) -> None:
    found = asyncio.run(measure(way, episodes=16, at_once=8, repeats=1))
    assert found["turns_per_s"] > 0
