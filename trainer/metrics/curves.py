"""Draws the curve of a finished run as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

#: The metrics of each step, as `MetricsLog.rows`.
Rows = Sequence[Mapping[str, float]]
#: A value, and the bounds of its interval.
Bounded = tuple[float, float, float]


def draw_rewards(rows: Rows, held_out: Mapping[int, Bounded], path: Path, title: str, label: str) -> None:
    """Draw the reward over the steps, and a held-out figure, `label`, with its intervals where it is known."""
    # Imported late: it takes a second. And without pyplot, which would look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [row["step"] for row in rows]
    rewards = [row["reward"] for row in rows]
    means = [sum(rewards[max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(len(rewards))]
    figure = Figure(figsize=(7, 4), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.plot(steps, rewards, color="C0", alpha=0.3, lw=1)
    axes.plot(steps, means, color="C0", label="training reward, mean of 10 steps")
    if held_out:
        values, lows, highs = zip(*held_out.values(), strict=True)
        reach = np.maximum([np.subtract(values, lows), np.subtract(highs, values)], 0)  # a bound may be 1e-17 off
        axes.errorbar(list(held_out), values, reach, fmt="o--", color="C2", capsize=3, label=label)
    axes.set(xlabel="step", ylabel="reward", title=title)
    shown = [*rewards, *(value for bounded in held_out.values() for value in bounded)]
    # Rewards between 0 and 1 are the usual case: then curves of several runs have one scale.
    if all(-0.01 <= value <= 1.01 for value in shown):
        axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
