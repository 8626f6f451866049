"""The study of a pretrained model: what it is shown first, and how its results are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.smollm2 import ENV, HELD_OUT, Habits, calls_made, demonstrations, draw, run_command, table
from envs.execution.load import load_env
from envs.registry import get_spec
from envs.tool_calls import ToolCall, write_tool_call
from envs.types import Sample


def test_demonstrations_solve_their_problems() -> None:
    build_env, args = load_env(get_spec(ENV)), get_spec(ENV).args(max_turns=3, tool_format="hermes")
    for row in demonstrations(40, seed=3, habits=Habits(tools_offered=1.0, calls=0.5)):
        question, answer = row["messages"][1]["content"], row["messages"][-1]["content"]
        problem = next(s for s in get_spec(ENV).load_dataset("train", 90, 1003) if s.prompt[-1]["content"] == question)
        env = build_env(problem, args)
        if len(row["messages"]) > 3:
            call = row["messages"][2]["tool_calls"][0]["function"]
            observation = env.step(write_tool_call(ToolCall(call["name"], call["arguments"]), "hermes"))[0]
            assert observation["obs_str"] == row["messages"][3]["content"]
        assert env.reward(answer) == 1.0
        assert [tool["function"]["name"] for tool in row["tools"]] == ["calculate"]


def test_demonstrations_keep_the_shares_of_habits_and_differ_by_seed() -> None:
    rows = demonstrations(600, seed=0, habits=Habits(tools_offered=0.8, calls=0.3))
    offered = [row for row in rows if "tools" in row]
    called = [row for row in rows if len(row["messages"]) > 3]
    assert 0.75 < len(offered) / len(rows) < 0.85
    assert 0.25 < len(called) / len(offered) < 0.35
    assert all("tools" in row for row in called)
    assert rows[:20] == demonstrations(20, seed=0, habits=Habits(0.8, 0.3))
    assert not {str(row["messages"]) for row in rows} & {str(row["messages"]) for row in demonstrations(600, seed=1)}


def test_no_held_out_problem_is_demonstrated() -> None:
    held_out = {_question(sample) for sample in get_spec(ENV).load_dataset("heldout", HELD_OUT, 0)}
    shown = {row["messages"][1]["content"] for seed in range(8) for row in demonstrations(500, seed)}
    # Without leaving them out, problems of two small numbers do meet.
    drawn = {_question(s) for seed in range(8) for s in get_spec(ENV).load_dataset("train", 1000, 1000 + seed)}
    assert held_out & drawn
    assert not held_out & shown


def _question(sample: Sample) -> str:
    return sample.prompt[-1]["content"]


def _evaluation(right: int, calls: int, turns: float) -> dict[str, Any]:
    accuracy = {"value": right / 8, "low": 0.0, "high": 0.5}
    outcomes = {"none": 8, "ok": calls, "malformed": 1}
    return {
        "accuracy": accuracy,
        "tool_outcomes": outcomes,
        "num_problems": 8,
        "num_samples": 1,
        "mean_turns": turns,
    }


def _run(seed: int, rewards: list[float]) -> dict[str, Any]:
    before = {"with_tool": _evaluation(2, 4, 1.5), "without_tool": _evaluation(0, 0, 1.0)}
    after = {"with_tool": _evaluation(8, 10, 2.25), "without_tool": _evaluation(1, 0, 1.0)}
    return {
        "seed": seed,
        "minutes": 3.14,
        "num_demonstrations": 256 if seed == 0 else 0,
        "steps": [{"step": step, "reward": reward} for step, reward in enumerate(rewards, 1)],
        "reinforced": {
            "evaluation_before": before,
            "evaluation_after": after,
            "accuracy_before": {"with_tool": 0.25, "without_tool": 0.0},
            "accuracy_after": {"with_tool": 1.0, "without_tool": 0.125},
            "max_rollout_train_kl": 2.5e-4,
        },
    }


def test_calls_made_counts_those_that_worked_per_episode() -> None:
    assert calls_made(_evaluation(8, 10, 2.25)) == 1.25


def test_table_has_the_model_as_it_came_and_two_rows_a_seed() -> None:
    base = {"ways": {"with_tool": _evaluation(0, 0, 1.0), "without_tool": _evaluation(0, 0, 1.0)}}
    lines = table(base, [_run(0, [0.25, 0.5, 0.75, 1.0]), _run(2, [0.5])]).splitlines()
    assert len(lines) == 2 + 1 + 2 * 2
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2][:3] == ["-", "base", "0.000 (0.000 to 0.500)"]
    # The first two steps and the last two, of four.
    assert cells[3][0:2] == ["0", "demonstrations"] and cells[3][4:] == ["0.50", "1.50", "0.375", "-", "-"]
    assert cells[4][1:3] == ["reinforced", "1.000 (0.000 to 0.500)"]
    assert cells[4][4:] == ["1.25", "2.25", "0.875", "3.1", "2.5e-04"]
    # Without demonstrations, reinforcement begins with the model as it came.
    assert cells[5][0:2] == ["2", "base"] and cells[6][0:2] == ["2", "reinforced"]


def test_curve_is_drawn_for_runs_of_different_length(tmp_path: Path) -> None:
    draw([_run(0, [0.25, 0.5, 0.75]), _run(1, [0.5, 0.5])], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2 of trainer.run(.|\n)*--steps"):
        run_command(["-m", "trainer.run", "--steps", "many"], tmp_path / "log.txt")
    assert "trainer.run --steps many" in (tmp_path / "log.txt").read_text()
