"""The command `python -m trainer.evaluate`: what it refuses, what it leaves behind, and that it repeats."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agents.recording.gzip_lines import read_gzip_lines
from envs.config.cli import exit_code
from envs.config.settings import leaves
from envs.errors import UserError
from tests.pages import is_shown, session
from tests.paths import DOCS
from tests.processes import Command
from tests.recordings import episodes_in, lines_of
from tests.servers import serving
from trainer.config.evaluation import EvaluateConfig, MeasurementConfig
from trainer.config.run import RunConfig
from trainer.evaluate import run
from trainer.run import run as train

QUICK = ["--max-new-tokens", "24", "--bootstrap", "200"]


def evaluate(folder: Path, *argv: str) -> dict[str, Any]:
    """Run the command in this process; return the report."""
    assert run(["--out", str(folder.parent), "--name", folder.name, *argv]) == 0
    return json.loads((folder / "evaluation.json").read_text())


def rows(path: Path, *problems: str) -> str:
    """Write a rows file of questions of text, whose answers are their numbers; return it."""
    written = [
        {"problem": problem, "answer": str(n), "kind": "odd" if n % 2 else "even"} for n, problem in enumerate(problems)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return str(path)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The starter on 8 of its held-out problems, 4 samples each."""
    folder = tmp_path_factory.mktemp("evaluations") / "sampled"
    return folder, evaluate(folder, "--size", "8", "--samples", "4", "--eval-temperature", "1")


def test_the_report_has_both_ways_with_intervals_their_difference_and_versions(
    sampled: tuple[Path, dict[str, Any]],
) -> None:
    _, report = sampled
    assert (report["env"], report["model"], report["num_problems"], report["partial"]) == ("geo3k", "starter", 8, "")
    for way in report["ways"].values():
        assert set(way["pass_at"]) == {"1", "2", "4"} and way["pass_at"]["1"] == way["accuracy"]
        values = [way["pass_at"][k]["value"] for k in ("1", "2", "4")]
        assert values == sorted(values) and values[0] < values[2]
        assert all(e["low"] <= e["value"] <= e["high"] for e in way["pass_at"].values())
        assert sum(end["num_episodes"] for end in way["ends"].values()) == 32
        assert sum(level["num_problems"] for level in way["by_tag"]["level"].values()) == 8
    with_tool, without = report["ways"]["with_tool"], report["ways"]["without_tool"]
    assert with_tool["tool_outcomes"] and without["mean_turns"] == 1.0
    gain = with_tool["accuracy"]["value"] - without["accuracy"]["value"]
    assert report["difference"]["value"] == pytest.approx(gain)
    assert {"torch", "transformers", "python"} <= report["versions"].keys()
    assert report["config"]["measurement"]["samples"] == 4 and report["registry_entry"]["id"] == "geo3k"


def test_every_problem_has_a_line_for_each_way_that_agrees_with_the_figures(
    sampled: tuple[Path, dict[str, Any]],
) -> None:
    folder, report = sampled
    results = lines_of(folder / "results.jsonl")
    assert [(r["way"], r["number"]) for r in results] == [
        (w, n) for w in ("with_tool", "without_tool") for n in range(8)
    ]
    for way, figures in report["ways"].items():
        own = [r for r in results if r["way"] == way]
        assert figures["accuracy"]["value"] == pytest.approx(sum(sum(r["right"]) for r in own) / 32)
        assert figures["mean_turns"] == sum(sum(r["turns"]) for r in own) / 32
        assert all([reward >= 1.0 for reward in r["rewards"]] == r["right"] for r in own)
    assert {r["sample_id"] for r in results} == {f"geo3k-procedural-heldout-0-{n}" for n in range(8)}


def test_every_episode_is_recorded_under_its_way(sampled: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = sampled
    episodes = episodes_in(folder, "evaluate")
    assert [sum(e["way"] == way for e in episodes) for way in ("with_tool", "without_tool")] == [32, 32]
    assert len({e["seed"] for e in episodes}) == 32  # both ways are sampled from the same seeds
    assert len(list((folder / "episodes" / "images").iterdir())) == 8


def test_the_same_command_gives_the_same_figures(sampled: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, report = sampled
    again = evaluate(tmp_path / "again", "--size", "8", "--samples", "4", "--eval-temperature", "1", "--record", "0")
    assert (again["ways"], again["difference"]) == (report["ways"], report["difference"])
    assert lines_of(tmp_path / "again" / "results.jsonl") == lines_of(folder / "results.jsonl")
    assert not (tmp_path / "again" / "episodes").exists()
    sampling = ["--samples", "4", "--eval-temperature", "1", "--tools", "off"]
    other = evaluate(tmp_path / "other", "--size", "8", *sampling, "--seed", "1")
    assert other["ways"]["without_tool"] != report["ways"]["without_tool"]


def test_the_console_shows_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = evaluate(tmp_path / "run", "--size", "4", *QUICK)
    shown = capsys.readouterr().out
    for words in (
        "starter on geo3k, 4 problems",
        "1 sample each, greedy",
        "with tool less without tool, 4 problems:",
    ):
        assert words in shown
    for title in ("How episodes ended", "Tool calls", "Accuracy by family", "Accuracy by level"):
        assert title in shown
    accuracy = report["ways"]["with_tool"]["accuracy"]
    assert f"{accuracy['value']:.3f} [{accuracy['low']:.3f}, {accuracy['high']:.3f}]" in shown


def test_a_run_measures_its_held_out_problems_as_the_command_does(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And shows the intervals; and a run folder is a model: its trained weights are what is evaluated."""
    small = ["--train-size", "8", "--problems-per-step", "2", "--group-size", "2", "--max-new-tokens", "24"]
    argv = ["--model", str(checkpoint), "--steps", "1", "--eval-size", "3", *small]
    assert train([*argv, "--out", str(tmp_path), "--name", "run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    shown = capsys.readouterr().out
    assert "Held-out accuracy, 3 problems" in shown and "without tool, after" in shown
    assert "mean reward" in shown and "right: a reward of at least 1 " in shown
    report = evaluate(tmp_path / "after", "--model", str(tmp_path / "run"), "--size", "3", *QUICK)
    for way, figures in report["ways"].items():
        accuracy = summary["evaluation_after"][way]["accuracy"]
        assert accuracy == figures["accuracy"] and accuracy["value"] == summary["accuracy_after"][way]
        assert summary["evaluations"][-1]["interval"][way] == [accuracy["low"], accuracy["high"]]
        assert f"{accuracy['value']:.3f} [{accuracy['low']:.3f}, {accuracy['high']:.3f}]" in shown
        assert summary["evaluation_after"][way]["ends"] == figures["ends"]


def test_a_run_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("steps: 3\n")
    with pytest.raises(UserError, match=r"--model: must hold weights.*python -m trainer.export .*run"):
        run(["--model", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--samples", "4"], ["--eval-temperature", "above 0 with --samples 4"]),
        (["--samples", "4", "--eval-temperature", "1", "--ks", "8"], ["--ks", "1 to --samples 4", "8"]),
        (["--tools", "maybe"], ["--tools", "both", "maybe"]),
        (["--tag", "levle", "--size", "2"], ["--tag", "levle", "did you mean 'level'"]),
        (["--model", "no/such/model"], ["--model", "no/such/model"]),
        (["--size", "0"], ["--size", "0"]),
        (["--data", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--device", "abacus"], ["--device", "abacus"]),
        (["--max-prompt-tokens", "5", "--size", "2"], ["max_prompt_tokens", "5", "shortest prompt"]),
        (["--engine-url", "http://127.0.0.1:9"], ["--engine-url", "http://127.0.0.1:9"]),
        (["--lr", "1"], ["--lr"]),
    ],
)
def test_bad_flags_are_one_line_and_leave_nothing(
    argv: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(lambda: run([*argv, "--out", str(tmp_path / "out")])) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "out").exists()


def test_a_broken_image_is_found_before_anything_is_played(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64), "white").save(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    row = {"problem": "<image>Find x.", "answer": "5"}
    written = [{**row, "images": ["a.png"]}, {**row, "images": ["cut.png"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in written))
    with pytest.raises(UserError, match=r"rows.jsonl row 1 .*cut.png"):
        run(["--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_rows_of_ones_own_are_evaluated_and_long_prompts_left_out_counted_and_said(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows(tmp_path / "rows.jsonl", "Say 0.", "Say 1. " * 300, "Say 2.", "Say 3.")
    argv = ["--model", str(checkpoint), "--data", data, "--tag", "kind", *QUICK]
    report = evaluate(tmp_path / "all", *argv)
    assert (report["num_problems"], report["num_overlong"]) == (3, 1)
    assert "left out 1 of 4 problems whose prompt is over 1024 tokens" in capsys.readouterr().out
    kinds = report["ways"]["with_tool"]["by_tag"]["kind"]
    assert {kind: found["num_problems"] for kind, found in kinds.items()} == {"even": 2, "odd": 1}
    assert {r["sample_id"] for r in lines_of(tmp_path / "all" / "results.jsonl")} == {"rows-0", "rows-2", "rows-3"}
    assert evaluate(tmp_path / "first", *argv, "--size", "1")["num_problems"] == 1


def test_one_way_can_be_asked_for_and_an_environment_without_tools_has_one(checkpoint: Path, tmp_path: Path) -> None:
    common = ["--model", str(checkpoint), "--size", "2", *QUICK]
    for tools, expected in (("on", ["with_tool"]), ("off", ["without_tool"])):
        report = evaluate(tmp_path / tools, "--tools", tools, *common)
        assert list(report["ways"]) == expected and report["difference"] is None
    for tools in ("both", "off"):
        report = evaluate(tmp_path / f"guess-{tools}", "--env", "guess", "--tools", tools, *common)
        assert list(report["ways"]) == ["no_tools"]


def test_an_environment_that_breaks_is_reported_and_stops_nothing(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile_rows.py").write_text(
        "from envs.env import Env\n"
        "class Fragile(Env):\n"
        "    def __init__(self, label): self.label = label\n"
        "    def reset(self): return {}, {}\n"
        "    def step(self, text):\n"
        "        if self.label == '2': raise RuntimeError('no such file')\n"
        "        return {}, True, {}\n"
        "    def reward(self, text): return float('nan') if self.label == '1' else 1.0\n"
        "def build_env(sample=None, args=None, **_): return Fragile(sample.label)\n"
    )
    registry = tmp_path / "registry.yaml"
    registry.write_text("fragile:\n  entry_point: fragile_rows\n  description: Breaks.\n  max_turns: 1\n")
    data = rows(tmp_path / "rows.jsonl", "Say 0.", "Say 1.", "Say 2.", "Say 3.")
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = ["--env", "fragile", "--registry", str(registry), "--data", data, "--model", str(checkpoint)]
    report = evaluate(tmp_path / "run", *argv, "--max-new-tokens", "400")
    found, shown = report["ways"]["no_tools"], capsys.readouterr().out
    assert report["partial"] == "" and report["num_problems"] == 4
    # A turn that its budget cuts off never reaches `step`.
    num_raised = sum("no such file" in (e["error"] or "") for e in episodes_in(tmp_path / "run", "evaluate"))
    assert (found["num_broken"], found["accuracy"]["value"]) == (1 + num_raised, 0.75 - 0.25 * num_raised)
    assert "env_error in rows-1" in shown and f"{found['num_broken']} of 4" in shown


def test_an_evaluation_in_which_nothing_can_be_scored_ends_with_code_1_and_the_cause(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.py").write_text("def later(t):\n    return 1.0 / (t.seed == 0)\n")
    data = rows(tmp_path / "rows.jsonl", "Say 0.", "Say 1.")
    argv = ["--data", data, "--model", str(checkpoint), "--reward", f"{tmp_path / 'my.py'}:later", *QUICK]
    assert run(["--out", str(tmp_path), "--name", "run", *argv]) == 1
    told = "error: no episode could be scored: the reward function later failed: ZeroDivisionError"
    assert told in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["partial"] == ""


def test_ctrl_c_reports_what_is_done_as_partial(checkpoint: Path, tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", *(f"Say {n}." for n in range(200)))
    sampling = ["--samples", "50", "--eval-temperature", "1", *QUICK]
    folder = tmp_path / "stopped"
    argv = ["--model", str(checkpoint), "--data", data, "--out", str(tmp_path), "--name", "stopped", *sampling]
    recorded = folder / "episodes" / "episodes.jsonl.gz"
    deadline = time.monotonic() + 60
    with Command("trainer.evaluate", *argv) as process:
        while sum(1 for _ in read_gzip_lines(recorded)) < 200 and time.monotonic() < deadline:
            assert process.poll() is None, process.output("stderr")
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        code, out, err = process.wait(60), process.output("stdout"), process.output("stderr")
    assert code == 130, (out, err)
    assert "Traceback" not in err and "partial: interrupted" in out
    report = json.loads((folder / "evaluation.json").read_text())
    assert report["partial"] == "interrupted" and report["num_problems"] == 200
    done = report["ways"]["with_tool"]["num_problems"]
    results = lines_of(folder / "results.jsonl")
    assert 0 < done < 200 and len(results) == done and all(len(r["rewards"]) == 50 for r in results)


def test_an_engine_that_fails_leaves_a_partial_report(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agents.engines.hf import HFEngine

    write, calls = HFEngine.write, []

    def failing(self: HFEngine, turns: Any) -> None:
        calls.append(len(turns))
        if len(calls) == 3:
            raise ConnectionError("the network is gone")
        write(self, turns)

    monkeypatch.setattr(HFEngine, "write", failing)
    argv = ["--model", str(checkpoint), "--size", "4", "--max-batch", "2", "--tools", "off", *QUICK, "--samples", "2"]
    with pytest.raises(ConnectionError, match="the network is gone"):
        run([*argv, "--eval-temperature", "1", "--out", str(tmp_path), "--name", "run"])
    report = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert report["partial"] == "ConnectionError: the network is gone"
    assert report["ways"]["without_tool"]["num_problems"] == 2


@pytest.fixture
def server(checkpoint: Path) -> Iterator[str]:
    """The address of a server that speaks SGLang's protocol."""
    with serving(checkpoint) as url:
        yield url


@pytest.mark.slow
def test_servers_are_given_the_model_and_write_as_the_embedded_engine_does(
    checkpoint: Path, server: str, tmp_path: Path
) -> None:
    argv = ["--model", str(checkpoint), "--size", "3", *QUICK]
    here, there = evaluate(tmp_path / "here", *argv), evaluate(tmp_path / "there", *argv, "--engine-url", server)
    assert here["ways"] == there["ways"]
    with urllib.request.urlopen(f"{server}/updates", timeout=5) as answer:
        assert json.load(answer) == ["0"]
    episodes = episodes_in(tmp_path / "there", "evaluate")
    assert {run[0] for e in episodes for turn in e["turns"] for run in turn["versions"]} == {0}


def test_settings_may_come_from_a_file_and_from_variables(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"model:\n  model: {checkpoint}\ndata:\n  size: 2\nmeasurement:\n  tools: 'on'\n"
    )
    monkeypatch.setenv("TRUETURN_MAX_NEW_TOKENS", "24")
    monkeypatch.setenv("TRUETURN_LR", "0.1")  # of another command
    report = evaluate(tmp_path / "run", "--config", str(tmp_path / "mine.yaml"))
    assert (report["num_problems"], list(report["ways"])) == (2, ["with_tool"])
    assert report["config"]["env"]["max_new_tokens"] == 24


def test_the_ready_configuration_samples_eight_times(checkpoint: Path, tmp_path: Path) -> None:
    report = evaluate(tmp_path / "run", "--config", "pass-at-8", "--model", str(checkpoint), "--size", "2", *QUICK)
    assert (report["num_samples"], report["temperature"]) == (8, 0.8)
    assert set(report["ways"]["with_tool"]["pass_at"]) == {"1", "2", "4", "8"}


def test_the_ks_of_pass_at_k_double_up_to_the_samples() -> None:
    assert MeasurementConfig().all_ks == (1,)
    assert MeasurementConfig(samples=4, eval_temperature=1).all_ks == (1, 2, 4)
    assert MeasurementConfig(samples=6, eval_temperature=1).all_ks == (1, 2, 4, 6)
    assert MeasurementConfig(samples=6, eval_temperature=1, ks=(5, 1, 5)).all_ks == (1, 5)
    assert EvaluateConfig().measurement.eval_temperature == 0


def test_every_flag_of_the_page_is_one_of_its_command() -> None:
    page, training = (DOCS / "evaluation.md").read_text(encoding="utf-8").split("## While a run trains")
    for text, configs, least in ((page, (EvaluateConfig,), 15), (training, (EvaluateConfig, RunConfig), 7)):
        named = set(re.findall(r"--[a-z][a-z0-9-]+", text))
        known = {f"--{path[-1].replace('_', '-')}" for config in configs for path, _ in leaves(config)}
        assert len(named) > least and named <= known | {"--config", "--print-config"}, named - known


def test_the_page_shows_every_line_of_a_report_but_its_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    argv, shown = session((DOCS / "evaluation.md").read_text(encoding="utf-8"), "geo3k, 256 problems")
    evaluate(tmp_path / "run", *argv[1:], "--size", "8")
    page, printed = (text.split("How episodes ended")[0] for text in (shown, capsys.readouterr().out))
    assert is_shown(page, printed), printed
