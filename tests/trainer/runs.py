"""What tests of runs share: runs without curves, and what two that must be equal to the bit are compared by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from agents.recording import Recording
from agents.recording.gzip_lines import read_gzip_lines
from tests.recordings import lines_of
from trainer.metrics.curves import draw_rewards

#: What draws the curve at the end of a run, by where it is looked up.
CURVES = {"trainer.rollouts.session.draw_rewards": draw_rewards}
#: The `--config` of runs that are compared to the bit.
PATIENT = str(Path(__file__).with_name("patient.yaml"))
#: Of an episode, in seconds.
TIMES = ("began", "total_s", "engine_s", "env_s", "check_s")


@contextmanager
def drawing(is_on: bool = True) -> Iterator[None]:
    """Let runs of this process draw their curves, or not: Matplotlib takes a third of the time of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        for place, draw in CURVES.items():
            patch.setattr(place, draw if is_on else lambda *_, **__: None)
        yield


def num_lines(path: Path) -> int:
    """Return the whole lines of a file, 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def num_members(path: Path) -> int:
    """Return the whole lines of a compressed file."""
    return sum(1 for _ in read_gzip_lines(path))


def is_same_everywhere(name: str) -> bool:
    """Return whether a metric depends on the run alone: not on the clock, on a process's image store, its start or its
    engine."""
    return not name.endswith(("_s", "_time_frac")) and not name.startswith(("images/", "probe_", "sync_"))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the comparable metrics of every step."""
    rows = lines_of(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if is_same_everywhere(name)} for row in rows]


def episodes_of(run: Path) -> list[str]:
    """Return every recorded episode with its outcome and the trainer's log-probs, without its times, in order of id."""
    recording = Recording.open(run)
    outcomes, scores, found = recording.outcomes(), recording.scores(), []
    for episode in sorted(recording.episodes(), key=lambda episode: episode.id):
        turns = tuple(turn.model_copy(update=dict.fromkeys(("engine_s", "env_s"), 0.0)) for turn in episode.turns)
        untimed = episode.model_copy(update={"turns": turns, **dict.fromkeys(TIMES, 0.0)})
        parts = (untimed, outcomes.get(episode.id), scores.get(episode.id))
        found.append("\n".join(part.model_dump_json() for part in parts if part))
    return found


def state_of(folder: Path, step: int) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint: weights, moments, counters."""
    reader = dcp.FileSystemReader(folder / "checkpoints" / f"step-{step}" / "learner")
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(m.size, dtype=m.properties.dtype) for name, m in found.items() if hasattr(m, "size")}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_equal_runs(folder: Path, other: Path, num_steps: int, *summarized: str) -> None:
    """Compare metrics, episodes and every tensor of two whole runs, and these parts of their summaries."""
    assert metrics_of(folder) == metrics_of(other)
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, num_steps + 1))
    assert episodes_of(folder) == episodes_of(other)
    ours, theirs = state_of(folder, num_steps), state_of(other, num_steps)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (folder, other)]
    for name in summarized:
        assert summaries[0][name] == summaries[1][name], name
