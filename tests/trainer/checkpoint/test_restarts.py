"""Claims about runs that lose their learner: they go on by themselves, and end as if they had never lost it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.environments import lucky_lengths
from tests.trainer.checkpoint.learner_drill import MOMENTS, fault_at, signal_rank
from tests.trainer.runs import episodes_of, metrics_of, state_of
from trainer.run import run

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

STEPS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of two nodes in this machine, one CPU each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture(scope="module")
def flags(cluster: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags of a small run on two nodes, whose steps teach something."""
    with lucky_lengths(tmp_path_factory.mktemp("lucky"), "lucky_restarts", "float(len(text) % 3)", 6) as flags:
        few = ["--problems-per-step", "2", "--group-size", "4", "--max-new-tokens", "24", "--eval-size", "0"]
        often = ["--steps", str(STEPS), "--save-every", "2", "--batch-wait-s", "600", "--lr", "1e-3", "--tracker="]
        ranks = ["--num-learners", "2", "--ray-address", cluster]
        yield [*flags, "--model", str(checkpoint), *few, *often, *ranks]


@pytest.fixture(scope="module")
def unbroken(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    assert run([*flags, "--out", str(folder.parent), "--name", folder.name]) == 0
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    assert metrics_of(folder) == metrics_of(other)
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, STEPS + 1))
    assert episodes_of(folder) == episodes_of(other)
    ours, theirs = state_of(folder, STEPS), state_of(other, STEPS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (folder, other)]
    for name in ("steps_done", "end_reasons", "max_rollout_train_kl", "checkpoints_failed"):
        assert summaries[0][name] == summaries[1][name], name


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_whose_rank_is_killed_ends_as_one_that_lost_none(
    flags: list[str], unbroken: Path, tmp_path: Path, moment: str
) -> None:
    folder = tmp_path / "run"
    step = 2 if moment == "checkpoint" else 3
    with fault_at(moment, step, signal_rank(1)) as drill:
        assert run([*flags, "--out", str(tmp_path), "--name", "run"]) == 0
    assert 0 < drill.began < drill.is_over
    print(moment, drill)
    assert_same_run(folder, unbroken)
