"""An engine of the user's own trains, resumes and evaluates; what is wrong with one is said before step 0."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from envs.config.cli import exit_code
from tests.environments import lucky_geometry
from tests.paths import ROOT
from tests.recordings import episodes_in, lines_of
from tests.trainer.test_run import SMALL, train
from trainer.evaluate import run as evaluate
from trainer.run import run

PLAIN, GROUP = (
    f"{ROOT / 'tests' / 'agents' / 'engines' / name}.py:make_engine" for name in ("plain_engine", "group_engine")
)


@pytest.fixture(
    scope="module", params=[(PLAIN, "auto"), (GROUP, "nccl"), (GROUP, "disk")], ids=["plain", "group", "disk"]
)
def trained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A run that ended after its first step, and was resumed for a second one."""
    folder = tmp_path_factory.mktemp("runs") / "own"
    engine, sync = request.param
    flags = ["--engine", engine, "--sync", sync, "--save-every", "1", "--lr", "1e-3"]
    with lucky_geometry(tmp_path_factory.mktemp("lucky"), "lucky_own", "return float(len(text) % 3)") as lucky:
        train(checkpoint, folder, *lucky, *flags, steps=1, eval_size=1)
        assert run(["--resume", str(folder), "--steps", "2"]) == 0
    return folder


def test_an_own_engine_writes_with_the_learners_weights_in_every_step(trained: Path) -> None:
    rows = lines_of(trained / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rollout_train_kl"] < 1e-8 and row["num_tokens"] > 0 for row in rows)
    assert rows[0]["probe_gap"] < 1e-4
    versions = {
        episode["step"]: {v for turn in episode["turns"] for v, _ in turn["versions"]}
        for episode in episodes_in(trained)
    }
    assert versions == {1: {0}, 2: {1}}
    assert not (trained / "sync").exists()
    went_over_group = "sync: nccl" in (trained / "config.yaml").read_text(encoding="utf-8")
    assert all(("sync_send_s" in row) == went_over_group for row in rows)


def test_an_own_engine_evaluates(trained: Path, tmp_path: Path) -> None:
    argv = ["--engine", PLAIN, "--size", "2", "--max-new-tokens", "8", "--bootstrap", "200", "--out", str(tmp_path)]
    assert evaluate([*argv, "--model", str(trained), "--name", "own"]) == 0
    assert evaluate([*argv[2:], "--model", str(trained), "--name", "ours"]) == 0
    own, ours = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("own", "ours"))
    assert own["ways"] == ours["ways"] and own["num_problems"] == 2


FAULTY = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from dataclasses import replace
from tests.agents.engines.plain_engine import PlainEngine, make_engine

def takes_nothing(): ...
def raises(setup): raise RuntimeError("no such device")
def returns_nothing(setup): return None

class Fixed(PlainEngine):
    update_from_disk = None

class Blocking(PlainEngine):
    def pause(self): ...

class Other(PlainEngine):
    def load(self, folder):
        network = super().load(folder)
        network.lm_head.weight.data.mul_(1.5)
        return network

class Words(PlainEngine):
    async def generate(self, request):
        return replace(await super().generate(request), finish="eos")
"""


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY)
    return str(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "--engine: '[^']*faulty.py' must define it, got missing"),
        ("takes_nothing", "--engine: '[^']*' must take setup"),
        ("raises", "--engine: '[^']*' must not raise, got RuntimeError: no such device .faulty.py:8."),
        (
            "returns_nothing",
            "must return an object with context_length, a whole number, .*, async close.., .* NoneType",
        ),
        ("Fixed", "must return an object with async update_from_disk.folder, version., got Fixed; add what Trainable"),
        ("Blocking", "must return an object with async pause.., got Blocking"),
    ],
)
def test_what_is_wrong_with_an_engine_is_one_line_before_there_is_a_folder(
    checkpoint: Path, faulty: str, name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(checkpoint), "--engine", f"{faulty}:{name}", "--steps", "1", "--out", str(tmp_path / "runs")]
    assert exit_code(lambda: run([*argv, "--train-size", "2", "--eval-size", "0"])) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert re.search(words, line), line
    assert not [*(tmp_path / "runs").glob("*")]


def test_an_engine_that_does_not_say_what_tokens_were_drawn_from_is_refused_with_top_k(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(checkpoint), "--engine", PLAIN, "--top-k", "20", "--out", str(tmp_path / "runs")]
    assert exit_code(lambda: run([*argv, "--train-size", "2", "--eval-size", "0"])) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert "--top-k: needs an engine that says what each token was drawn from, which PlainEngine does not" in line
    assert not [*(tmp_path / "runs").glob("*")]


@pytest.mark.parametrize(
    ("name", "words"), [("Other", "does not run the learner's weights"), ("Words", "ended with 'eos'")]
)
def test_an_engine_that_stops_a_run_is_one_line_that_says_whether_the_run_can_be_resumed(
    name: str, words: str, checkpoint: Path, faulty: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(checkpoint), "--engine", f"{faulty}:{name}", "--out", str(tmp_path), "--name", "run"]
    assert run([*argv, *SMALL, "--eval-size", "0", "--tracker="]) == 1
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and words in line
    assert line.endswith("; there is no checkpoint to resume from"), line
    episodes = episodes_in(tmp_path / "run")
    assert {episode["end_reason"] for episode in episodes} == ({"invalid_stream"} if name == "Words" else set())
