"""Claims about callbacks: what they are told, what they may add and end, and what they cannot break."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from envs.config.plugins import give
from envs.errors import UserError
from tests.recordings import lines_of
from tests.trainer.test_run import SMALL, train
from trainer.callbacks import Callback, Callbacks, RunStart, Stop, check_callbacks
from trainer.checkpoint.checkpointer import found_steps
from trainer.run import run
from trainer.sft.__main__ import run as fine_tune

MODULE = "from trainer.callbacks import Callback, Stop\n"


def written(folder: Path, *lines: str, name: str = "Mine") -> str:
    """Write a class of callbacks into a file; return its reference."""
    path = folder / "mine.py"
    path.write_text(MODULE + f"class {name}(Callback):\n" + "".join(f"    {line}\n" for line in lines))
    return f"{path}:{name}"


class Notes(Callback):
    """Notes all that it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def on_begin(self, run: RunStart) -> None:
        self.told.append(("begin", (run.folder.name, run.step, run.num_steps, run.settings["seed"])))

    def on_step_end(self, step: int, row: Any) -> dict[str, float]:
        self.told.append(("step", (step, row["step"], row["reward"])))
        row["reward"] = 9.0  # a copy
        return {"own/double": 2.0 * step}

    def on_evaluation(self, step: int, metrics: Any) -> None:
        self.told.append(("evaluation", (step, metrics["eval/with_tool/accuracy"])))

    def on_end(self, summary: Any) -> None:
        self.told.append(("end", summary["steps_done"]))


def test_a_callback_is_told_of_every_stage_in_order_and_adds_metrics(checkpoint: Path, tmp_path: Path) -> None:
    notes, folder = Notes(), tmp_path / "run"
    summary = train(checkpoint, folder, "--callback", give(notes), "--eval-every", "1")
    rows = lines_of(folder / "metrics.jsonl")
    accuracy = {point["step"]: point["accuracy"]["with_tool"] for point in summary["evaluations"]}
    assert notes.told == [
        ("begin", ("run", 0, 2, 0)),
        ("evaluation", (0, accuracy[0])),
        ("step", (1, 1, rows[0]["reward"])),
        ("evaluation", (1, accuracy[1])),
        ("step", (2, 2, rows[1]["reward"])),
        ("evaluation", (2, accuracy[2])),
        ("end", 2),
    ]
    assert [row["own/double"] for row in rows] == [2.0, 4.0] and rows[0]["reward"] <= 1


def test_a_callback_of_a_file_ends_a_run_which_can_be_resumed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = written(tmp_path, "def on_step_end(self, step, row): return Stop('enough') if step == 2 else None")
    summary = train(checkpoint, tmp_path / "run", "--callback", own, steps=4, eval_size=0)
    assert summary["stop_reason"] == "Mine: enough" and summary["steps_done"] == 2 and not summary["interrupted"]
    assert "stopped after step 2: Mine: enough\n" in capsys.readouterr().out
    assert [found.step for found in found_steps(tmp_path / "run" / "checkpoints")] == [2]
    assert "The run stopped after step 2 of 4: Mine: enough." in (tmp_path / "run" / "model" / "README.md").read_text()
    assert run(["--resume", str(tmp_path / "run")]) == 0  # it asks at step 2 alone
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps_done"] == 4


class Raises(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_evaluation(self, step: int, metrics: Any) -> None:
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), GeneratorExit(), StopIteration()])
def test_a_callback_cannot_end_the_program_without_being_named(error: BaseException) -> None:
    callbacks = Callbacks([give(Raises(error))])
    with pytest.raises(UserError, match=rf"on_evaluation must not raise, got {type(error).__name__}"):
        callbacks.on_evaluation(1, {})


@pytest.mark.parametrize("method", ["on_step_end(self, step, row)", "on_evaluation(self, step, metrics)"])
def test_a_callback_that_raises_is_named_and_everything_is_saved(checkpoint: Path, tmp_path: Path, method: str) -> None:
    own = written(tmp_path, f"def {method}:", "    if step == 2: raise KeyError('lr')")
    argv = ["--model", str(checkpoint), "--steps", "4", "--eval-size", "3", *SMALL, "--tracker=", "--eval-every", "2"]
    argv += ["--out", str(tmp_path), "--name", "run"]
    name = method.partition("(")[0]
    with pytest.raises(UserError, match=rf"--callback: '.*mine.py:Mine'.{name} must not raise, got KeyError: 'lr'"):
        run([*argv, "--callback", own])
    folder = tmp_path / "run"
    assert [row["step"] for row in lines_of(folder / "metrics.jsonl")] == [1, 2]
    assert [found.step for found in found_steps(folder / "checkpoints")] == [2]
    assert (folder / "summary.json").exists() and (folder / "model" / "model.safetensors").exists()
    assert run(["--resume", str(folder), "--callback="]) == 0
    assert [row["step"] for row in lines_of(folder / "metrics.jsonl")] == [1, 2, 3, 4]


def test_supervised_training_calls_them_too(checkpoint: Path, tmp_path: Path) -> None:
    own = written(
        tmp_path,
        "def on_evaluation(self, step, metrics): self.loss = metrics['eval_loss']",
        "def on_step_end(self, step, row): return Stop('low') if step == 3 else {'last': self.loss}",
    )
    argv = ["--env", "geo3k", "--train-size", "8", "--eval-size", "4", "--batch-size", "2", "--eval-every", "1"]
    argv += ["--model", str(checkpoint), "--tracker=", "--out", str(tmp_path), "--name", "run", "--callback", own]
    assert fine_tune(argv) == 0
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[1]["last"] == rows[0]["eval_loss"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stop_reason"] == "Mine: low"
    assert "The run stopped after step 3 of 4: Mine: low." in (tmp_path / "run" / "model" / "README.md").read_text()


class Silent(Callback):
    """Does nothing."""


class Async(Callback):
    async def on_end(self, *args: object) -> None:  # type: ignore[override]
        """Nothing would await it."""


class Misspelt(Callback):
    """Has a method that nothing calls."""

    def on_step(self, step: int) -> None: ...


class Adds(Callback):
    """Adds what it is given."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def on_step_end(self, step: int, row: Any) -> Any:
        return self.result


def made(number: int) -> Callback:
    return Silent()


@pytest.mark.parametrize("found", [Silent, Silent(), lambda: Silent()], ids=["class", "object", "function"])
def test_a_callback_is_a_class_an_object_or_what_a_function_returns(found: object) -> None:
    check_callbacks([give(found)])
    assert Callbacks([give(found)]).on_step_end(1, {}) == {}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (made, "must take no arguments"),
        (7, "must be callable, got int"),
        (dict, "must give a Callback, got dict; derive its class from trainer.callbacks.Callback"),
        (Async, "on_end' must not be async, got test_callbacks.py:"),
        (Misspelt, "has a method that is never called, got on_step; did you mean 'on_step_end'"),
        (lambda: 1 / 0, "must not raise, got ZeroDivisionError"),
    ],
    ids=["arguments", "number", "other", "async", "misspelt", "raises"],
)
def test_what_is_no_callback_is_refused(found: object, said: str) -> None:
    with pytest.raises(UserError, match=f"--callback: .*{said}"):
        Callbacks([give(found)])


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"reward": 1.0}, "must return numbers by names that the row does not have, got reward: 1.0"),
        ({"own": "high"}, "must return numbers by names that the row does not have, got own: 'high'"),
        (True, r"must return Stop\(reason\) or None, got True"),
    ],
)
def test_what_a_callback_returns_is_checked(result: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Callbacks([give(Adds(result))]).on_step_end(1, {"reward": 0.5})


def test_the_first_of_several_callbacks_says_why_a_run_stops_and_all_are_called() -> None:
    callbacks = Callbacks([give(Adds(result)) for result in (Stop("one"), {"own": 1}, Stop("two"))])
    assert callbacks.on_step_end(1, {}) == {"own": 1.0} and callbacks.stop_reason == "Adds: one"


def test_a_callback_that_takes_long_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Callback):
        def on_end(self, summary: Any) -> None:
            deadline = time.monotonic() + 20
            while not caplog.messages and time.monotonic() < deadline:
                time.sleep(0.01)

    monkeypatch.setattr("trainer.callbacks.SLOW_S", 0.05)
    with caplog.at_level(logging.WARNING):
        Callbacks([give(Slow)]).on_end({})
    assert caplog.messages == ["the run waits for --callback 'envs.config.given:Slow'.on_end, since 0.05 s"]
