"""Claims about evaluations between the steps: they change nothing, survive every end, and can end the run."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from envs.errors import UserError
from tests.environments import lucky_geometry
from tests.flags import last_of_each
from tests.processes import Command
from tests.recordings import lines_of
from tests.trainer.runs import PATIENT, drawing, episodes_of, metrics_of, state_of
from tests.trainer.test_run import SMALL, train
from trainer.evaluate import run as evaluate
from trainer.evaluation.best_model import RECORD
from trainer.run import run

STEPS = 4
#: No limit of the clock on which episodes share a batch: what is compared below is compared bit for bit.
FLAGS = ["--lr", "1e-3", "--config", PATIENT, "--save-every", "3"]
EVERY = ["--eval-every", "2"]
WAYS = {"with_tool", "without_tool"}
#: Sends this process a signal in the second reward after `metrics.jsonl` has reached a state.
INTERRUPTED = """
import os, random
from pathlib import Path
seen = []
def reward():
    random.random()
    if "SIGNAL_AT" in os.environ:
        signal, num_rows, is_evaluated, path = os.environ["SIGNAL_AT"].split(",")
        text = Path(path).read_text() if Path(path).exists() else ""
        if text.count(chr(10)) == int(num_rows) and ("eval/" in text) == (is_evaluated == "True"):
            seen.append(text)
            if len(seen) == 2:
                os.kill(os.getpid(), int(signal))
"""
#: States of `metrics.jsonl`: the number of its rows, and whether the last one has its evaluation.
IN_STEP_2, IN_EVALUATION, IN_STEP_3 = (1, False), (2, False), (2, True)


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags of a run whose steps teach something; its environment draws from the process's random generator, too.

    With SIGNAL_AT, it interrupts the run.
    """
    statements = ["import interrupted", "interrupted.reward()", "return float(len(text) % 3)"]
    folder = tmp_path_factory.mktemp("lucky")
    (folder / "interrupted.py").write_text(INTERRUPTED)
    with lucky_geometry(folder, "lucky_evaluated", *statements) as flags:
        yield [*flags, *FLAGS]


@pytest.fixture(scope="module")
def plain(checkpoint: Path, lucky: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    train(checkpoint, folder, *lucky, steps=STEPS)
    return folder


@pytest.fixture(scope="module")
def evaluated(checkpoint: Path, lucky: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "evaluated"
    with drawing():
        train(checkpoint, folder, *lucky, *EVERY, steps=STEPS)
    return folder


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def of_phase(folder: Path, phase: str) -> list[str]:
    return [each for each in episodes_of(folder) if json.loads(each.partition("\n")[0])["phase"] == phase]


def assert_same_training(folder: Path, other: Path) -> None:
    ours, theirs = state_of(folder, STEPS), state_of(other, STEPS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert of_phase(folder, "train") == of_phase(other, "train")
    generators = [path / "checkpoints" / f"step-{STEPS}" / "random.pickle" for path in (folder, other)]
    assert len({pickle.loads(path.read_bytes())["python"] for path in generators}) == 1


def test_a_run_with_evaluations_trains_to_the_same_weights_on_the_same_episodes(plain: Path, evaluated: Path) -> None:
    assert all(row["grad_norm"] > 0 for row in metrics_of(plain))
    assert_same_training(evaluated, plain)
    without = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics_of(evaluated)]
    assert without == metrics_of(plain)
    assert summary_of(evaluated)["accuracy_before"] == summary_of(plain)["accuracy_before"]
    assert summary_of(evaluated)["accuracy_after"] == summary_of(plain)["accuracy_after"]


def test_the_curve_is_in_metrics_recording_and_summary(evaluated: Path) -> None:
    rows, summary = metrics_of(evaluated), summary_of(evaluated)
    assert [step for step, row in enumerate(rows, 1) if "eval/with_tool/accuracy" in row] == [2, 4]
    assert [point["step"] for point in summary["evaluations"]] == [0, 2, 4]
    for point in summary["evaluations"][1:]:
        row = rows[point["step"] - 1]
        for way in WAYS:
            bounds = [row[f"eval/{way}/accuracy_{end}"] for end in ("low", "high")]
            assert row[f"eval/{way}/accuracy"] == point["accuracy"][way] and bounds == point["interval"][way]
            assert bounds[0] <= point["accuracy"][way] <= bounds[1]
    assert summary["evaluations"][-1]["accuracy"] == summary["accuracy_after"]
    episodes = lines_of(evaluated / "episodes" / "episodes.jsonl.gz")
    played = Counter((episode["phase"], episode["way"], episode["step"]) for episode in episodes)
    del (
        played["train", "train", 1],
        played["train", "train", 2],
        played["train", "train", 3],
        played["train", "train", 4],
    )
    assert played == {
        (phase, way, step): 3 for phase, step in (("before", 0), ("eval-2", 2), ("eval-4", 4)) for way in WAYS
    }
    assert len({episode["id"] for episode in episodes}) == len(episodes)
    right = sum(e["reward"] >= 1 for e in episodes if (e["phase"], e["way"]) == ("eval-2", "with_tool"))
    assert right / 3 == rows[1]["eval/with_tool/accuracy"]
    assert (evaluated / "reward_curve.png").stat().st_size > 1000


def assert_same_run(folder: Path, other: Path) -> None:
    assert_same_training(folder, other)
    assert metrics_of(folder) == metrics_of(other)
    assert episodes_of(folder) == episodes_of(other)
    ours, theirs = summary_of(folder), summary_of(other)
    for name in ("steps_done", "evaluations", "best", "accuracy_after", "evaluation_before", "evaluation_after"):
        assert ours[name] == theirs[name], name
    assert load_file(folder / "best" / "model.safetensors").keys() > set()
    for name in ("best", "model"):
        one, two = (load_file(path / name / "model.safetensors") for path in (folder, other))
        assert all(torch.equal(one[each], two[each]) for each in two)


def signal_at(state: tuple[int, bool], sent: signal.Signals, folder: Path) -> dict[str, str]:
    """Return the variables of a run that sends itself a signal."""
    return {"SIGNAL_AT": ",".join(map(str, [int(sent), *state, folder / "metrics.jsonl"]))}


@pytest.mark.parametrize("state", [IN_EVALUATION, pytest.param(IN_STEP_2, marks=pytest.mark.slow)])
def test_a_run_that_is_asked_to_stop_before_or_in_an_evaluation_makes_it_when_it_is_resumed(
    checkpoint: Path, lucky: list[str], evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    folder = tmp_path / "run"
    argv = ["--model", str(checkpoint), "--steps", str(STEPS), "--eval-size", "3", *SMALL, *lucky, *EVERY, "--tracker="]
    with monkeypatch.context() as patched:
        patched.setitem(os.environ, *signal_at(state, signal.SIGTERM, folder).popitem())
        patched.delitem(sys.modules, "interrupted", raising=False)  # counts anew
        assert run(last_of_each([*argv, "--out", str(tmp_path), "--name", "run"])) == 130
    rows = metrics_of(folder)
    assert len(rows) == summary_of(folder)["steps_done"] == state[0]
    assert not any(name.startswith("eval/") for row in rows for name in row)
    assert run(["--resume", str(folder)]) == 0
    assert_same_run(folder, evaluated)
    if state == IN_EVALUATION:  # the step itself was kept
        (abandoned,) = (folder / "episodes" / "abandoned").glob("episodes.jsonl-*.gz")
        assert {episode["phase"] for episode in lines_of(abandoned)} == {"eval-2"}


@pytest.mark.slow
@pytest.mark.parametrize("state", [IN_STEP_2, IN_EVALUATION, IN_STEP_3])
def test_a_run_killed_before_in_or_after_an_evaluation_goes_on_bit_for_bit(
    checkpoint: Path, lucky: list[str], evaluated: Path, tmp_path: Path, state: Any
) -> None:
    folder = tmp_path / "run"
    argv = ["--model", str(checkpoint), "--steps", str(STEPS), "--eval-size", "3", *SMALL, *lucky, *EVERY]
    argv += ["--save-every", "1", "--out", str(tmp_path), "--name", "run"]
    with Command("trainer.run", *last_of_each(argv), env=signal_at(state, signal.SIGKILL, folder)) as process:
        assert process.wait(120) == -signal.SIGKILL, process.output("stderr")
    assert not (folder / "summary.json").exists()
    assert run(["--resume", str(folder)]) == 0
    assert_same_run(folder, evaluated)


@pytest.mark.slow
def test_a_finished_run_goes_on_with_its_curve(
    checkpoint: Path, lucky: list[str], evaluated: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(checkpoint, folder, *lucky, *EVERY, steps=2)
    assert run(["--resume", str(folder), "--steps", str(STEPS)]) == 0
    assert_same_run(folder, evaluated)


def test_the_best_model_is_the_earliest_with_the_highest_accuracy_and_can_be_evaluated(
    evaluated: Path, lucky: list[str], tmp_path: Path
) -> None:
    summary = summary_of(evaluated)
    by_step = {point["step"]: point["accuracy"]["with_tool"] for point in summary["evaluations"]}
    step = min(step for step, accuracy in by_step.items() if accuracy == max(by_step.values()))
    assert summary["best"] == {"step": step, "way": "with_tool", "accuracy": by_step[step]}
    assert json.loads((evaluated / "best" / RECORD).read_text()) == summary["best"]
    argv = ["--model", str(evaluated / "best"), *lucky[:4], "--size", "3", "--tools", "on", "--max-new-tokens", "24"]
    assert evaluate([*argv, "--out", str(tmp_path), "--name", "evaluation", "--problem-seed", "0"]) == 0
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert found["ways"]["with_tool"]["num_problems"] == 3


def test_the_models_have_a_card_that_says_what_was_done_and_not_where(evaluated: Path, checkpoint: Path) -> None:
    summary = summary_of(evaluated)
    for name, step in (("model", STEPS), ("best", summary["best"]["step"])):
        card = (evaluated / name / "README.md").read_text()
        front = yaml.safe_load(card.split("---")[1])
        assert front["pipeline_tag"] == "image-text-to-text" and "base_model" not in front  # it is a folder here
        assert f"{checkpoint.name} after {step} steps of reinforcement learning in the environment" in card
        assert f"The run took all {STEPS} steps." in card
        assert f"| before | after step {step} | problems |" in card
        assert f"torch {torch.__version__.partition('+')[0]}" in card
        assert (evaluated / name / "reward_curve.png").is_file() and "](reward_curve.png)" in card
    for file in [*(evaluated / "model").glob("*"), *(evaluated / "best").glob("*")]:
        if file.suffix in (".md", ".json", ".jinja") and "tokenizer" not in file.name:
            text = file.read_text()
            places = [str(evaluated.parent), str(checkpoint.parent), str(Path.home()), str(Path.cwd())]
            assert not any(place in text for place in [*places, socket.gethostname(), "registry.yaml"]), file


def test_evaluations_go_on_while_episodes_of_the_next_step_are_in_flight(
    checkpoint: Path, lucky: list[str], tmp_path: Path
) -> None:
    ahead = ["--max-staleness", "2", "--eval-every", "1"]
    summary = train(checkpoint, tmp_path / "run", *lucky, *ahead, steps=3)
    assert [point["step"] for point in summary["evaluations"]] == [0, 1, 2, 3]


def test_a_run_stops_after_evaluations_without_a_new_best(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    summary = train(checkpoint, folder, "--eval-every", "1", "--patience", "2", steps=9)  # it is never right
    reason = "--patience 2 evaluations without a held-out accuracy above the 0.000 of step 0"
    assert summary["steps_done"] == 2 and summary["stop_reason"] == reason
    assert summary["best"]["step"] == 0 and not summary["interrupted"]
    assert f"stopped after step 2: {reason}\n" in capsys.readouterr().out
    episodes, resumed = len(episodes_of(folder)), ["--resume", str(folder)]
    assert run(resumed) == 0
    assert summary_of(folder)["steps_done"] == 2 and len(episodes_of(folder)) == episodes
    assert run([*resumed, "--patience", "3"]) == 0
    assert summary_of(folder)["steps_done"] == 3 and len(summary_of(folder)["evaluations"]) == 4


def test_a_run_stops_at_an_accuracy(checkpoint: Path, lucky: list[str], tmp_path: Path) -> None:
    summary = train(checkpoint, tmp_path / "run", *lucky, "--eval-every", "1", "--stop-at-accuracy", "0.3", steps=3)
    reached = [point["step"] for point in summary["evaluations"] if point["accuracy"]["with_tool"] >= 0.3]
    assert reached == [summary["steps_done"]] and "has reached --stop-at-accuracy 0.3" in summary["stop_reason"]


def test_a_run_without_a_success_goes_by_the_mean_reward(
    checkpoint: Path, lucky: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = [*lucky, "--success", "none", "--eval-every", "1", "--tools", "on"]
    with pytest.raises(
        UserError, match=r"--stop-at-accuracy: needs an environment that says what a success is.*--success"
    ):
        run(["--model", str(checkpoint), *none, "--stop-at-accuracy", "0.5"])
    summary = train(checkpoint, tmp_path / "run", *none)
    assert summary["accuracy_after"] == {} and set(summary["mean_reward_after"]) == {"with_tool"}
    reached = {point["step"]: point["mean_reward"]["with_tool"] for point in summary["evaluations"]}
    highest = max(reached.values())
    step = min(step for step, reward in reached.items() if reward == highest)
    assert summary["best"] == {"step": step, "way": "with_tool", "mean_reward": highest}
    assert "Held-out mean reward, 3 problems" in capsys.readouterr().out
    assert "| with tool |" in (tmp_path / "run" / "model" / "README.md").read_text()


def test_the_best_model_can_be_chosen_by_the_reward_where_there_is_a_success(
    checkpoint: Path, lucky: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUETURN_BEST_BY", "reward")
    summary = train(checkpoint, tmp_path / "run", *lucky, "--eval-every", "1")
    reached = [point["mean_reward"]["with_tool"] for point in summary["evaluations"]]
    assert summary["best"]["mean_reward"] == max(reached) and summary["accuracy_after"].keys() == WAYS


@pytest.mark.parametrize(
    "argv", [["--eval-size", "0"], ["--rollout-only"], ["--data", "rows.jsonl"]], ids=["none", "rollout_only", "data"]
)
def test_evaluations_need_held_out_problems(
    checkpoint: Path, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(UserError, match="--eval-every: needs held-out problems"):
        run(["--model", str(checkpoint), "--eval-every", "1", *argv])


@pytest.mark.parametrize("argv", [["--patience", "2"], ["--stop-at-accuracy", "0.5"]], ids=" ".join)
def test_an_early_stop_needs_evaluations(argv: list[str]) -> None:
    with pytest.raises(UserError, match=f"{argv[0]}: needs --eval-every"):
        run(argv)
