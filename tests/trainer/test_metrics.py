"""Claims about the numbers of a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agents.types import EndReason, Trajectory
from tests.builders import group, trajectory, turn
from trainer.metrics import MetricsLog, rollout_metrics


def called(outcome: str) -> Trajectory:
    """Return a trajectory of two turns whose first called a tool."""
    first = replace(turn(1, 2), info={"tool_calls": [{"name": "f", "arguments": {}, "outcome": outcome}]})
    second = replace(turn(3, 4), info={"tool_calls": []})
    return replace(trajectory([1, 2, 3, 4], [0, 1, 0, 1]), turns=(first, second))


def test_rewards_are_means_over_valid_episodes_and_every_episode_is_counted() -> None:
    broken = trajectory(reward=9.0, end_reason=EndReason.ENV_ERROR)
    metrics = rollout_metrics([group(trajectory(reward=1.0), trajectory(reward=0.0), broken)], max_turns=3)
    assert metrics["reward"] == 0.5
    assert metrics["episodes"] == 3
    assert metrics["valid_frac"] == pytest.approx(2 / 3)
    assert metrics["end/env_error"] == pytest.approx(1 / 3)
    assert metrics["end/completed"] == pytest.approx(2 / 3)


def test_groups_that_teach_are_those_with_different_rewards() -> None:
    same, mixed = group(trajectory(), trajectory()), group(trajectory(), trajectory(reward=0.0))
    assert rollout_metrics([same, mixed, same, same], max_turns=1)["groups_used_frac"] == 0.25


def test_tool_outcomes_are_shares_of_all_turns() -> None:
    metrics = rollout_metrics([group(called("ok"), called("malformed"))], max_turns=2)
    assert (metrics["tool/ok"], metrics["tool/malformed"], metrics["tool/none"]) == (0.25, 0.25, 0.5)
    assert metrics["turns"] == 2
    assert (metrics["reward_after_turn/1"], metrics["reward_after_turn/2"]) == (0.0, 1.0)


def test_several_calls_of_a_turn_are_counted_each_and_other_environments_not_at_all() -> None:
    calls = [{"outcome": "ok"}, {"outcome": "ok"}, {"outcome": "truncated"}]
    several = replace(turn(1, 2), info={"tool_calls": calls})
    silent = replace(turn(3, 4), info={"tool_calls": "none"})
    metrics = rollout_metrics([group(replace(trajectory(), turns=(several, silent)))], max_turns=2)
    assert {k: v for k, v in metrics.items() if k.startswith("tool/")} == {"tool/ok": 1.0, "tool/truncated": 0.5}


def test_discarded_episodes_count_in_the_end_reasons_and_nowhere_else() -> None:
    broken = trajectory(reward=9.0, end_reason=EndReason.ENV_TIMEOUT)
    saved = replace(group(trajectory(reward=1.0), trajectory(reward=0.0)), discarded=(broken, broken))
    given_up = replace(group(broken, trajectory(reward=1.0)), discarded=(broken, broken))
    metrics = rollout_metrics([saved, given_up, group(trajectory(), trajectory())], max_turns=1)
    assert (metrics["groups_resampled"], metrics["groups_dropped"]) == (2, 1)
    assert (metrics["episodes"], metrics["end/env_timeout"]) == (6, 0.5)


def test_a_step_in_which_everything_broke_has_numbers_too() -> None:
    broken = replace(trajectory(end_reason=EndReason.ENV_ERROR), turns=())
    assert rollout_metrics([group(broken, broken)], max_turns=1)["reward"] == 0.0
    assert rollout_metrics([], max_turns=1)["episodes"] == 0


def test_each_row_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    log = MetricsLog(tmp_path, {}, tensorboard=False)
    for step in (1, 2):
        log.write(step, {"reward": step / 2})
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1] == {"step": step, "reward": step / 2}
    log.close()
