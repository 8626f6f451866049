"""Kills, stops or removes processes of a run at a chosen moment: what the drill and the tests of restarts share.

The run is in this process, its ranks are in others. A fault comes once: when the run gets to its moment, or some way
into it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agents.engines.sglang import SGLangEngine
from trainer.learner.ray_group import LearnerGroup
from trainer.rollouts.live import LiveRollouts
from trainer.rollouts.session import TrainingSession
from trainer.weight_sync.sync import WeightSync

#: When a fault comes: in a rollout, at three places of an update, in a weight push, while a checkpoint is written.
MOMENTS = ("rollout", "update, early", "update, middle", "update, late", "push", "checkpoint")
#: How far into an update, as a share of the time that the one before it took.
_INTO = {"update, early": 0.1, "update, middle": 0.5, "update, late": 0.95}

#: What happens to a run: gets its rollouts, with the context that holds the learner and the engine.
Fault = Callable[[LiveRollouts], object]


def ranks_of(rollouts: LiveRollouts) -> LearnerGroup:
    """Return the learner of a run, whose ranks are processes."""
    learner = rollouts.context.learner
    assert isinstance(learner, LearnerGroup), type(learner)
    return learner


def signal_rank(rank: int, number: int = signal.SIGKILL) -> Fault:
    """Return the fault that sends a signal to the process of a rank."""
    return lambda rollouts: os.kill(ranks_of(rollouts).places[rank].pid, number)


def kill_server(number: int = 0) -> Fault:
    """Return the fault that kills the process of a started SGLang server of this host, and all that it started."""

    def kill(rollouts: LiveRollouts) -> None:
        engine = rollouts.context.engine
        assert isinstance(engine, SGLangEngine), type(engine)
        kill_listener(engine.servers.all[number].client.url)

    return kill


def kill_listener(url: str) -> None:
    """Kill the process that was started to listen at a URL, and its group if it leads one."""
    port, killed = url.rpartition(":")[2].encode(), 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        words, pid = file.read_bytes().split(b"\0") if file.exists() else [], int(file.parent.name)
        if b"--port" in words and words[words.index(b"--port") + 1] == port:
            (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
            killed += 1
    assert killed, f"no process of this host listens at {url}"


@dataclass
class Drill:
    """When a fault came, and when the run had done that step after all, by `time.monotonic`."""

    step: int
    began: float = 0.0
    is_over: float = 0.0
    #: Of the update before.
    train_s: float = 0.0
    error: Exception | None = None

    @property
    def seconds(self) -> float:
        """From the fault to the end of the step that it hit: detection, restart, and the steps taken again."""
        return self.is_over - self.began


@contextmanager
def fault_at(moment: str, step: int, fault: Fault) -> Iterator[Drill]:
    """Let a fault hit the run of this process once, at a moment of a step; raises at the end if it could not."""
    drill, played = Drill(step=step), list[LiveRollouts]()

    def strike(group: LearnerGroup, delay_s: float = 0.0) -> None:
        if drill.began or not played or group.steps_done < step - (moment not in ("push", "checkpoint")):
            return
        drill.began = time.monotonic()

        def act() -> None:
            drill.began, drill.is_over = time.monotonic(), 0.0
            try:
                fault(played[0])
            except Exception as error:  # in the thread of a timer nobody would see it
                drill.error = error

        if delay_s:
            threading.Timer(delay_s, act).start()
        else:
            act()

    collect, train = LiveRollouts.collect, LearnerGroup.step
    push, checkpoint = WeightSync.push, LearnerGroup.begin_checkpoint
    log_step = TrainingSession._log_step

    async def collect_then(rollouts: LiveRollouts, num_groups: int) -> Any:
        played[:] = [rollouts]
        if moment == "rollout":
            strike(ranks_of(rollouts), 0.05)
        return await collect(rollouts, num_groups)

    def step_then(group: LearnerGroup, minibatches: Any) -> Any:
        if moment in _INTO:
            strike(group, max(0.001, _INTO[moment] * drill.train_s))
        started = time.monotonic()
        stats = train(group, minibatches)
        drill.train_s = time.monotonic() - started
        return stats

    async def push_then(sync: WeightSync, version: int) -> Any:
        if moment == "push":
            strike(ranks_of(played[0]))
        return await push(sync, version)

    def checkpoint_then(group: LearnerGroup, folder: Any) -> Any:
        checkpoint(group, folder)
        if moment == "checkpoint":
            strike(group)

    async def log_then(session: TrainingSession, metrics: Any) -> None:
        await log_step(session, metrics)
        if drill.began and not drill.is_over and session.step >= step + (moment == "checkpoint"):
            drill.is_over = time.monotonic()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveRollouts, "collect", collect_then)
        patch.setattr(LearnerGroup, "step", step_then)
        patch.setattr(WeightSync, "push", push_then)
        patch.setattr(LearnerGroup, "begin_checkpoint", checkpoint_then)
        patch.setattr(TrainingSession, "_log_step", log_then)
        yield drill
    if drill.error:
        raise drill.error
