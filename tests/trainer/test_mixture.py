"""Claims about a run over several environments: shares, limits, metrics, evaluation, replay, resuming to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import trueturn as tt
from agents.recording.recording import Recording
from agents.replay import run as replay
from agents.viewer.source import Source
from envs.config.cli import exit_code
from tests.recordings import lines_of
from tests.trainer.runs import PATIENT, assert_equal_runs
from trainer.callbacks import Callback
from trainer.evaluate import run as evaluate
from trainer.run import run

MIXED = ["--env=geo3k:0.5", "--env=calculator:0.25", "--env=guess:0.25"]
FLAGS = [*MIXED, "--group-size=2", "--max-new-tokens=24", "--train-size=12", "--tracker=", "--doctor=off"]
SHORT = [*FLAGS, "--config", PATIENT, "--eval-size=4", "--problems-per-step=4"]


class Killed(Callback):
    """Ends the process in its third step, before that is recorded as done."""

    def on_step_end(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps over three environments, with a curriculum."""
    folder = tmp_path_factory.mktemp("runs")
    own = ["--steps=4", "--curriculum", "--save-every=1", f"--model={checkpoint}", f"--out={folder}", "--name=whole"]
    assert run([*SHORT, *own]) == 0
    return folder / "whole"


def test_every_environment_has_its_share_its_limits_and_its_metrics(whole: Path) -> None:
    recording = Recording.open(whole)
    trained = [episode for episode in recording.episodes() if episode.phase == "train"]
    groups = Counter(env for env, _ in {(episode.metadata["env"], episode.group) for episode in trained})
    assert sum(groups.values()) == 16 and groups["geo3k"] >= 6 and set(groups) == {"geo3k", "calculator", "guess"}
    limits = {"geo3k": 3, "calculator": 4, "guess": 6}
    for episode in trained:
        assert len(episode.turns) <= limits[episode.metadata["env"]]
        assert bool(episode.tools) == (episode.metadata["env"] != "guess")
    rows = lines_of(whole / "metrics.jsonl")
    for env_id in limits:
        own = [episode.reward for episode in trained if episode.metadata["env"] == env_id and episode.step == 1]
        assert rows[0][f"env/{env_id}/reward"] == pytest.approx(sum(own) / len(own))
        assert any(name.startswith(f"env/{env_id}/end/") for name in rows[0])
    pools = [row[f"curriculum/{pool}"] for pool in ("solved", "learnable", "unsolved", "unseen") for row in rows[-1:]]
    assert sum(pools) == 12 and pools[-1] < 12


def test_evaluations_are_by_environment_and_together(whole: Path) -> None:
    found = json.loads((whole / "summary.json").read_text())["evaluation_after"]["with_tool"]
    parts = found["by_env"]
    assert set(parts) == {"geo3k", "calculator", "guess"}
    assert sum(part["num_problems"] for part in parts.values()) == found["num_problems"] == 4
    right = sum(part["accuracy"]["value"] * part["num_problems"] for part in parts.values())
    assert found["accuracy"]["value"] == pytest.approx(right / 4)


def test_the_viewer_lists_the_environment_of_each_episode(whole: Path) -> None:
    columns = Source(whole).overview()["columns"]
    assert set(columns["env"]) == {"geo3k", "calculator", "guess"}


def test_a_mixture_replays_without_a_registry_of_its_own(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay([str(whole)]) == 0
    assert "0 differ" in capsys.readouterr().out


@pytest.mark.slow
def test_a_mixture_with_a_curriculum_that_is_killed_goes_on_to_the_bit(
    whole: Path, checkpoint: Path, tmp_path: Path
) -> None:
    own = ["--steps=4", "--curriculum", "--save-every=1", f"--model={checkpoint}", f"--out={tmp_path}", "--name=cut"]
    killing = ["--callback", f"{__file__}:Killed"]
    done = subprocess.run([sys.executable, "-m", "trainer.run", *SHORT, *own, *killing], check=False)
    assert done.returncode == -signal.SIGKILL
    config = tmp_path / "cut" / "config.yaml"
    config.write_text(config.read_text().replace(f"{__file__}:Killed", "tests.trainer.test_mixture:Callback"))
    assert run(["--resume", str(tmp_path / "cut")]) == 0
    assert_equal_runs(tmp_path / "cut", whole, 4, "end_reasons", "evaluation_after")


def test_pass_at_k_is_by_environment_and_together(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [
        "--size=6",
        "--samples=2",
        "--eval-temperature=1",
        "--max-new-tokens=24",
        "--tools=on",
        f"--model={checkpoint}",
    ]
    assert evaluate([*MIXED, *own, f"--out={tmp_path}", "--name=mixed"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "mixed" / "evaluation.json").read_text())["ways"]["with_tool"]
    for env_id, part in found["by_env"].items():
        assert f"{env_id}, 2 samples each" in shown and "2" in part["pass_at"]
    assert "together, 2 samples each" in shown


def test_rows_name_their_environment(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"problem": "1 + 1?", "answer": "2", "env": env} for env in ("calculator", "guess", "calculator", "guess")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--env=calculator", "--env=guess", f"--data={data}", f"--model={checkpoint}", f"--out={tmp_path}"]
    common += ["--steps=1", "--group-size=2", "--max-new-tokens=8", "--tracker=", "--doctor=off"]
    assert run([*common, "--problems-per-step=4", "--name=rows"]) == 0
    assert Counter(e.metadata["env"] for e in Recording.open(tmp_path / "rows").episodes()) == {
        "calculator": 4,
        "guess": 4,
    }
    data.write_text(data.read_text().replace('"guess"', '"gues"', 1))
    assert exit_code(lambda: run([*common, "--name=wrong"])) == 2
    assert "env: must name an environment of the run, got gues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["geo3k:0"], "--env: must have a share above 0 after the colon, got geo3k:0; write geo3k:0.5"),
        (["geo3k:x"], "--env: must have a share above 0 after the colon, got geo3k:x"),
        (["geo3k", "geo3k:2"], "--env: must name each environment once, got geo3k"),
        (["geo3k", "gess"], "environment: must be in the registry, got gess"),
    ],
)
def test_a_wrong_share_is_one_line(given: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run([f"--env={text}" for text in given])) == 2
    assert error in capsys.readouterr().err


def test_a_curriculum_needs_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(["--env=coins", "--curriculum"])) == 2
    assert "--curriculum: needs environments that say what a success is, and 'coins'" in capsys.readouterr().err


def test_python_takes_a_list_of_environments() -> None:
    mixed = tt.env(["calculator:0.5", "guess:0.5"], train_size=4)
    assert [problem.metadata["env"] for problem in mixed.problems] == ["calculator", "guess"] * 2
    for number, name in enumerate(("calculate", None)):
        mixed.reset(number)
        assert [tool["function"]["name"] for tool in mixed.tools] == ([name] if name else [])
