"""The benchmark of trainers' loops: that ours plays the task, and what its table says."""

from __future__ import annotations

import pytest

from agents.model import STARTER_PATH
from benchmarks import loop_peers
from benchmarks.loop_peers import NEEDS, table, time_peer
from benchmarks.loop_players import PEERS


def test_ours_plays_the_task_and_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would hold for the tests that follow.
    monkeypatch.setattr(loop_peers, "tune_garbage_collection", lambda: None)
    rows = time_peer("TrueTurn", str(STARTER_PATH), num_episodes=64)
    assert [row["at_once"] for row in rows] == [1, 64]
    assert all(row["cpu_us_per_turn"] > 0 and row["tokens"] == 223 for row in rows)


def test_a_cost_is_a_multiple_of_ours_at_the_same_number_and_a_failure_says_why() -> None:
    rows = [
        {"trainer": "TrueTurn", "at_once": 1, "tokens": 9, "cpu_us_per_turn": 100.0},
        {"trainer": "TrueTurn", "at_once": 64, "tokens": 9, "cpu_us_per_turn": 50.0},
        {"trainer": "TRL", "at_once": 64, "tokens": 9, "cpu_us_per_turn": 210.0},
        {"trainer": "verl", "why": "no such version"},
    ]
    assert "| TRL | 64 | 210 | 9 | 4.2 |" in table(rows)
    assert "| verl |  |  |  | no such version |" in table(rows)


def test_every_trainer_that_plays_has_pinned_packages() -> None:
    assert NEEDS.keys() == PEERS.keys()
    assert all("==" in package for needed in NEEDS.values() for package in needed)
