"""An environment that changes the working directory moves nothing that a command writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents.replay import run as replay
from trainer.evaluate import run as evaluate
from trainer.run import run as train

MODULE = """
import os
from envs.env import Env

class Wanderer(Env):
    def reset(self):
        os.chdir(os.environ["ELSEWHERE"])
        return {}, {}
    def step(self, response_text):
        return {}, True, {}
    def reward(self, final_text):
        return float(len(final_text) % 2)

def build_env(sample=None, args=None, **_):
    return Wanderer()
"""


def test_every_file_of_a_command_is_where_the_command_was_started(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "wanderer_env.py").write_text(MODULE)
    (here / "wanderer.yaml").write_text(
        "wanderer: {entry_point: 'wanderer_env:build_env', description: walks, max_turns: 1}"
    )
    (here / "rows.jsonl").write_text("".join(json.dumps({"problem": f"Find {n}.", "answer": "1"}) + "\n" for n in "12"))
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("ELSEWHERE", str(elsewhere))
    monkeypatch.setenv("TRUETURN_TRACKER", "")
    played = ["--env", "wanderer", "--data", "rows.jsonl", "--model", str(checkpoint), "--max-new-tokens", "8"]
    trained = [*played, "--eval-data", "rows.jsonl", "--problems-per-step", "2", "--group-size", "2", "--steps", "1"]
    for command, argv in (
        (train, [*trained, "--registry", "wanderer.yaml", "--name", "run"]),
        (train, ["--resume", "runs/run", "--steps", "2"]),
        (evaluate, [*played, "--registry", "wanderer.yaml", "--name", "evaluation"]),
        (replay, ["runs/run", "--registry", "wanderer.yaml", "--report", "report.json"]),
    ):
        monkeypatch.chdir(here)
        assert command(argv) == 0
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in (here / "runs").iterdir()} == {"run", "evaluation"}
    assert json.loads((here / "runs/run/summary.json").read_text())["steps_done"] == 2
    assert (here / "report.json").exists()
