"""The life cycle of a run: from its start, or its newest checkpoint, to its summary.

Reinforcement (`trainer.rollouts.session`) and supervised training (`trainer.sft.session`) share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from agents.cli.text import counted, path_text
from agents.engines.weight_servers import EngineDown
from agents.recording.append_log import rewind
from agents.recording.run_files import CONFIG, METRICS, SUMMARY
from envs.config.commands import command_line
from envs.execution.watchdog import WATCHDOG
from trainer.callbacks import Callbacks, RunStart
from trainer.checkpoint.cancel import cancel_on_request
from trainer.checkpoint.checkpointer import Checkpoints, found_steps
from trainer.checkpoint.run_dir import CHECKPOINTS
from trainer.config.run import CheckpointConfig, RunDirConfig
from trainer.learner.protocol import Learner, LearnerLost
from trainer.metrics.console import Display
from trainer.metrics.log import MetricsLog, peak_memory_gib
from trainer.types import RunFault

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: Why an update is skipped.
NOT_FINITE = "loss or gradient was not finite; look at the sizes of rewards, advantages and loss"
#: Errors of a full or broken disk: the run can be resumed later, or elsewhere.
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class RunState(Protocol):
    """Where a run stands after `step`; a checkpoint holds `files`, besides the learner's state.

    `metrics_bytes` is the length of the metrics file by then, with `num_rows` rows, `seconds` the time spent so far.
    """

    @property
    def step(self) -> int: ...
    @property
    def metrics_bytes(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    def files(self) -> Mapping[str, bytes]: ...


S = TypeVar("S", bound=RunState)


class RunSession(ABC, Generic[S]):
    """Counts steps, logs them, writes checkpoints, stops when asked to, and leaves summary and weights behind.

    Example::

        async def body() -> None:
            for step in session.steps():                                # those that are left after a resume
                await session.complete(update(session, step))           # calls begin_update and end_step

        summary = await session.run(body)                               # also in summary.json
    """

    #: What the progress bar says of the steps.
    stage = "train"

    def __init__(
        self,
        folder: Path,
        learner: Learner,
        state: S,
        num_steps: int,
        settings: Mapping[str, Any],
        log: RunDirConfig,
        checkpoint: CheckpointConfig,
        display: Display,
    ) -> None:
        """Continue the files in `folder` from `state`; `settings` go to the trackers."""
        self.folder = folder
        self.state = state
        self.num_steps = num_steps
        self.display = display
        # Rows after the checkpoint are of steps that are taken again.
        rewind(folder / METRICS, state.metrics_bytes)
        self._settings = settings
        self.callbacks = Callbacks(log.callback)
        self.log = MetricsLog(folder, settings, log.tracker, log.project, state.num_rows)
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, learner, checkpoint)
        #: Closed once the summary is written.
        self.open_files = contextlib.ExitStack()
        self.open_files.callback(self.log.close)
        #: The step that runs now, or the last one.
        self.step = state.step
        self.is_interrupted = False
        #: Why the run has ended before its last step; empty if it has not.
        self.stopped_by = ""
        self._started = time.perf_counter() - state.seconds

    def _files(self) -> dict[str, bytes]:
        """Return the files of a checkpoint: the state, and the settings, whose copy shows damage of the run's own."""
        return {**self.state.files(), CONFIG: (self.folder / CONFIG).read_bytes()}

    async def run(self, body: Callable[[], Awaitable[None]]) -> dict[str, Any]:
        """Await `body`; on Ctrl-C or SIGTERM keep everything so far. Returns the summary, which is also on disk.

        Raises:
            LearnerLost: in `body` or with the last files; all else is on disk.
        """
        # Schedulers end a job with SIGTERM, some time before they kill it.
        cancel_on_request()
        try:
            summary = await self._run(body)
        finally:
            await self.close()
        self.callbacks.on_end(summary)
        return summary

    async def _run(self, body: Callable[[], Awaitable[None]]) -> dict[str, Any]:
        is_lost = False
        try:
            self.callbacks.on_begin(RunStart(self.folder, self._settings, self.state.step, self.num_steps))
            await body()
        except asyncio.CancelledError:
            self.is_interrupted = True
            logger.info("interrupted: saving what there is")
        except LearnerLost:
            is_lost = True
            raise
        finally:
            summary = self._finish(has_weights=not is_lost)
        return summary

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is left, until there is a reason to stop."""
        first = self.state.step
        self.display.begin(self.stage, self.num_steps - first)
        for step in range(first + 1, self.num_steps + 1):
            if self.stop_reason:
                self.stopped_by = self.stop_reason
                logger.info(f"stopped after step {self.step}: {self.stopped_by}")
                return
            self.step = step
            yield step
            self.display.advance()

    async def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` to its end, however often the caller is cancelled meanwhile; then the cancellation goes on.

        So an interrupt during an update takes effect after it, and a run always stops between steps.
        """
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.is_interrupted = True
            # A second Ctrl-C must not leave the weights half changed either.
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(task)
            task.result()
            raise

    async def begin_update(self) -> None:
        """Note that the weights are about to change: until `end_step` there is nothing to write a checkpoint of."""
        await self._on_thread(self.checkpoints.mark_dirty)

    async def end_step(self) -> None:
        """Note that the step is done, and begin a checkpoint where one is due."""
        self.state = self.state_now()
        is_last = self.step == self.num_steps
        await self._on_thread(self.checkpoints.on_step_end, self.step, self._files, is_last)

    async def _on_thread(self, work: Callable[..., None], *args: object) -> None:
        """Do work on a checkpoint to its end. Episodes go on meanwhile: copies and sums of gigabytes take long."""
        await self.complete(asyncio.to_thread(work, *args))

    @property
    def stop_reason(self) -> str:
        """The reason to end the run before its last step; empty where there is none."""
        return self.callbacks.stop_reason

    @property
    def seconds(self) -> float:
        """Time spent on the run so far, in all processes that it was resumed in."""
        return time.perf_counter() - self._started

    @abstractmethod
    def state_now(self) -> S:
        """Return where the run stands now, with all files on disk up to here."""

    @abstractmethod
    def summary(self) -> Mapping[str, Any]:
        """Return what the summary says besides steps, time and memory."""

    def draw(self) -> None:
        """Draw the curve of the run into its folder, if it has one."""

    @abstractmethod
    def save_model(self) -> None:
        """Write the weights as a Hugging Face folder."""

    async def close(self) -> None:
        """Free what the session holds; learner and rollouts serve the next one."""

    def _finish(self, has_weights: bool) -> dict[str, Any]:
        """Write summary and curve, close all files, write the weights: last, for nothing else is lost if that fails."""
        summary = {
            "steps_done": len(self.log.rows),
            "steps_skipped": [int(row["step"]) for row in self.log.rows if row.get("num_skipped")],
            "interrupted": self.is_interrupted,
            "stop_reason": self.stopped_by,
            "seconds": round(self.seconds, 1),
            "peak_memory_gib": round(peak_memory_gib(), 3),
            **self.summary(),
        }
        try:
            if has_weights:
                self.checkpoints.close()
            # Closing may have failed to write one more.
            summary["checkpoints_failed"] = self.checkpoints.num_failed
            (self.folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            self.draw()
        finally:
            self.open_files.close()
        if has_weights:
            self.save_model()
        return summary


def check_finite(summary: Mapping[str, Any], cause: str = NOT_FINITE) -> None:
    """Raise `RunFailed` if a finished run has skipped an update: it must not pass for one that went well."""
    if steps := summary["steps_skipped"]:
        shown = ", ".join(map(str, steps))
        raise RunFailed(f"updates were skipped in {counted(len(steps), 'step')} ({shown}): {cause}")


class RunFailed(RuntimeError):
    """Learner, servers, disk, weights or token streams failed a run; the message says how, and how to resume it."""


def resume_hint(module: str, folder: Path) -> str:
    """Return the command that resumes a run of a module, or that there is no checkpoint to resume from."""
    if not found_steps(folder / CHECKPOINTS):
        return "there is no checkpoint to resume from"
    return _resume_command(module, folder)


def _resume_command(module: str, folder: Path) -> str:
    return f"resume with: {command_line(module, ['--resume', path_text(folder)])}"


def run_to_end(training: Coroutine[Any, Any, T], module: str, folder: Path) -> T:
    """Run a training of a module. Raises `RunFailed`, which says how to resume, if what it cannot do without fails."""
    WATCHDOG.advise(f"if it has a checkpoint, {_resume_command(module, folder)}")
    try:
        return asyncio.run(training)
    except (RunFault, EngineDown, OSError) as error:
        # Any other is a fault of the program, of which the traceback tells more.
        if isinstance(error, OSError) and error.errno not in _DISK_FAULTS:
            raise
        raise RunFailed(f"{error}; {resume_hint(module, folder)}") from error
