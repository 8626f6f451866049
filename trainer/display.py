"""What a person at the terminal sees of a run: live progress, then tables."""

from __future__ import annotations

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
from rich.table import Table

from agents.types import Trajectory
from envs.runner import last_line
from trainer.figures import Evaluation

MAX_FAULTS_SHOWN = 10
#: What training adds to the line of a step: what it is called there, in the metrics, and its form.
_LEARNT = (("kl", "rollout_train_kl", ".1e"), ("entropy", "entropy", ".3f"), ("grad", "grad_norm", ".2f"))


class Display:
    """Prints to one console; a line per step stays on screen, a bar with the time left moves below it.

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
        """Say what broke an episode, the first time that it happens; `seen` holds the lines said so far."""
        if trajectory.end_reason.is_valid or trajectory.error is None:
            return
        line = last_line(trajectory.error)
        if line not in seen and len(seen) < MAX_FAULTS_SHOWN:
            seen.add(line)
            self.say(f"{trajectory.end_reason.value} in {trajectory.sample_id}: {line:.300}")

    def events(self, events: Sequence[str]) -> None:
        """Say those of all events so far that were not said yet: servers lost, back, turns given up."""
        for event in events[self._num_events :]:
            self.say(event)
        self._num_events = len(events)

    def begin(self, name: str, total: int) -> None:
        """Start a bar of `total` parts in place of the one before."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(f"{name:<22}", total=total)
        self._begun = time.monotonic()

    def advance(self) -> None:
        """Move the bar by one."""
        if self._task is not None:
            self._progress.advance(self._task)

    def step(self, row: Mapping[str, float], total: int) -> None:
        """Print one training step, with the time that is left at the speed so far."""
        num_valid = round(row["valid_frac"] * row["episodes"])
        valid = f"valid {num_valid}/{row['episodes']:.0f}  " if row["valid_frac"] < 1 else ""
        filtered = f"filtered {row['groups_filtered']:.0f}  " if row.get("groups_filtered") else ""
        stale = f"staleness {row['staleness_mean']:.2f}  " if row.get("staleness_max") else ""
        learnt = [f"{label} {row[name]:{form}}  " for label, name, form in _LEARNT if name in row]
        train = f" train {row['train_s']:.1f}s" if "train_s" in row else ""
        left_s = (time.monotonic() - self._begun) / row["step"] * (total - row["step"])
        self.say(
            f"step {row['step']:>3.0f}/{total}  reward {row['reward']:.3f}  {valid}{filtered}turns {row['turns']:.2f}  "
            f"{stale}{''.join(learnt)}{row['tokens_per_s']:.0f} tokens/s  "
            f"rollout {row['rollout_s']:.1f}s{train}  ETA {left_s:.0f}s"
        )

    def summary(
        self, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation], ends: Mapping[str, int]
    ) -> None:
        """Print held-out accuracy before and after with its 95 % interval, and how training episodes ended."""
        if after:
            num_problems = next(iter(after.values())).num_problems
            table = Table(title=f"Held-out accuracy, {num_problems} problems [95 % interval]")
            for column in ("", "accuracy", "change", "turns"):
                table.add_column(column, justify="left" if not column else "right", no_wrap=True)
            for name, final in after.items():
                first, way = before[name], name.replace("_", " ")
                change = f"{final.accuracy.value - first.accuracy.value:+.3f}"
                table.add_row(f"{way}, before", str(first.accuracy), "", f"{first.mean_turns:.2f}")
                table.add_row(f"{way}, after", str(final.accuracy), change, f"{final.mean_turns:.2f}")
            self.console.print(table)
        table = Table(title="How training episodes ended")
        table.add_column("end reason")
        table.add_column("episodes", justify="right")
        for reason, count in sorted(ends.items(), key=lambda item: -item[1]):
            table.add_row(reason, str(count))
        self.console.print(table)
