"""Claims about evaluations between the steps: they change nothing, survive every end, and can end the run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from envs.errors import UserError
from tests.environments import lucky_geometry
from tests.processes import Command
from tests.recordings import lines_of
from tests.trainer.runs import drawing, episodes_of, metrics_of, num_members, state_of
from tests.trainer.test_run import SMALL, train
from trainer.checkpoint.best_model import RECORD
from trainer.evaluate import run as evaluate
from trainer.rollouts.live import LiveRollouts
from trainer.run import run

STEPS = 4
#: No limit of the clock on which episodes share a batch: what is compared below is compared bit for bit.
FLAGS = ["--lr", "1e-3", "--batch-wait-s", "600", "--save-every", "3"]
EVERY = ["--eval-every", "2"]
WAYS = {"with_tool", "without_tool"}


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags of a run whose steps teach something; its environment draws from the process's random generator."""
    statements = ["import random", "random.random()", "return float(len(text) % 3)"]
    with lucky_geometry(tmp_path_factory.mktemp("lucky"), "lucky_evaluated", *statements) as flags:
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
    del played["train", "train", 1], played["train", "train", 2], played["train", "train", 3], played["train", "train", 4]
    assert played == {(phase, way, step): 3 for phase, step in (("before", 0), ("eval-2", 2), ("eval-4", 4)) for way in WAYS}
    assert len({episode["id"] for episode in episodes}) == len(episodes)
    right = sum(e["reward"] >= 1 for e in episodes if (e["phase"], e["way"]) == ("eval-2", "with_tool"))
    assert right / 3 == rows[1]["eval/with_tool/accuracy"]
    assert (evaluated / "reward_curve.png").stat().st_size > 1000
