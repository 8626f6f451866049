"""Shows the progress of a run in the terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from agents.types import EndReason, Trajectory
from envs.checking.error_location import located_line
from envs.console import Console

logger = logging.getLogger(__name__)

MAX_FAULTS_SHOWN = 10
#: What training adds to the line of a step: the label, the name in the metrics, and the number format.
_TRAINING_COLUMNS = (("kl", "rollout_train_kl", ".1e"), ("entropy", "entropy", ".3f"), ("grad", "grad_norm", ".2f"))


class Display:
    """Prints a line per step, and below them a progress bar with the time that is left.

    Example::

        with Display() as display:
            display.begin("train", total=20)
            display.step(row)
            display.advance()
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        name = TextColumn("{task.description}", markup=False)
        left = (TextColumn("ETA"), TimeRemainingColumn())
        counts = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(name, *counts, *left, console=self.console, transient=True)
        self._task: TaskID | None = None
        self._begun = time.monotonic()
        self._num_events = 0

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def fault(self, trajectory: Trajectory, seen: set[str]) -> None:
        """Log what broke an episode or a tool, once for each message; `seen` holds the messages printed so far."""
        is_faultless = trajectory.end_reason.is_valid and trajectory.end_reason is not EndReason.TOOL_FAULT
        # A valid episode may have an error too: its environment failed to close.
        if is_faultless or trajectory.error is None:
            return
        line = located_line(trajectory.error)
        # An environment that always fails would fill the screen.
        if line not in seen and len(seen) < MAX_FAULTS_SHOWN:
            seen.add(line)
            logger.warning(f"{trajectory.end_reason.value} in {trajectory.sample_id}: {line:.300}")

    def events(self, events: Sequence[str]) -> None:
        """Log the new ones of all events so far: servers lost, servers back, turns given up."""
        for event in events[self._num_events :]:
            logger.warning(event)
        self._num_events = len(events)

    def begin(self, name: str, total: int) -> None:
        """Replace the bar by a new one of `total` parts."""
        self._progress.start()  # not before: until then the console shows the start of the run
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(f"{name:<22}", total=total)
        self._begun = time.monotonic()

    @contextmanager
    def aside(self, name: str, total: int) -> Iterator[None]:
        """Show another bar of `total` parts until the block ends."""
        task = self._task
        # Put back afterwards: an evaluation must not count in the time left.
        begun = self._begun
        if task is not None:
            self._progress.update(task, visible=False)
            self._task = None
        self.begin(name, total)
        try:
            yield
        finally:
            assert self._task is not None, "begin has made the bar"
            self._progress.remove_task(self._task)
            self._task = task
            self._begun = begun
            if task is not None:
                self._progress.update(task, visible=True)

    def advance(self) -> None:
        """Move the bar by one."""
        if self._task is not None:
            self._progress.advance(self._task)

    def step(self, row: Mapping[str, float], total: int) -> None:
        """Print the line of a training step, with the time that is left at the mean speed so far."""
        parts = [f"step {row['step']:>3.0f}/{total}", f"reward {row['reward']:.3f}"]
        if row["valid_frac"] < 1:
            parts.append(f"valid {row['valid_frac'] * row['episodes']:.0f}/{row['episodes']:.0f}")
        if row.get("groups_filtered"):
            parts.append(f"filtered {row['groups_filtered']:.0f}")
        parts.append(f"turns {row['turns']:.2f}")
        if row.get("staleness/max"):
            parts.append(f"staleness {row['staleness/mean']:.2f}")
            # Known where the engine has servers; an embedded engine shares the learner's device.
            if "idle/servers_time_frac" in row:
                parts.append(f"servers idle {row['idle/servers_time_frac']:.0%}")
        parts += [f"{label} {row[name]:{form}}" for label, name, form in _TRAINING_COLUMNS if name in row]
        parts += [f"{row['tokens_per_s']:.0f} tokens/s", f"rollout {row['rollout_s']:.1f}s"]
        if "train_s" in row:
            parts[-1] += f" train {row['train_s']:.1f}s"
        # The mean of all steps so far: a single step may be twice as long as the next.
        left_s = (time.monotonic() - self._begun) / row["step"] * (total - row["step"])
        self.console.print("  ".join([*parts, f"ETA {left_s:.0f}s"]), soft_wrap=True)


class ConsoleHandler(logging.Handler):
    """Prints log records above a progress bar, each on one line however long (rich's own handler breaks them)."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record. A console that cannot be written to, as on a full disk, must not end a run."""
        try:
            self._console.print(self.format(record), soft_wrap=True)
        except OSError:
            self.handleError(record)


def open_console() -> Console:
    """Return the console of a command: TrueTurn's packages log to it, libraries print neither progress nor warnings."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook: no bar of its own is shown
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # A notebook calls itself a terminal and cannot move a progress bar: it gets the lines of the steps alone.
    is_notebook = "ipykernel" in sys.modules
    console = Console(force_jupyter=False, force_terminal=False if is_notebook else None)
    for package in ("envs", "agents", "trainer"):
        logging.getLogger(package).setLevel(logging.INFO)
        logging.getLogger(package).handlers = [ConsoleHandler(console)]
    return console
