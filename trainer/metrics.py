"""What a run leaves to look at: a dict of numbers per step in; `metrics.jsonl`, rows for trackers and a curve out."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agents.rollout import StepRollout
from agents.types import Trajectory, Turn
from trainer.config import TrackerName
from trainer.folder import METRICS
from trainer.trackers import TrackedRun, Tracker, open_trackers
from trainer.types import StepStats


def rollout_metrics(rollout: StepRollout, max_turns: int, version: int, seconds: float) -> dict[str, float]:
    """Return the numbers of one step's rollout, which took so many seconds, with weights of `version` at its end.

    Rewards are means over the valid episodes of all complete groups, filtered and surplus ones included.
    `groups_used_frac` counts those whose rewards differ, which are those that teach; `groups_resampled` and
    `groups_dropped` those that broken episodes left fewer than two valid ones: played again, given up. `end/REASON` is
    a share of all episodes, aborted and discarded ones included, and `tool/OUTCOME` of the turns of complete groups.
    """
    groups = (*rollout.groups, *rollout.filtered, *rollout.surplus)
    trajectories = [t for group in groups for t in group.trajectories]
    valid = [t for t in trajectories if t.end_reason.is_valid]
    turns = [turn for t in trajectories for turn in t.turns]
    ends = Counter(t.end_reason.value for t in rollout.played)
    outcomes = Counter(outcome for turn in turns for outcome in tool_outcomes(turn))
    count, rewards = max(1, len(trajectories)), [t.reward for t in valid]
    metrics = {
        "reward": sum(rewards) / max(1, len(rewards)),
        "turns": sum(len(t.turns) for t in trajectories) / count,
        "tokens_per_episode": sum(t.num_model_tokens for t in trajectories) / count,
        "episodes": len(trajectories),
        "valid_frac": len(valid) / count,
        "groups_used_frac": sum(len({t.reward for t in g.valid}) > 1 for g in groups) / max(1, len(groups)),
        **{f"groups_{fate}": sum(fate in group.fates for group in groups) for fate in ("resampled", "dropped")},
        "groups_trained": len(rollout.groups),
        **{f"groups_{fate}": len(unused) for fate, unused in rollout.unused.items()},
        "env_s": sum(turn.env_s for turn in turns) / max(1, len(turns)),
    }
    metrics |= {f"end/{reason}": number / max(1, len(rollout.played)) for reason, number in sorted(ends.items())}
    metrics |= {f"tool/{outcome}": number / max(1, len(turns)) for outcome, number in sorted(outcomes.items())}
    metrics |= {
        f"reward_after_turn/{n}": sum(t.reward for t in valid if len(t.turns) == n) / max(1, len(valid))
        for n in range(1, max_turns + 1)
    }
    return (
        metrics
        | length_metrics(trajectories)
        | time_metrics(rollout.played, seconds)
        | staleness_metrics([t for group in rollout.groups for t in group.valid], version)
    )


def length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean, 95th percentile and maximum of prompts, model tokens and whole streams, in tokens."""
    lengths = {
        "prompt": [t.prompt_length for t in trajectories],
        "model": [t.num_model_tokens for t in trajectories],
        "stream": [len(t.ids_T) for t in trajectories],
    }
    metrics: dict[str, float] = {}
    for name, values in lengths.items():
        values_N = np.array(values or [0])
        metrics[f"length/{name}_mean"] = float(values_N.mean())
        metrics[f"length/{name}_p95"] = float(np.quantile(values_N, 0.95))
        metrics[f"length/{name}_max"] = float(values_N.max())
    return metrics


def time_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Return throughput over the rollout's seconds, and where its episodes' own time went.

    Shares are of the sum of all episodes' durations, which overlap: `engine_time_frac` waiting for the model (its queue
    included), `env_time_frac` in the environment, `check_time_frac` in the checks of the stream, and `loop_time_frac`
    all else. `cache_hit_frac` is the share of all tokens given to the engine, turn after turn, that it had kept.
    """
    turns = [turn for t in trajectories for turn in t.turns]
    spent = {
        "engine": sum(t.timing.engine_s for t in trajectories),
        "env": sum(t.timing.env_s for t in trajectories),
        "check": sum(t.timing.check_s for t in trajectories),
    }
    total = sum(t.timing.total_s for t in trajectories)
    shares = {f"{name}_time_frac": part / total if total else 0.0 for name, part in spent.items()}
    given = sum(turn.start for turn in turns)
    return shares | {
        "loop_time_frac": max(0.0, 1 - sum(shares.values())) if total else 0.0,
        "rollout_tokens_per_s": sum(t.num_model_tokens for t in trajectories) / max(seconds, 1e-9),
        "rollout_turns_per_s": len(turns) / max(seconds, 1e-9),
        "cache_hit_frac": sum(turn.num_cached for turn in turns) / given if given else 0.0,
    }


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return how many versions old the weights were that wrote the tokens: mean over tokens, and maximum."""
    runs = [(version - old, count) for t in trajectories for turn in t.turns for old, count in turn.versions if count]
    tokens = sum(count for _, count in runs)
    return {
        "staleness_mean": sum(age * count for age, count in runs) / max(1, tokens),
        "staleness_max": max((age for age, _ in runs), default=0),
    }


def tool_outcomes(turn: Turn) -> list[str]:
    """Return what became of each tool call of a turn ("ok", "malformed", "unknown_tool", ...), or "none" for no call.

    Nothing where the environment does not report its calls: those made with `ToolEnv` do.
    """
    calls = turn.info.get("tool_calls")
    if not isinstance(calls, list):
        return []
    outcomes = [call.get("outcome") for call in calls if isinstance(call, dict)]
    return [outcome for outcome in outcomes if isinstance(outcome, str)] or ["none"]


class MetricsLog:
    """Writes every step's numbers to `metrics.jsonl` and all trackers; each line is on disk when `write` returns.

    With `steps_done`, the file holds the rows of those steps, which are the first of `rows`, and trackers go on from
    there. A tracker that fails is reported once and dropped: the file has everything.

    Example::

        log = MetricsLog(Path("runs/x"), config={"seed": 0}, trackers=("tensorboard",))
        log.write(1, {"reward": 0.4}, stats)
        log.close()

    Raises:
        UserError: a tracker cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        trackers: Sequence[TrackerName] = (),
        project: str = "trueturn",
        steps_done: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        self.path = folder / METRICS
        self._trackers = open_trackers(trackers, TrackedRun(folder, config, project, steps_done))
        self._report = report
        self._file = self.path.open("a", encoding="utf-8")
        self.rows: list[dict[str, float]] = [json.loads(line) for line in self.path.read_text().splitlines()]
        assert len(self.rows) == steps_done, (len(self.rows), steps_done)

    def write(self, step: int, metrics: Mapping[str, float], stats: StepStats | None = None) -> dict[str, float]:
        """Add one step; return the row written."""
        row = {"step": float(step), **metrics, **(stats.row() if stats else {})}
        self.rows.append(row)
        self._file.write(json.dumps({**row, "step": step}) + "\n")
        self._file.flush()
        self._each(lambda tracker: tracker.write(step, row))
        return row

    def size(self) -> int:
        """Return the bytes of `metrics.jsonl`, which are on disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def close(self) -> None:
        """Close the file and all trackers."""
        self._file.close()
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, action: Callable[[Tracker], None]) -> None:
        """Do something with every tracker; drop those with which it fails."""
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # of a library: no network, a full disk; no reason to lose a run
                del self._trackers[name]
                reason = f"{type(error).__name__}: {error}"
                self._report(f"{name} failed and gets no more numbers, {self.path.name} has them: {reason:.300}")


def draw_curve(
    rows: Sequence[Mapping[str, float]], before: float | None, after: float | None, path: Path, title: str
) -> None:
    """Draw reward and KL over the steps, with held-out accuracy before and after where it is known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    rewards = [row["reward"] for row in rows]
    means = [sum(rewards[max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(len(rewards))]
    axes.plot(steps, rewards, color="C0", alpha=0.3, lw=1)
    axes.plot(steps, means, color="C0", label="training reward, mean of 10 steps")
    if before is not None and after is not None:
        ends = [0, max([*steps, 1])]
        axes.plot(ends, [before, after], "o--", color="C2", label="held-out accuracy, before and after")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    other = axes.twinx()
    other.semilogy(steps, [max(row.get("rollout_train_kl", 0.0), 1e-16) for row in rows], ":", color="C3", lw=1)
    other.set_ylabel("rollout_train_kl (dotted)", color="C3")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
