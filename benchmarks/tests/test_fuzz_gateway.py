"""Claims about the fuzz of the endpoint for agents: a few requests of every kind break nothing, and are counted."""

from __future__ import annotations

import asyncio

from benchmarks.fuzz_gateway import fuzz


def test_mutated_requests_break_nothing_and_each_is_counted() -> None:
    state = asyncio.run(fuzz(300, seed=3))
    assert state.faults == []
    assert state.num_requests >= 300
    assert sum(state.statuses["another key"].values()) == state.statuses["another key"]["401"] > 0
    assert state.ends["invalid_stream"] == 0 and state.totals["went_on"] > 0
