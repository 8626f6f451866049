"""Claims about going on with a run: after SIGKILL, a full disk or a damaged checkpoint, as if it had never stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agents.recording.gzip_lines import read_gzip_lines
from envs.errors import UserError
from tests.environments import lucky_geometry
from tests.flags import last_of_each
from tests.processes import Command, run_command
from tests.recordings import episodes_in, lines_of
from tests.trainer.checkpoint.test_checkpointer import largest_file
from tests.trainer.runs import PATIENT, assert_equal_runs, episodes_of, metrics_of, num_lines, num_members, state_of
from tests.trainer.test_run import SMALL, train
from trainer.checkpoint.checkpointer import found_steps
from trainer.checkpoint.model_card import CARD
from trainer.checkpoint.run_dir import locked
from trainer.export import run as export
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.run import run

#: No limit of the clock on which episodes share a batch: what is compared below is compared bit for bit.
STEPS, OFTEN = 5, ["--save-every", "2", "--config", PATIENT]


@pytest.fixture(scope="module")
def often(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags of a run whose steps teach something, with checkpoints."""
    with lucky_geometry(tmp_path_factory.mktemp("lucky"), "lucky_geometry", "return float(len(text) % 3)") as flags:
        yield [*flags, "--lr", "1e-3", *OFTEN]


@pytest.fixture(scope="module")
def unbroken(checkpoint: Path, often: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    train(checkpoint, folder, *often, steps=STEPS)
    return folder


def test_the_run_that_is_compared_with_learns(unbroken: Path) -> None:
    assert all(row["grad_norm"] > 0 for row in metrics_of(unbroken))


def go_on(folder: Path, *argv: str) -> dict[str, Any]:
    """Resume a run in this process; return its summary."""
    assert run(["--resume", str(folder), *argv]) == 0
    return json.loads((folder / "summary.json").read_text())


def assert_same_run(folder: Path, other: Path) -> None:
    assert_equal_runs(
        folder, other, STEPS, "steps_done", "accuracy_before", "accuracy_after", "end_reasons", "evaluation_before"
    )


def kill_after(checkpoint: Path, often: list[str], folder: Path, step: int) -> None:
    """Start a run in a process of its own and kill it once a step is logged."""
    argv = ["--model", str(checkpoint), "--steps", str(STEPS), "--eval-size", "3", *SMALL, *often]
    deadline = time.monotonic() + 120
    with Command("trainer.run", *last_of_each(argv), "--out", str(folder.parent), "--name", folder.name) as process:
        while num_lines(folder / "metrics.jsonl") < step:
            assert process.poll() is None and time.monotonic() < deadline, process.output("stderr")
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_for_bit(
    checkpoint: Path, often: list[str], unbroken: Path, tmp_path: Path, step: int
) -> None:
    folder = tmp_path / "killed"
    kill_after(checkpoint, often, folder, step)
    assert not (folder / "summary.json").exists()
    go_on(folder)
    assert_same_run(folder, unbroken)
    (abandoned,) = (folder / "episodes" / "abandoned").glob("episodes.jsonl-*.gz")
    assert num_members(abandoned) >= 4  # those of the step that was taken again


def test_a_killed_asynchronous_run_trains_on_every_group_once_and_loses_none(
    checkpoint: Path, often: list[str], tmp_path: Path
) -> None:
    """The checkpoint is written while episodes of later steps run; what had ended of them is kept."""
    folder = tmp_path / "killed"
    kill_after(checkpoint, [*often, "--save-every", "1", "--max-staleness", "2"], folder, 3)
    summary, episodes = go_on(folder), episodes_in(folder)
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, STEPS + 1))
    assert all(row["staleness/max"] <= 2 and row["groups_trained"] == 2 for row in metrics_of(folder))
    trained = [e for e in episodes if e["fate"] == "train"]
    assert sorted({(e["step"], e["group"]) for e in trained}) == [(1 + n // 2, n) for n in range(2 * STEPS)]
    copies = Counter((e["group"], e["attempt"], e["sample_index"]) for e in episodes)
    assert set(copies.values()) == {1} and sum(summary["end_reasons"].values()) == len(episodes)


@pytest.mark.slow
def test_a_finished_run_goes_on_when_more_steps_are_asked_for(
    checkpoint: Path, often: list[str], unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(checkpoint, folder, *often, steps=3)
    capsys.readouterr()
    summary = go_on(folder, "--steps", str(STEPS))
    assert "resumes after step 3" in " ".join(capsys.readouterr().out.split())
    assert summary["steps_done"] == STEPS
    assert_same_run(folder, unbroken)
    assert [checkpoint.step for checkpoint in found_steps(folder / "checkpoints")] == [5, 4]


@pytest.mark.slow
def test_a_flipped_byte_in_the_recording_is_said_and_sets_nothing_aside(
    checkpoint: Path, often: list[str], unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(checkpoint, folder, *often, steps=3)
    path = folder / "episodes" / "episodes.jsonl.gz"
    num_before = sum(episode["phase"] != "after" for episode in lines_of(path))  # that evaluation is made again
    whole, (start, *_) = path.read_bytes(), [end for end, _ in read_gzip_lines(path)]
    path.write_bytes(whole[: start + 99] + bytes([whole[start + 99] ^ 4]) + whole[start + 100 :])
    capsys.readouterr()
    go_on(folder, "--steps", str(STEPS))
    said = " ".join(capsys.readouterr().out.split())
    assert f"episodes.jsonl.gz is damaged at 1 place; its {num_before - 1} whole lines are kept" in said
    assert len(episodes_of(folder)) == len(episodes_of(unbroken)) - 1
    assert metrics_of(folder) == metrics_of(unbroken)


@pytest.mark.parametrize("target", ["/proc/model", "/dev/null", "/dev/null/model"])
def test_an_export_to_a_place_that_cannot_be_written_is_an_error_in_one_line(unbroken: Path, target: str) -> None:
    with pytest.raises(UserError, match=f"--to: must be a folder that can be written, got {target}; .*[(]"):
        export([str(unbroken), "--to", target])


def test_an_export_onto_a_full_disk_is_an_error_in_one_line(unbroken: Path, tmp_path: Path) -> None:
    with largest_file(20_000), pytest.raises(UserError, match=r"--to: .*File too large"):
        export([str(unbroken), "--to", str(tmp_path / "model")])


@pytest.mark.slow
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_used(
    checkpoint: Path, often: list[str], unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(checkpoint, folder, *often, steps=4)
    shard = folder / "checkpoints" / "step-4" / "learner" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    capsys.readouterr()
    go_on(folder, "--steps", str(STEPS))
    said = " ".join(capsys.readouterr().out.split())
    assert "the checkpoint of step 4 is damaged and skipped: __0_0.distcp has" in said
    assert "resumes after step 2" in said
    assert_same_run(folder, unbroken)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = FSDPLearner.begin_checkpoint

    def on_a_full_disk(self: FSDPLearner, folder: Path) -> None:
        if self.steps_done != 2:
            return begin(self, folder)
        with largest_file(20_000):
            begin(self, folder)
            while not self._writer._saving.done():  # type: ignore[union-attr]
                time.sleep(0.01)
        return None

    monkeypatch.setattr(FSDPLearner, "begin_checkpoint", on_a_full_disk)
    summary = train(checkpoint, tmp_path / "run", "--save-every", "1", steps=3)
    said = " ".join(capsys.readouterr().out.split())
    assert "the checkpoint of step 2 could not be written, the newest is that of step 1" in said
    assert summary["steps_done"] == 3 and summary["checkpoints_failed"] == 1
    assert [found.step for found in found_steps(tmp_path / "run" / "checkpoints")] == [3, 1]


@pytest.mark.slow
def test_a_run_that_is_asked_twice_to_stop_in_an_update_finishes_it_first(
    checkpoint: Path, often: list[str], unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, step = tmp_path / "run", FSDPLearner.step

    def slow(self: FSDPLearner, minibatches: Any) -> Any:
        if self.steps_done == 2:
            for delay in (0.1, 0.3):
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(0.8)
        return step(self, minibatches)

    with monkeypatch.context() as patched:
        patched.setattr(FSDPLearner, "step", slow)
        argv = ["--model", str(checkpoint), "--steps", str(STEPS), "--eval-size", "3", *SMALL, *often]
        assert run(last_of_each([*argv, "--out", str(folder.parent), "--name", folder.name])) == 130
    assert [found.step for found in found_steps(folder / "checkpoints")] == [3, 2]
    assert int(state_of(folder, 3)["steps_done"]) == len(lines_of(folder / "metrics.jsonl")) == 3
    go_on(folder)
    assert_same_run(folder, unbroken)


@pytest.mark.slow
def test_what_was_recorded_stays_when_a_stretch_is_not(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(checkpoint, folder, *OFTEN, steps=1, eval_size=0)
    go_on(folder, "--steps", "2", "--record", "0")
    go_on(folder, "--steps", "3", "--record", "1")
    assert {episode["step"] for episode in episodes_in(folder)} == {1, 3}


@pytest.mark.slow
def test_a_run_that_was_started_with_relative_paths_goes_on_from_another_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    train(Path(checkpoint.name), tmp_path / "run", "--save-every", "1", steps=1, eval_size=0)
    monkeypatch.chdir(tmp_path)
    assert go_on(Path("run"), "--steps", "2")["steps_done"] == 2
    assert export(["run"]) == 0 and (tmp_path / "run" / "model-step-2" / "model.safetensors").exists()


def test_what_a_run_is_cannot_change_when_it_goes_on(unbroken: Path) -> None:
    with pytest.raises(UserError, match="--seed"):
        run(["--resume", str(unbroken), "--seed", "5"])
    with pytest.raises(UserError, match="--group-size"):
        run(["--resume", str(unbroken), "--group-size", "4"])
    with pytest.raises(UserError, match="--resume"):
        run(["--resume", str(unbroken.parent)])


def test_a_resume_warns_of_data_code_and_template_that_are_not_as_they_were(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"problem": "2+2?", "answer": "4"}\n' * 2)
    code = tmp_path / "asked.py"
    code.write_text("from envs import ToolEnv\nclass Asked(ToolEnv):\n    pass\n")
    registry = tmp_path / "asked.yaml"
    registry.write_text("asked: {entry_point: asked:Asked, description: d, max_turns: 2}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run_folder = tmp_path / "run"
    flags = ["--env", "asked", "--registry", str(registry), "--data", str(data), "--save-every", "1"]
    train(model, run_folder, *flags, steps=1)
    go_on(run_folder, "--steps", "2")
    assert "not as when" not in capsys.readouterr().out
    data.write_text('{"problem": "2+3?", "answer": "5"}\n' * 2)
    code.write_text(code.read_text() + "    flavour = 1\n")
    registry.write_text(registry.read_text().replace("max_turns: 2", "max_turns: 3"))
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# new #}")
    go_on(run_folder, "--steps", "3")
    said = re.findall(r"not as when the run began: (.*)", capsys.readouterr().out)
    assert said[0] == f"--data {data} has other content"
    assert said[1] == "the entry of 'asked' has other values: max_turns 3 (recorded: 2)"
    assert said[2].startswith("the code of 'asked' is not that of the recording")
    assert said[3].startswith("the chat template is not the recorded one")


def test_two_processes_never_write_one_run(unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.run_dir.WAIT_S", 0.0)
    with locked(unbroken), pytest.raises(UserError, match="another process"):
        run(["--resume", str(unbroken), "--steps", "9"])


def test_a_damaged_line_of_metrics_is_an_error_in_one_line(unbroken: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(unbroken, tmp_path / "copy"))
    text = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(text.replace(b'"', b"\xff", 1))
    with pytest.raises(UserError, match=r"metrics\.jsonl line 1: must be an object of numbers"):
        run(["--resume", str(folder)])


def test_a_process_that_an_environment_forked_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checkpoint.run_dir.WAIT_S", 0.0)
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    time.sleep(0.5)  # until the child runs
    with locked(tmp_path):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_run_without_a_checkpoint_begins_anew_and_keeps_what_it_had(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train(checkpoint, folder, "--save-every", "0", steps=1)
    first = lines_of(folder / "episodes" / "episodes.jsonl.gz")
    assert not list((folder / "checkpoints").iterdir())
    capsys.readouterr()
    go_on(folder)
    assert "starts over" in " ".join(capsys.readouterr().out.split())
    assert [row["step"] for row in lines_of(folder / "metrics.jsonl")] == [1]
    (abandoned,) = (folder / "episodes" / "abandoned").glob("episodes.jsonl-*.gz")
    assert lines_of(abandoned) == first


def test_a_checkpoint_is_exported_as_the_model_of_its_step(unbroken: Path, tmp_path: Path) -> None:
    assert export([str(unbroken), "--to", str(tmp_path / "model")]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", unbroken / "model"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    names = {path.name for path in (unbroken / "model").iterdir()} - {CARD}  # it is of a finished run
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    assert export([str(unbroken), "--step", "4", "--to", str(tmp_path / "earlier"), "--dtype", "float32"]) == 0
    earlier = load_file(tmp_path / "earlier" / "model.safetensors")
    assert any(not torch.equal(earlier[name].bfloat16(), theirs[name]) for name in theirs)
    with pytest.raises(UserError, match="there are: 5, 4"):
        export([str(unbroken), "--step", "3"])


def test_an_export_prints_its_folder_alone(unbroken: Path, tmp_path: Path) -> None:
    done = run_command("trainer.export", str(unbroken), "--to", str(tmp_path / "model"))
    assert (done.stdout, done.stderr) == (f"{tmp_path}/model\n", "")


def test_adapters_are_exported_merged(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = tmp_path / "run"
    train(checkpoint, folder, "--lora-rank", "2", "--lr", "0.01", "--save-every", "2", steps=2)
    assert export([str(folder)]) == 0
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("model-step-2", "model"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
