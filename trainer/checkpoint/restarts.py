"""Goes on with a run that has lost its learner: from its newest whole checkpoint, in the same process.

Comes in: a prepared run, and the training to call. Goes out: what the training returns, or why the run cannot go on.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from agents.cli.text import path_text
from trainer.checkpoint.checkpointer import Checkpoint, newest_whole
from trainer.checkpoint.run_dir import CHECKPOINTS
from trainer.learner.protocol import Learner, LearnerLost

logger = logging.getLogger(__name__)

#: Waits before the first, second, ... restart in a row; the last one before all others too. A lost node may come back.
WAITS_S = (0.0, 10.0, 30.0, 60.0)

T = TypeVar("T")


class RunLost(LearnerLost):
    """A run lost its learner in `step`; `is_interrupted` if the user had asked it to end by then."""

    def __init__(self, message: str, step: int, fault: str = "", is_interrupted: bool = False) -> None:
        super().__init__(message, fault)
        self.step = step
        self.is_interrupted = is_interrupted


class Restartable(Protocol):
    """A prepared run. Its learner can be started again; everything else lasts from one start to the next."""

    @property
    def folder(self) -> Path: ...
    @property
    def learner(self) -> Learner: ...
    def at(self, checkpoint: Checkpoint | None) -> Self:
        """Return the run from a checkpoint on, or from its beginning."""
        ...


C = TypeVar("C", bound=Restartable)


async def run_restarting(context: C, training: Callable[[C], Awaitable[T]], max_restarts: int) -> T:
    """Return what `training` returns; where the learner is lost, start it again and call `training` from there on.

    Example::

        session = await run_restarting(context, lambda now: run_training(now, rollouts, display), max_restarts=3)

    Raises:
        RunLost: the learner was lost too often, or by a fault that repeats; names the cause of every loss.
    """
    losses: list[RunLost] = []
    while True:
        try:
            if losses:
                context = await _restarted(context, losses, max_restarts)
            return await training(context)
        except LearnerLost as error:
            if isinstance(error, RunLost):
                lost = error
            else:
                lost = RunLost(str(error), losses[-1].step)
            if losses and lost.step > max(loss.step for loss in losses):
                losses = []  # the run got further, so what stopped it before is behind it
            losses.append(lost)
            if reason := why_give_up(losses, max_restarts):
                raise RunLost(reason, lost.step, is_interrupted=lost.is_interrupted) from error


def why_give_up(losses: Sequence[RunLost], max_restarts: int) -> str:
    """Return why a run that was lost in these ways is not started again, with the cause of each; empty if it is.

    Example: "step 7 failed twice in the same way: step 7: learner rank 0 of 2 failed in step: ...; step 7: ...", where
    a rank has raised one error twice, but for its numbers. A rank that dies twice may have died of two things.
    """
    last = losses[-1]
    causes = "; ".join(f"step {loss.step}: {loss}" for loss in losses)
    alike = [loss for loss in losses[-2:] if loss.fault and _kind(loss) == _kind(last)]
    if len(losses) == 1 and (last.is_interrupted or not max_restarts):
        return str(last)
    if last.is_interrupted:
        return causes
    if len(alike) == 2:
        return f"step {last.step} failed twice in the same way: {causes}"
    if len(losses) > max_restarts:
        return f"lost {len(losses)} times without getting further (max_restarts {max_restarts}): {causes}"
    return ""


def _kind(loss: RunLost) -> tuple[int, str]:
    return loss.step, re.sub(r"\d+", "", loss.fault)


async def _restarted(context: C, losses: Sequence[RunLost], max_restarts: int) -> C:
    """Start the learner again, with the state of the newest whole checkpoint; return the run from there on."""
    wait_s = WAITS_S[min(len(losses), len(WAITS_S)) - 1]
    last = losses[-1]
    when = f" in {wait_s:.0f} s" if wait_s else ""
    logger.warning(f"{last}; restart {len(losses)} of {max_restarts}{when}")
    try:
        await asyncio.sleep(wait_s)
        checkpoint = await asyncio.to_thread(_restore, context.learner, context.folder)
    except asyncio.CancelledError:
        context.learner.close()  # the thread's call fails, so it ends too
        raise RunLost("interrupted before it could go on", last.step, is_interrupted=True) from None
    return context.at(checkpoint)


def _restore(learner: Learner, folder: Path) -> Checkpoint | None:
    with learner.lock:  # a server that is back must not get the weights of the model that it restarts with
        learner.restart()
        checkpoint = found_checkpoint(folder)
        if checkpoint:
            learner.restore(checkpoint.learner)
        return checkpoint


def found_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run folder, None where there is none."""
    checkpoint = newest_whole(folder / CHECKPOINTS)
    if checkpoint:
        start = f"resumes after step {checkpoint.step}"
    else:
        start = "starts over: it has no whole checkpoint"
    logger.info(f"the run in {path_text(folder)} {start}")
    return checkpoint
