"""`trainer.evaluate` and `agents.play` with models of OpenAI-compatible servers: tables, recordings, cache, keys."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

import trueturn as tt
from agents.play import run as play
from agents.recording import Recording
from agents.replay import run as replay
from agents.types import EndReason
from agents.viewer.source import Source
from envs.config.cli import exit_code
from tests.agents.endpoints.server import chat_server, says
from tests.paths import ROOT
from trainer.evaluate import run
from trainer.sft.__main__ import run as sft

KEY = "sk-a-key-that-no-file-may-hold"


def solver(body: dict[str, Any]) -> Mapping[str, Any] | tuple[int, bytes]:
    """Solve a problem of the calculator with its tool; the model `weak` is always wrong, `lame` never answers."""
    (question,) = re.findall(r"What is (.*?)\?", str(body["messages"]))
    if body["model"] == "lame":
        return 500, json.dumps({"error": {"message": f"the key {KEY} is lame"}}).encode()
    if body["model"] == "weak":
        return says("\\boxed{1}")
    if "tools" in body and body["messages"][-1]["role"] == "user":
        return says(f"My key is {KEY}.", [("calculate", json.dumps({"expression": question}))])
    return says(f"\\boxed{{{eval(question)}}}")


def models_file(folder: Path, url: str, *models: str) -> str:
    file = folder / "models.yaml"
    listed = [{"url": url, "model": model, "max_retries": 0, "key_env": "A_KEY"} for model in models]
    listed[0] |= {"price_in": 2.0, "price_out": 10.0}
    file.write_text(json.dumps(listed))
    return str(file)


def evaluate(folder: Path, *flags: str) -> int:
    return exit_code(lambda: run(["--env", "calculator", "--size", "3", "--out", str(folder), "--name", "x", *flags]))


def all_files(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_several_models_stand_in_one_table_and_their_recordings_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "120")
    with chat_server(solver) as server:
        models = models_file(tmp_path, server.url, "strong", "weak", "lame")
        flags = ["--endpoint", models, "--save-demonstrations", str(tmp_path / "demos.jsonl"), "--tools", "on"]
        assert evaluate(tmp_path, *flags, "--endpoint-cache", str(tmp_path / "cache")) == 1
    said = capsys.readouterr()
    assert server.keys == {f"Bearer {KEY}"}
    assert re.search(r"strong, with tool +1.000 \[.*\] +0 of 3 +600 +60 +0.0018", said.out)
    assert re.search(r"weak, with tool +0.000 \[.*\] +0 of 3 +300 +30", said.out)
    assert "lame, with tool" in said.out and "3 of 3" in said.out
    assert "no episode could be scored: InternalServerError" in said.err
    assert len((tmp_path / "demos.jsonl").read_text().splitlines()) == 3
    report = json.loads((tmp_path / "x" / "0-strong" / "evaluation.json").read_text())
    assert report["usage"]["with_tool"] == {"prompt_tokens": 600, "completion_tokens": 60, "cost": 0.0018}
    lame = Recording.open(tmp_path / "x" / "2-lame")
    ends = [(episode.end_reason, episode.error) for episode in lame.episodes()]
    assert {reason for reason, _ in ends} == {EndReason.ABORTED} and all("[key]" in str(error) for _, error in ends)
    for name in ("0-strong", "1-weak"):
        assert replay([str(tmp_path / "x" / name)]) == 0
    source = Source(tmp_path / "x" / "0-strong")
    assert source.columns["num_model_tokens"] == [20, 20, 20] and source.columns["num_tokens"] == [110, 110, 110]
    assert KEY.encode() not in all_files(tmp_path) and KEY not in said.out + said.err


def test_what_the_demonstrations_hold_is_learnt_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demos = tmp_path / "demos.jsonl"
    with chat_server(solver) as server:
        flags = ["--endpoint", server.url, "--model", "strong", "--save-demonstrations", str(demos)]
        assert evaluate(tmp_path, *flags, "--tools", "on") == 0
        assert evaluate(tmp_path / "y", *flags) == 2  # the file is there
    learnt = ["--data", str(demos), "--batch-size", "3", "--steps", "1", "--out", str(tmp_path), "--name", "sft"]
    assert exit_code(lambda: sft(learnt)) == 0
    assert "3 conversations" in capsys.readouterr().out


def test_a_run_that_was_killed_is_continued_from_the_cache(tmp_path: Path) -> None:
    def slow(body: dict[str, Any]) -> Any:
        time.sleep(0.05)
        return solver(body)

    with chat_server(slow) as server:
        flags = ["--endpoint", models_file(tmp_path, server.url, "strong"), "--endpoint-cache", str(tmp_path / "cache")]
        config = json.loads((tmp_path / "models.yaml").read_text())
        config[0] |= {"max_concurrent": 2, "key_env": ""}
        (tmp_path / "models.yaml").write_text(json.dumps(config))
        argv = ["--env", "calculator", "--size", "30", "--tools", "on", "--out", str(tmp_path), *flags]
        killed = subprocess.Popen(
            [sys.executable, "-m", "trainer.evaluate", *argv, "--name", "killed"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
        )
        while len(server.asked) < 20:
            assert killed.poll() is None
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert exit_code(lambda: run([*argv, "--name", "continued"])) == 0
        assert 60 <= len(server.asked) <= 60 + 2, "what was asked before the kill is not asked again"
    ways = json.loads((tmp_path / "continued" / "evaluation.json").read_text())["ways"]
    assert ways["with_tool"]["accuracy"]["value"] == 1.0


def test_python_evaluates_and_rolls_out_a_model_of_an_endpoint() -> None:
    with chat_server(solver) as server:
        report = tt.evaluate("calculator", "strong", tools=True, size=2, endpoint=server.url)
        rollout = tt.rollout("calculator", "strong", num_problems=2, endpoint=server.url)
    assert report.model == "strong" and report.usage["with_tool"]["completion_tokens"] == 40
    accuracy = report.ways["with_tool"].accuracy
    assert accuracy is not None and accuracy.value == 1.0
    assert [t.reward for t in rollout] == [1.0, 1.0] and rollout[0].num_model_tokens == 20


def test_a_mixture_is_played_with_the_tools_and_turns_of_each_environment(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> Any:
        return solver(body) if "What is" in str(body["messages"]) else says("7")

    with chat_server(reply) as server:
        argv = ["--env", "calculator:0.5", "--env", "guess:0.5", "--endpoint", server.url, "--model", "strong"]
        argv += ["--size", "4", "--tools", "on", "--out", str(tmp_path), "--name", "x"]
        assert exit_code(lambda: run([*argv, "--save-demonstrations", str(tmp_path / "demos.jsonl")])) == 0
    assert {bool(body.get("tools")) for body in server.asked} == {True, False}
    assert replay([str(tmp_path / "x")]) == 0
    assert len((tmp_path / "demos.jsonl").read_text().splitlines()) >= 2


def test_an_episode_is_played_and_recorded_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chat_server(solver) as server:
        flags = ["--env", "calculator", "--endpoint", server.url, "--model", "strong", "--record", str(tmp_path / "r")]
        assert play(flags) == 0
    assert "--- end: completed, reward 1, 2 turns, 20 tokens written, 200 read" in capsys.readouterr().out
    assert replay([str(tmp_path / "r")]) == 0
    for more in (["--model", "starter"], ["--id", "play-0-0", "--fork", "1"]):
        assert exit_code(lambda: replay([str(tmp_path / "r"), *more])) == 2  # noqa: B023 - called at once
        assert "must have token ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--endpoint", "http://localhost:1/v1", "--model", "m"], "--endpoint: must answer"),
        (["--endpoint", "http://localhost:1/v1"], "--model: must name a model of the endpoint"),
        (["--endpoint", "http://me:pw@localhost/v1", "--model", "m"], "without a password"),
        (["--endpoint", "models.yaml", "--model", "m"], "--endpoint: must be a URL where --model"),
        (["--endpoint", "nothing.yaml"], "must be a URL or a YAML file"),
        (["--endpoint-cache", "answers"], "--endpoint-cache: needs --endpoint"),
        (["--save-demonstrations", "demos.jsonl"], "--save-demonstrations: needs --endpoint"),
        (
            ["--endpoint", "http://localhost:1/v1", "--model", "m", "--endpoint-key-file", "none"],
            "must be in a readable file",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_before_anything_is_played(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / "runs", *flags) == 2
    printed = capsys.readouterr().err
    assert said in printed and len(printed.splitlines()) == 1 and "me:pw" not in printed
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "entry", [{"api_key": KEY}, {"key_env": KEY}, {"options": KEY}, {"timeout_s": KEY}, {"key_file": KEY}]
)
def test_a_key_in_the_wrong_place_is_not_printed(
    entry: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.yaml").write_text(json.dumps([{"url": "http://localhost:1/v1", "model": "m", **entry}]))
    assert evaluate(tmp_path, "--endpoint", str(tmp_path / "models.yaml")) == 2
    said = capsys.readouterr()
    assert KEY not in said.out + said.err


def test_a_refused_key_is_an_error_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENDPOINT_API_KEY", "sk-refused-everywhere")
    with chat_server(solver) as server:
        assert evaluate(tmp_path / "runs", "--endpoint", server.url, "--model", "strong") == 2
    said = capsys.readouterr().err
    assert "(AuthenticationError)" in said and "sk-refused" not in said
    assert not server.asked and not (tmp_path / "runs").exists()


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert evaluate(tmp_path, "--endpoint", "http://localhost:1/v1", "--model", "m") == 2
    assert capsys.readouterr().err.strip().endswith("pip install 'trueturn[endpoint]'")
