"""Shows the progress of a run in the terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from agents.types import Trajectory
from envs.execution.runner import last_line

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
        self.console = console or Console(highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TextColumn("ETA"), TimeRemainingColumn())
        self._progress = Progress(*columns, *left, console=self.console, transient=True)
        self._task: TaskID | None = None
        self._begun = time.monotonic()
        self._num_events = 0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, soft_wrap=True, markup=False)

    def fault(self, trajectory: Trajectory, seen: set[str]) -> None:
        """Print what broke an episode, once for each message; `seen` holds the messages printed so far."""
        if trajectory.end_reason.is_valid or trajectory.error is None:
            return
        line = last_line(trajectory.error)
        if line not in seen and len(seen) < MAX_FAULTS_SHOWN:
            seen.add(line)
            self.say(f"{trajectory.end_reason.value} in {trajectory.sample_id}: {line:.300}")

    def events(self, events: Sequence[str]) -> None:
        """Print the new ones of all events so far: servers lost, servers back, turns given up."""
        for event in events[self._num_events :]:
            self.say(event)
        self._num_events = len(events)

    def begin(self, name: str, total: int) -> None:
        """Replace the bar by a new one of `total` parts."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(f"{name:<22}", total=total)
        self._begun = time.monotonic()

    def advance(self) -> None:
        """Move the bar by one."""
        if self._task is not None:
            self._progress.advance(self._task)

    def step(self, row: Mapping[str, float], total: int) -> None:
        """Print the line of a training step, with the time that is left at the mean speed so far."""
        num_valid = round(row["valid_frac"] * row["episodes"])
        valid = f"valid {num_valid}/{row['episodes']:.0f}  " if row["valid_frac"] < 1 else ""
        filtered = f"filtered {row['groups_filtered']:.0f}  " if row.get("groups_filtered") else ""
        stale = f"staleness {row['staleness_mean']:.2f}  " if row.get("staleness_max") else ""
        training = [f"{label} {row[name]:{form}}  " for label, name, form in _TRAINING_COLUMNS if name in row]
        train = f" train {row['train_s']:.1f}s" if "train_s" in row else ""
        left_s = (time.monotonic() - self._begun) / row["step"] * (total - row["step"])
        self.say(
            f"step {row['step']:>3.0f}/{total}  reward {row['reward']:.3f}  {valid}{filtered}turns {row['turns']:.2f}  "
            f"{stale}{''.join(training)}{row['tokens_per_s']:.0f} tokens/s  "
            f"rollout {row['rollout_s']:.1f}s{train}  ETA {left_s:.0f}s"
        )


def quiet_libraries() -> None:
    """Silence the progress bars and warnings of libraries."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
