"""Draws the curves of a finished run as PNG files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

#: The metrics of each step, as `MetricsLog.rows`.
Rows = Sequence[Mapping[str, float]]
#: A value, and the bounds of its interval.
Bounded = tuple[float, float, float]


def draw_rewards(rows: Rows, held_out: Mapping[int, Bounded], path: Path, title: str, label: str) -> None:
    """Draw the reward over the steps, and a held-out figure, `label`, with its intervals where it is known."""
    steps = [row["step"] for row in rows]
    rewards = [row["reward"] for row in rows]
    means = [sum(rewards[max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(len(rewards))]
    with _axes(path) as axes:
        axes.plot(steps, rewards, color="C0", alpha=0.3, lw=1)
        axes.plot(steps, means, color="C0", label="training reward, mean of 10 steps")
        if held_out:
            values, lows, highs = zip(*held_out.values(), strict=True)
            reach = np.maximum([np.subtract(values, lows), np.subtract(highs, values)], 0)  # a bound may be 1e-17 off
            axes.errorbar(list(held_out), values, reach, fmt="o--", color="C2", capsize=3, label=label)
        axes.set(xlabel="step", ylabel="reward", title=title)
        shown = [*rewards, *(value for bounded in held_out.values() for value in bounded)]
        if all(-0.01 <= value <= 1.01 for value in shown):
            axes.set_ylim(0, 1)
        axes.legend(loc="lower right")


def draw_losses(rows: Rows, before: float | None, after: float | None, path: Path) -> None:
    """Draw the loss over the steps, and the loss on held-out conversations where it is known."""
    held_out = [(0.0, before), *((row["step"], row.get("eval_loss")) for row in rows), (float(len(rows)), after)]
    known = [(step, loss) for step, loss in held_out if loss is not None]
    with _axes(path) as axes:
        axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label="training loss")
        if known:
            axes.plot(*zip(*known, strict=True), "o--", color="C2", label="held-out loss")
        axes.set(xlabel="step", ylabel="nats per token of the assistant")
        axes.legend(loc="upper right")


@contextmanager
def _axes(path: Path) -> Iterator[Any]:
    """Yield the axes of a new figure, and write the figure to `path` afterwards."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    yield axes
    figure.tight_layout()
    figure.savefig(path)
