"""Claims about runs that lose their learner: they go on by themselves, and end as if they had never lost it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trueturn as tt
from starter.demonstrations import run as write_demonstrations
from tests.environments import lucky_lengths
from tests.flags import last_of_each
from tests.recordings import episodes_in, lines_of
from tests.servers import serving
from tests.trainer.runs import PATIENT, assert_equal_runs, metrics_of, num_members, state_of
from trainer.checkpoint.checkpointer import Checkpoint
from trainer.checkpoint.restarts import RunLost, run_restarting, why_give_up
from trainer.checkpoint.session import RunFailed
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.rollouts.live import LiveRollouts
from trainer.run import run
from trainer.sft.__main__ import run as fine_tune
from trueturn.runs import Run

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")
from tests.trainer.checkpoint.learner_drill import fault_at, ranks_of, signal_rank  # noqa: E402
from trainer.learner.ray_group import LearnerGroup  # noqa: E402

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
        often = ["--steps", str(STEPS), "--save-every", "2", "--config", PATIENT, "--lr", "1e-3", "--tracker="]
        ranks = ["--num-learners", "2", "--ray-address", cluster]
        yield [*flags, "--model", str(checkpoint), *few, *often, *ranks]


@pytest.fixture(scope="module")
def unbroken(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    assert run([*flags, "--out", str(folder.parent), "--name", folder.name]) == 0
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    assert_equal_runs(folder, other, STEPS, "steps_done", "end_reasons", "max_rollout_train_kl", "checkpoints_failed")


# The benchmark tries all moments.
@pytest.mark.slow
@pytest.mark.parametrize(("moment", "step"), [("update, middle", 4), ("checkpoint", 2)])
def test_a_run_whose_rank_is_killed_ends_as_one_that_lost_none(
    flags: list[str], unbroken: Path, tmp_path: Path, moment: str, step: int
) -> None:
    with fault_at(moment, step, signal_rank(1)) as drill:
        assert run([*flags, "--out", str(tmp_path), "--name", "run"]) == 0
    assert 0 < drill.began < drill.is_over
    assert_same_run(tmp_path / "run", unbroken)
    (abandoned,) = (tmp_path / "run" / "episodes" / "abandoned").glob("episodes.jsonl-*.gz")
    assert num_members(abandoned) >= 8  # those of the steps that were taken again


@pytest.mark.slow
def test_a_rank_that_hangs_is_replaced(
    flags: list[str], unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUETURN_LEARNER_TIMEOUT_S", "4")
    with fault_at("update, early", 3, signal_rank(1, signal.SIGSTOP)) as drill:
        assert run([*flags, "--out", str(tmp_path), "--name", "run"]) == 0
    assert 4 < drill.seconds < 200
    assert_same_run(tmp_path / "run", unbroken)


@pytest.mark.slow
def test_an_update_that_fails_twice_in_the_same_way_ends_the_run(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, tries = LearnerGroup.step, []

    def step(group: LearnerGroup, minibatches: Any) -> Any:
        if group.steps_done == 1:
            tries.append(group.places[0].pid)
            minibatches = [[replace(s, ids_T=s.ids_T + 10**9) for s in samples] for samples in minibatches]
        return train(group, minibatches)

    monkeypatch.setattr(LearnerGroup, "step", step)
    assert run(last_of_each([*flags, "--save-every", "1", "--out", str(tmp_path), "--name", "run"])) == 1
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert len(set(tries)) == 2
    assert error.startswith("error: step 2 failed twice in the same way: step 2: learner rank ")
    assert error.count("IndexError") == 2
    resume = (
        f"resume with: python -m trainer.run --resume {tmp_path / 'run'}"  # if step 1's checkpoint is whole by then
    )
    assert error.endswith((resume, "there is no checkpoint to resume from"))


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_restart(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restart, began = LearnerGroup.restart, []

    def interrupted(group: LearnerGroup) -> None:
        began.append(time.monotonic())
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        restart(group)

    monkeypatch.setattr(LearnerGroup, "restart", interrupted)
    with fault_at("push", 1, signal_rank(0)):
        assert run([*flags, "--out", str(tmp_path), "--name", "run"]) == 130
    assert time.monotonic() - began[0] < 40
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert "interrupted before it could go on; there is no checkpoint to resume from" in error


@pytest.mark.slow
def test_a_lost_node_is_replaced_by_another_or_named_where_there_is_none(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.checkpoint.restarts.WAITS_S", (0.0, 0.5))
    monkeypatch.setattr("trainer.learner.reservation.PLACE_S", 10.0)
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    others = {node.node_id: node for node in (nodes.add_node(num_cpus=1), nodes.add_node(num_cpus=1))}

    def remove_node(rollouts: LiveRollouts) -> None:
        nodes.remove_node(others[ranks_of(rollouts).places[1].node], allow_graceful=False)

    def train(name: str) -> Run:
        return tt.train(
            tt.env(env, registry=[registry], data=data), model=str(checkpoint), out=tmp_path, name=name, tracker=(),
            num_learners=2, ray_address=nodes.address, steps=3, save_every=1, problems_per_step=2, group_size=2,
            max_new_tokens=16, eval_size=0,
        )  # fmt: skip

    try:
        with lucky_lengths(tmp_path, "lucky_nodes", "float(len(text) % 3)", 6) as (_, env, _, registry, _, data):
            with fault_at("update, early", 2, remove_node):
                assert len(train("replaced").rows) == 3
            with fault_at("update, early", 2, remove_node), pytest.raises(RunFailed) as failed:
                train("nowhere")
    finally:
        nodes.shutdown()
    said = str(failed.value)
    assert said.count("step 2: the learner could not be started again: --num-learners: must be at most the 1 CPUs") == 3
    assert "(max_restarts 3): step 2: learner rank 1 of 2 " in said
    assert said.endswith("there is no checkpoint to resume from")


# Their weights are of step 1 when the learner begins anew; kl shows any difference from those of the learner.
@pytest.mark.slow
@pytest.mark.parametrize("sync", ["disk", "nccl"])
def test_servers_outlive_a_lost_learner_and_take_its_weights_again(
    flags: list[str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sync: str
) -> None:
    with serving(checkpoint) as url, fault_at("update, early", 2, signal_rank(1)) as drill:
        argv = [*flags, "--save-every", "0", "--engine-url", url, "--out", str(tmp_path), "--name", "run"]
        assert run(last_of_each([*argv, "--steps", "2", "--sync", sync])) == 0
    assert "over disk" not in capsys.readouterr().out and not (tmp_path / "run" / "sync").exists()
    assert drill.is_over > drill.began > 0
    rows, episodes = lines_of(tmp_path / "run" / "metrics.jsonl"), episodes_in(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2] and all(row["grad_norm"] > 0 for row in rows)
    assert all(row["rollout_train_kl"] < 1e-8 for row in rows)
    assert [{run[0] for turn in e["turns"] for run in turn["versions"]} for e in episodes] == [{0}] * 8 + [{1}] * 8


@pytest.mark.slow
def test_supervised_training_gets_over_a_killed_rank_too(
    cluster: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demos, train, killed = tmp_path / "demos.jsonl", LearnerGroup.step, []
    assert write_demonstrations(["--num", "4", "--out", str(demos)]) == 0
    argv = ["--model", str(checkpoint), "--data", str(demos), "--batch-size", "2", "--epochs", "2", "--tracker="]
    argv += ["--save-every", "1", "--out", str(tmp_path), "--num-learners", "2", "--ray-address", cluster]
    assert fine_tune([*argv, "--name", "unbroken"]) == 0

    def step(group: LearnerGroup, minibatches: Any) -> Any:
        if group.steps_done == 2 and not killed:
            killed.append(group.places[1].pid)
            os.kill(group.places[1].pid, signal.SIGKILL)
        return train(group, minibatches)

    monkeypatch.setattr(LearnerGroup, "step", step)
    assert fine_tune([*argv, "--name", "run"]) == 0
    assert killed and metrics_of(tmp_path / "run") == metrics_of(tmp_path / "unbroken")
    ours, theirs = (state_of(tmp_path / name, 4) for name in ("run", "unbroken"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def loss(step: int, fault: str = "", is_interrupted: bool = False) -> RunLost:
    return RunLost(f"lost in {step}", step, fault, is_interrupted)


@pytest.mark.parametrize(
    ("losses", "max_restarts", "reason"),
    [
        ([loss(7)], 3, ""),
        ([loss(7)], 0, "lost in 7"),
        ([loss(7, is_interrupted=True)], 3, "lost in 7"),
        ([loss(7), loss(7), loss(7)], 3, ""),
        ([loss(7), loss(7)], 1, r"lost 2 times .*max_restarts 1.*: step 7: lost in 7; step 7: lost in 7"),
        ([loss(7, "took 3 GiB"), loss(7, "took 4 GiB")], 3, "step 7 failed twice in the same way: "),
        ([loss(7, "took 3 GiB"), loss(6, "took 3 GiB")], 3, ""),
        ([loss(7, "took 3 GiB"), loss(7, "no link")], 3, ""),
        ([loss(7), loss(7, is_interrupted=True)], 3, "step 7: lost in 7; step 7: lost in 7"),
    ],
)
def test_a_run_is_given_up_for_a_fault_that_repeats_or_too_many(
    losses: list[RunLost], max_restarts: int, reason: str
) -> None:
    assert re.fullmatch(f"{reason}.*" if reason else "", why_give_up(losses, max_restarts))


@dataclass(frozen=True)
class Imagined:
    """A run without a learner, which reaches a step in each try and is lost there."""

    learner: Any
    folder: Path

    def at(self, checkpoint: Checkpoint | None) -> Imagined:
        return self


class Slow:
    """A learner whose `steps_done` others read while it starts again and is restored."""

    def __init__(self) -> None:
        self.lock, self.steps_done, self.seen = threading.RLock(), 4, list[int]()
        self.reader = threading.Thread(target=self.read)

    def read(self) -> None:
        with self.lock:
            self.seen.append(self.steps_done)

    def restart(self) -> None:
        self.steps_done = 0
        self.reader.start()
        time.sleep(0.1)

    def restore(self, folder: Path) -> None:
        self.steps_done = 4


def test_nobody_gets_the_weights_of_a_learner_that_starts_again_before_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(folder: Path) -> Checkpoint:
        time.sleep(0.1)  # its files are read
        return Checkpoint(folder, step=4)

    monkeypatch.setattr("trainer.checkpoint.restarts.found_checkpoint", found)
    learner, tries = Slow(), iter([RunLost("rank 0 died", 5)])

    async def training(context: Imagined) -> None:
        for lost in tries:
            raise lost

    asyncio.run(run_restarting(Imagined(learner, tmp_path), training, max_restarts=1))
    learner.reader.join()
    assert learner.seen == [4]


def test_losses_count_anew_once_a_run_gets_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.restarts.WAITS_S", (0.0,))
    reached = iter([3, 3, 5, 4, 5, 9, 9, 9])

    async def training(context: Imagined) -> None:
        raise RunLost("rank 0 died", next(reached))

    learner = FSDPLearner.__new__(FSDPLearner)
    learner.lock = threading.RLock()
    context = Imagined(learner, tmp_path)
    with pytest.raises(RunLost, match="lost 3 times without getting further"):
        asyncio.run(run_restarting(context, training, max_restarts=2))
    assert next(reached) == 9  # given up after 5, 4, 5
