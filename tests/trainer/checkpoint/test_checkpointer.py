"""Claims about checkpoints on disk: whole or not there, rotated, checked when they are read, and never in the way."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents.types import SamplingParams
from tests.trainer.steps import random_samples
from trainer.checkpoint.checkpointer import Checkpoints, damage, found_steps, newest_whole
from trainer.config.run import CheckpointConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.weights_io import empty_model


@pytest.fixture(scope="module")
def learner(checkpoint: Path) -> FSDPLearner:
    made = FSDPLearner(empty_model(checkpoint), SamplingParams(), 4, path=checkpoint)
    made.step([random_samples(made.model)])
    return made


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("trainer.")]


def written(folder: Path, learner: FSDPLearner, steps: range, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder, learner, CheckpointConfig(keep_checkpoints=keep))
    for step in steps:
        checkpoints.begin(step, {"progress.json": json.dumps({"step": step}).encode()})
    checkpoints.finish()
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let nobody write a file of more bytes, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_has_its_name_only_when_it_is_whole(
    tmp_path: Path, learner: FSDPLearner, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, learner, CheckpointConfig())
    checkpoints.begin(3, {"progress.json": b"{}"})
    assert names(tmp_path) == ["step-3.writing"] and newest_whole(tmp_path) is None
    checkpoints.finish()
    found = newest_whole(tmp_path)
    assert found is not None and found.step == 3 and found.read("progress.json") == b"{}"
    assert names(tmp_path) == ["step-3"] and checkpoints.newest_step == 3 and not said(caplog)
    files = json.loads((tmp_path / "step-3" / "manifest.json").read_text())["files"]
    assert {"progress.json", "learner/.metadata", "learner/__0_0.distcp"} == files.keys()


def test_the_newest_ones_are_kept(tmp_path: Path, learner: FSDPLearner) -> None:
    written(tmp_path, learner, range(8, 12))
    assert names(tmp_path) == ["step-10", "step-11"]
    assert [checkpoint.step for checkpoint in found_steps(tmp_path)] == [11, 10]


def test_what_a_killed_process_was_writing_is_thrown_away(tmp_path: Path, learner: FSDPLearner) -> None:
    (tmp_path / "step-7.writing" / "learner").mkdir(parents=True)
    Checkpoints(tmp_path, learner, CheckpointConfig())
    assert names(tmp_path) == []


@pytest.mark.parametrize("file", ["learner/__0_0.distcp", "learner/.metadata", "progress.json", "manifest.json"])
@pytest.mark.parametrize("fault", ["flipped", "cut", "gone", "pipe"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, learner: FSDPLearner, caplog: pytest.LogCaptureFixture, file: str, fault: str
) -> None:
    written(tmp_path, learner, range(1, 3))
    path = tmp_path / "step-2" / file
    content = bytearray(path.read_bytes())
    if fault == "flipped":
        content[len(content) // 2] ^= 0x80
    path.unlink()
    if fault == "pipe":
        os.mkfifo(path)
    elif fault != "gone":
        path.write_bytes(content[: len(content) // 2] if fault == "cut" else content)
    found = newest_whole(tmp_path)
    assert found is not None and found.step == 1
    [line] = said(caplog)
    assert "step 2 is damaged" in line and path.name in line and "step-2.damaged" in line
    assert names(tmp_path) == ["step-1", "step-2.damaged"]


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(
    tmp_path: Path, learner: FSDPLearner, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, learner, range(1, 2))
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-9")
    found = newest_whole(tmp_path)
    assert found is not None and found.step == 1
    [of_another] = said(caplog)
    assert "step 9 is damaged and skipped: manifest.json is of step 1" in of_another


def test_a_full_disk_is_said_and_costs_only_the_checkpoint_at_hand(
    tmp_path: Path, learner: FSDPLearner, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = written(tmp_path, learner, range(1, 2))
    with largest_file(10_000):
        checkpoints.begin(2, {"progress.json": b"{}"})
        checkpoints.finish()
    [line] = said(caplog)
    assert "step 2 could not be written" in line and "newest is that of step 1" in line and "too large" in line.lower()
    assert names(tmp_path) == ["step-1"] and checkpoints.num_failed == 1
    with largest_file(1):
        checkpoints.begin(3, {"progress.json": b"{}"})
    assert len(said(caplog)) == 2 and names(tmp_path) == ["step-1"]
    checkpoints.begin(4, {"progress.json": b"{}"})
    checkpoints.finish()
    assert names(tmp_path) == ["step-1", "step-4"] and damage(found_steps(tmp_path)[0]) is None


def no_files() -> dict[str, bytes]:
    return {}


def test_the_last_step_has_one_checkpoint_also_where_none_is_due(tmp_path: Path, learner: FSDPLearner) -> None:
    checkpoints = Checkpoints(tmp_path, learner, CheckpointConfig(save_every=2, keep_checkpoints=9))
    for step in (1, 2):
        checkpoints.on_step_end(step, no_files)
    checkpoints.on_step_end(3, no_files, is_last=True)
    assert names(tmp_path) == ["step-2", "step-3.writing"]
    checkpoints.close()
    assert names(tmp_path) == ["step-2", "step-3"]
    checkpoints.close()
    assert names(tmp_path) == ["step-2", "step-3"]


def test_a_checkpoint_is_whole_before_the_next_step_changes_the_weights(tmp_path: Path, learner: FSDPLearner) -> None:
    checkpoints = Checkpoints(tmp_path, learner, CheckpointConfig(save_every=1))
    checkpoints.on_step_end(1, no_files)
    assert learner.is_checkpoint_written(wait=True)  # by the ranks; the manifest and the name are missing
    assert names(tmp_path) == ["step-1.writing"]
    checkpoints.mark_dirty()
    assert names(tmp_path) == ["step-1"]


def test_no_checkpoint_has_the_weights_of_an_interrupted_step(tmp_path: Path, learner: FSDPLearner) -> None:
    checkpoints = Checkpoints(tmp_path, learner, CheckpointConfig(save_every=5))
    checkpoints.on_step_end(1, no_files)
    checkpoints.mark_dirty()
    checkpoints.close()
    assert names(tmp_path) == []
    checkpoints.mark_whole(1, no_files)
    checkpoints.close()
    assert names(tmp_path) == ["step-1"]
