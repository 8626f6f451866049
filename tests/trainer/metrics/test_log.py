"""Claims about the numbers of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.rollout.groups import StepRollout
from agents.types import EndReason, Timing, Trajectory, TrajectoryGroup
from envs.config.plugins import give
from tests.builders import group, trajectory, turn
from tests.recordings import lines_of
from trainer.metrics.log import MetricsLog, rollout_metrics
from trainer.metrics.trackers import TrackedRun
from trainer.types import StepStats


def metrics_of(
    *groups: TrajectoryGroup, max_turns: int = 1, version: int = 0, seconds: float = 1.0, **unused: Any
) -> dict[str, float]:
    return rollout_metrics(StepRollout(groups, **unused, weight_version=version), max_turns, seconds)


def called(outcome: str) -> Trajectory:
    """Return a trajectory of two turns whose first called a tool."""
    first = replace(turn(1, 2), info={"tool_calls": [{"name": "f", "arguments": {}, "outcome": outcome}]})
    second = replace(turn(3, 4), info={"tool_calls": []})
    return replace(trajectory([1, 2, 3, 4], [0, 1, 0, 1]), turns=(first, second))


def test_rewards_are_means_over_valid_episodes_and_every_episode_is_counted() -> None:
    broken = trajectory(reward=9.0, end_reason=EndReason.ENV_ERROR)
    metrics = metrics_of(group(trajectory(reward=1.0), trajectory(reward=0.0), broken), max_turns=3)
    assert metrics["reward"] == 0.5
    assert metrics["episodes"] == 3
    assert metrics["valid_frac"] == pytest.approx(2 / 3)
    assert metrics["end/env_error"] == pytest.approx(1 / 3)
    assert metrics["end/completed"] == pytest.approx(2 / 3)


def test_groups_that_teach_are_those_with_different_rewards() -> None:
    same, mixed = group(trajectory(), trajectory()), group(trajectory(), trajectory(reward=0.0))
    assert metrics_of(same, mixed, same, same)["groups_used_frac"] == 0.25


def test_tool_outcomes_are_shares_of_all_turns() -> None:
    metrics = metrics_of(group(called("ok"), called("malformed")), max_turns=2)
    assert (metrics["tool/ok"], metrics["tool/malformed"], metrics["tool/none"]) == (0.25, 0.25, 0.5)
    assert metrics["turns"] == 2


def test_several_calls_of_a_turn_are_counted_each_and_other_environments_not_at_all() -> None:
    calls = [{"outcome": "ok"}, {"outcome": "ok"}, {"outcome": "truncated"}]
    several = replace(turn(1, 2), info={"tool_calls": calls})
    silent = replace(turn(3, 4), info={"tool_calls": "none"})
    metrics = metrics_of(group(replace(trajectory(), turns=(several, silent))), max_turns=2)
    assert {k: v for k, v in metrics.items() if k.startswith("tool/")} == {"tool/ok": 1.0, "tool/truncated": 0.5}


def test_faults_of_tools_are_counted_tool_by_tool() -> None:
    calls = [
        {"name": "price", "outcome": "tool_fault"},
        {"name": "buy", "outcome": "ok"},
        {"name": None, "outcome": "tool_fault"},
    ]
    faulty = replace(turn(1, 2), info={"tool_calls": calls})
    fine = replace(turn(3, 4), info={"tool_calls": [{"name": "price", "outcome": "ok"}]})
    metrics = metrics_of(group(replace(trajectory(), turns=(faulty, fine))), max_turns=2)
    faults = {name: share for name, share in metrics.items() if name.startswith("tool_fault/")}
    assert faults == {"tool_fault/price": 0.5, "tool_fault/unknown": 0.5} and metrics["tool/tool_fault"] == 1.0


def test_an_episode_that_a_fault_of_a_tool_ended_counts_with_its_reward() -> None:
    metrics = metrics_of(group(trajectory(), trajectory(reward=-1.0, end_reason=EndReason.TOOL_FAULT)))
    assert (metrics["reward"], metrics["valid_frac"], metrics["groups_used_frac"]) == (0.0, 1.0, 1.0)
    assert metrics["end/tool_fault"] == 0.5


def test_discarded_episodes_count_in_the_end_reasons_and_nowhere_else() -> None:
    broken = trajectory(reward=9.0, end_reason=EndReason.ENV_TIMEOUT)
    saved = replace(group(trajectory(reward=1.0), trajectory(reward=0.0)), discarded=(broken, broken))
    given_up = replace(group(broken, trajectory(reward=1.0)), discarded=(broken, broken))
    metrics = metrics_of(saved, given_up, group(trajectory(), trajectory()))
    assert (metrics["groups_resampled"], metrics["groups_dropped"]) == (2, 1)
    assert (metrics["episodes"], metrics["end/env_timeout"]) == (6, 0.5)


def test_a_step_in_which_everything_broke_has_numbers_too() -> None:
    broken = replace(trajectory(end_reason=EndReason.ENV_ERROR), turns=())
    assert metrics_of(group(broken, broken))["reward"] == 0.0
    assert metrics_of()["episodes"] == 0


def test_groups_that_are_not_trained_on_are_counted_and_only_complete_ones_have_rewards() -> None:
    equal, cut = group(trajectory(reward=0.0)), group(trajectory(reward=9.0, end_reason=EndReason.ABORTED))
    metrics = metrics_of(group(trajectory(reward=1.0), trajectory(reward=0.5)), filtered=(equal,), aborted=(cut, cut))
    assert metrics["reward"] == 0.5
    assert (metrics["episodes"], metrics["end/aborted"]) == (3, 0.4)
    names = ("trained", "filtered", "surplus", "aborted")
    assert [metrics[f"groups_{name}"] for name in names] == [1, 1, 0, 2]


def test_lengths_are_of_prompts_model_tokens_and_whole_streams() -> None:
    streams = [trajectory(range(10, 10 + 4 + k), [0] * 3 + [1] * (1 + k)) for k in range(21)]
    metrics = metrics_of(group(*streams))
    assert (metrics["length/prompt_mean"], metrics["length/prompt_max"]) == (3, 3)
    assert [metrics[f"length/model_{name}"] for name in ("mean", "p95", "max")] == pytest.approx([11, 20, 21])
    assert [metrics[f"length/stream_{name}"] for name in ("mean", "p95", "max")] == pytest.approx([14, 23, 24])


def test_time_is_shared_out_and_throughput_counts_all_that_was_played() -> None:
    slow = replace(
        trajectory([1] * 6, [0, 0, 1, 1, 1, 0]), timing=Timing(0.0, 8.0, engine_s=4.0, env_s=2.0, check_s=0.5)
    )
    cut = replace(trajectory(end_reason=EndReason.ABORTED), timing=Timing(0.0, 2.0, engine_s=2.0))
    metrics = metrics_of(group(slow), aborted=(group(cut),), seconds=4.0)
    shares = [metrics[f"{name}_time_frac"] for name in ("engine", "env", "check", "loop")]
    assert shares == pytest.approx([0.6, 0.2, 0.05, 0.15])
    assert (metrics["rollout_tokens_per_s"], metrics["rollout_turns_per_s"]) == (5 / 4, 2 / 4)


def test_the_cache_share_is_of_all_tokens_given_to_the_engine() -> None:
    first, second = turn(10, 15), replace(turn(20, 22), num_cached=14)
    metrics = metrics_of(group(replace(trajectory(), turns=(first, second))))
    assert metrics["cache_hit_frac"] == pytest.approx(14 / 30)


def test_staleness_is_counted_in_versions_over_the_tokens_trained_on() -> None:
    carried = replace(trajectory(), turns=(replace(turn(2, 8), versions=((3, 4), (5, 2))),))
    fresh = replace(trajectory(), turns=(replace(turn(2, 4), versions=((5, 2),)),))
    old = replace(trajectory(end_reason=EndReason.ABORTED), turns=(replace(turn(2, 4), versions=((0, 2),)),))
    dropped = group(replace(old, end_reason=EndReason.COMPLETED), old)  # nothing to compare it with
    metrics = metrics_of(group(carried, fresh, old), dropped, version=5)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (8 / 8, 2)
    assert (metrics["staleness/0_frac"], metrics["staleness/2_frac"]) == (0.5, 0.5)


def test_statistics_of_the_step_are_in_the_row_turn_by_turn(tmp_path: Path) -> None:
    stats = StepStats(
        0.1, 0.2, 0.3, 4, 2, 0, 0.5, (0.6, 0.7), 0.8, 0.9, 1.0, 1.05, 1.1, {"clip_frac": 0.25}, {"learner_peak_gib": 3}
    )
    log = MetricsLog(tmp_path, {})
    row = log.write(1, {"reward": 1.0}, stats)
    log.close()
    assert (row["rollout_train_kl"], row["rollout_train_kl/turn_1"], row["rollout_train_kl/turn_2"]) == (0.5, 0.6, 0.7)
    assert (row["logprob_gap_p99"], row["num_tokens"], row["clip_frac"]) == (0.9, 4, 0.25)
    assert (row["token_mult_prob_error"], row["entropy"]) == (1.05, 1.1)
    assert row["memory/learner_peak_gib"] == 3
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row


def test_each_row_is_on_disk_when_it_is_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, {})
    for step in (1, 2):
        log.write(step, {"reward": step / 2})
        rows = lines_of(tmp_path / "metrics.jsonl")
        assert rows[-1] == {"step": step, "reward": step / 2}
    log.close()


def test_a_log_that_goes_on_has_the_rows_so_far_and_adds_to_them(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path, {})
    written = [first.write(step, {"reward": step / 2}) for step in (1, 2)]
    size = first.size()
    first.close()
    assert size == (tmp_path / "metrics.jsonl").stat().st_size
    again = MetricsLog(tmp_path, {}, steps_done=2)
    assert again.rows == written
    again.write(3, {"reward": 1.5})
    again.close()
    assert [row["step"] for row in lines_of(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_what_is_added_to_a_row_replaces_its_line_and_goes_alone_to_trackers(tmp_path: Path) -> None:
    sent: list[tuple[int, dict[str, float]]] = []

    class Sent:
        def __init__(self, run: TrackedRun) -> None: ...
        def write(self, step: int, row: Mapping[str, float]) -> None:
            sent.append((step, dict(row)))

        def close(self) -> None: ...

    log = MetricsLog(tmp_path, {}, trackers=(give(Sent),))
    for step in (1, 2):
        row = log.write(step, {"reward": 0.5})
    log.add({"eval/with_tool/accuracy": 0.25})
    log.write(3, {"reward": 0.75})
    log.close()
    assert row == log.rows[1] == {"step": 2, "reward": 0.5, "eval/with_tool/accuracy": 0.25}
    assert lines_of(tmp_path / "metrics.jsonl") == log.rows and "eval/with_tool/accuracy" not in log.rows[0]
    assert sent[2] == (2, {"step": 2, "eval/with_tool/accuracy": 0.25}) and [step for step, _ in sent] == [1, 2, 2, 3]
