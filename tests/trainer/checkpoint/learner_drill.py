"""Kills, stops or breaks learner processes of a run at a chosen moment: what the drill and the tests of restarts share.

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
from dataclasses import dataclass, field
from typing import Any

import pytest

from trainer.learner.ray_group import LearnerGroup
from trainer.rollouts.live import LiveRollouts
from trainer.rollouts.session import TrainingSession

#: When a fault comes: in a rollout, at three places of an update, in a weight push, while a checkpoint is written.
MOMENTS = ("rollout", "update, early", "update, middle", "update, late", "push", "checkpoint")
#: How far into an update, as a share of the time that the one before it took.
_INTO = {"update, early": 0.1, "update, middle": 0.5, "update, late": 0.95}

#: What happens to the learner: gets its ranks, does something to some.
Fault = Callable[[LearnerGroup], object]


def signal_rank(rank: int, number: int = signal.SIGKILL) -> Fault:
    """Return the fault that sends a signal to the process of a rank."""
    return lambda group: os.kill(group.places[rank].pid, number)


@dataclass
class Drill:
    """When a fault came, and when the run had done that step after all, by `time.monotonic`."""

    began: float = 0.0
    is_over: float = 0.0
    #: Of the update before.
    train_s: float = 0.0
    step: int = field(default=0, kw_only=True)

    @property
    def seconds(self) -> float:
        """From the fault to the end of the step that it hit: detection, restart, and the steps taken again."""
        return self.is_over - self.began


@contextmanager
def fault_at(moment: str, step: int, fault: Fault) -> Iterator[Drill]:
    """Let a fault hit the run of this process once, at a moment of a step."""
    drill = Drill(step=step)

    def strike(group: LearnerGroup, delay_s: float = 0.0) -> None:
        if drill.began or group.steps_done < step - (moment not in ("push", "checkpoint")):
            return
        drill.began = time.monotonic()

        def act() -> None:
            drill.began = time.monotonic()
            fault(group)

        if delay_s:
            threading.Timer(delay_s, act).start()
        else:
            act()

    collect, train = LiveRollouts.collect, LearnerGroup.step
    weights, checkpoint = LearnerGroup.weights, LearnerGroup.begin_checkpoint
    log_step = TrainingSession._log_step

    async def collect_then(rollouts: LiveRollouts, num_groups: int) -> Any:
        if moment == "rollout":
            strike(rollouts.context.learner, 0.05)
        return await collect(rollouts, num_groups)

    def step_then(group: LearnerGroup, minibatches: Any) -> Any:
        if moment in _INTO:
            strike(group, max(0.001, _INTO[moment] * drill.train_s))
        started = time.monotonic()
        stats = train(group, minibatches)
        drill.train_s = time.monotonic() - started
        return stats

    def weights_then(group: LearnerGroup) -> Any:
        if moment == "push":
            strike(group)
        return weights(group)

    def checkpoint_then(group: LearnerGroup, folder: Any) -> Any:
        checkpoint(group, folder)
        if moment == "checkpoint":
            strike(group)

    def log_then(session: TrainingSession, metrics: Any) -> None:
        log_step(session, metrics)
        if drill.began and not drill.is_over and session.step >= step + (moment == "checkpoint"):
            drill.is_over = time.monotonic()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveRollouts, "collect", collect_then)
        patch.setattr(LearnerGroup, "step", step_then)
        patch.setattr(LearnerGroup, "weights", weights_then)
        patch.setattr(LearnerGroup, "begin_checkpoint", checkpoint_then)
        patch.setattr(TrainingSession, "_log_step", log_then)
        yield drill
