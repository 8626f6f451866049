"""Computes the metrics of each step, and writes them to `metrics.jsonl` and to trackers."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from agents.recording.run_files import METRICS
from agents.recording.safe_files import read_lines
from agents.rollout.groups import StepRollout
from agents.types import Trajectory, Turn
from envs.contract import TOOL_FAULT
from envs.errors import UserError, first_line
from trainer.metrics.trackers import TrackedRun, Tracker, open_trackers
from trainer.types import StepStats

logger = logging.getLogger(__name__)

_ROW = TypeAdapter(dict[str, float | None])


#: Of a step's metrics, those that are also given for each environment of a mixture.
_BY_ENVIRONMENT = re.compile(
    "reward|turns|tokens_per_episode|episodes|valid_frac|groups_used_frac|groups_trained|end/.*"
)


def rollout_metrics(
    rollout: StepRollout, max_turns: int, seconds: float, env_ids: Collection[str] = ()
) -> dict[str, float]:
    """Return the metrics of one step's rollout, which took `seconds`.

    `env_ids` are the environments of a mixture: each has some of the metrics for itself, as `env/ID/reward`.

    - `reward` and the like: means over the valid episodes of all complete groups, filtered and surplus ones included.
    - `reward/NAME`: the value of each reward function, before its weight.
    - `turn_reward/N`: where turns have rewards, the mean of those of turn N.
    - `streams`: token streams an episode, where any has more than one; `length/stream_mean` is that of one stream.
    - `groups_used_frac`: the share of groups whose rewards differ, so that something can be learnt from them.
    - `groups_resampled`, `groups_dropped`: groups with fewer than two valid episodes, played again or given up.
    - `end/REASON`: the share of all episodes, aborted and discarded ones included.
    - `tool/OUTCOME`: tool calls per turn of complete groups. `tool_fault/TOOL`: those that raised, hung or ended the
      process, tool by tool.
    - `curriculum/POOL`: the training problems that are solved, learnable, unsolved and unseen, with `--curriculum`.
    """
    groups = (*rollout.groups, *rollout.filtered, *rollout.surplus)
    trajectories = [t for group in groups for t in group.trajectories]
    valid = [t for t in trajectories if t.end_reason.is_valid]
    turns = [turn for t in trajectories for turn in t.turns]
    ends = Counter(t.end_reason.value for t in rollout.played)
    # Aborted and discarded episodes are in no mean: nobody trains on them.
    outcomes = Counter(outcome for turn in turns for outcome in tool_outcomes(turn))
    faults = Counter(name for turn in turns for name in faulty_tools(turn))
    # A step whose episodes were all aborted has numbers too.
    count = max(1, len(trajectories))
    # A broken episode's reward of 0 would pass for a bad answer.
    rewards = [t.reward for t in valid]
    metrics = {
        "reward": sum(rewards) / max(1, len(rewards)),
        "turns": sum(len(t.turns) for t in trajectories) / count,
        "tokens_per_episode": sum(t.num_model_tokens for t in trajectories) / count,
        "episodes": len(trajectories),
        "valid_frac": len(valid) / count,
        "groups_used_frac": sum(len({t.reward for t in g.valid}) > 1 for g in groups) / max(1, len(groups)),
        **{f"groups_{what}": sum(what in group.outcomes for group in groups) for what in ("resampled", "dropped")},
        "groups_trained": len(rollout.groups),
        **{f"groups_{what}": len(unused) for what, unused in rollout.unused.items()},
        "env_s": sum(turn.env_s for turn in turns) / max(1, len(turns)),
    }
    num_streams = sum(1 + len(t.later) for t in trajectories)
    # Most environments have one stream an episode, and no row for it.
    if num_streams > len(trajectories):
        metrics["streams"] = num_streams / count
    for name in dict.fromkeys(name for t in valid for name in t.rewards):
        values = [t.rewards[name] for t in valid if name in t.rewards]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    metrics |= {f"curriculum/{pool}": size for pool, size in rollout.pools.items()}
    metrics |= {f"end/{reason}": number / max(1, len(rollout.played)) for reason, number in sorted(ends.items())}
    metrics |= {f"tool/{outcome}": number / max(1, len(turns)) for outcome, number in sorted(outcomes.items())}
    metrics |= {f"tool_fault/{name}": number / max(1, len(turns)) for name, number in sorted(faults.items())}
    # Few environments reward turns; the others would have rows of zeros.
    if any(turn.reward for t in valid for turn in t.turns):
        for n in range(1, max_turns + 1):
            earned = [t.turns[n - 1].reward for t in valid if len(t.turns) >= n]
            metrics[f"turn_reward/{n}"] = sum(earned) / max(1, len(earned))
    for env_id in env_ids:
        # Without ids, so that it goes no deeper.
        own = rollout_metrics(rollout.of_environment(env_id), max_turns, seconds)
        metrics |= {f"env/{env_id}/{name}": own[name] for name in own if _BY_ENVIRONMENT.fullmatch(name)}
    return (
        metrics
        | length_metrics(trajectories)
        | time_metrics(rollout.played, seconds)
        | staleness_metrics([t for g in rollout.groups if not g.is_dropped for t in g.valid], rollout.weight_version)
    )


def length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean, 95th percentile and maximum of the lengths of first prompts, model turns and streams, in tokens."""
    lengths = {
        "prompt": [t.prompt_length for t in trajectories],
        "model": [t.num_model_tokens for t in trajectories],
        "stream": [len(stream.ids_T) for t in trajectories for stream in t.streams],
    }
    metrics: dict[str, float] = {}
    for name, values in lengths.items():
        values_N = np.array(values or [0])
        metrics[f"length/{name}_mean"] = float(values_N.mean())
        metrics[f"length/{name}_p95"] = float(np.quantile(values_N, 0.95))
        metrics[f"length/{name}_max"] = float(values_N.max())
    return metrics


def time_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Return the throughput of a rollout that took `seconds`, and how its episodes spent their time.

    Shares refer to the sum of all episodes' durations, which overlap: `engine_time_frac` waiting for the engine (with
    its queue), `env_time_frac` in the environment, `check_time_frac` in the checks of the stream, and `loop_time_frac`
    everything else. `cache_hit_frac` is the share of the tokens sent to the engine that were in its cache.
    """
    turns = [turn for t in trajectories for turn in t.turns]
    spent = {
        "engine": sum(t.timing.engine_s for t in trajectories),
        "env": sum(t.timing.env_s for t in trajectories),
        "check": sum(t.timing.check_s for t in trajectories),
    }
    # Episodes overlap, so this is more than the step took.
    total = sum(t.timing.total_s for t in trajectories)
    shares = {f"{name}_time_frac": part / total if total else 0.0 for name, part in spent.items()}
    # The engine is given the whole stream again in each turn.
    given = sum(turn.start for turn in turns)
    return shares | {
        "loop_time_frac": max(0.0, 1 - sum(shares.values())) if total else 0.0,
        "rollout_tokens_per_s": sum(t.num_model_tokens for t in trajectories) / max(seconds, 1e-9),
        "rollout_turns_per_s": len(turns) / max(seconds, 1e-9),
        "cache_hit_frac": sum(turn.num_cached for turn in turns) / given if given else 0.0,
    }


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return the age, in versions, of the weights that generated the tokens: mean, maximum, and each age's share."""
    tokens: Counter[int] = Counter()
    for turn in (turn for t in trajectories for turn in t.turns):
        # A turn may be written under several versions, where weights arrive meanwhile.
        tokens.update({version - old: count for old, count in turn.versions if count})
    total = max(1, tokens.total())
    return {
        "staleness/mean": sum(age * count for age, count in tokens.items()) / total,
        "staleness/max": max(tokens, default=0),
        **{f"staleness/{age}_frac": count / total for age, count in sorted(tokens.items())},
    }


def tool_outcomes(turn: Turn) -> list[str]:
    """Return the outcome of each tool call of a turn ("ok", "malformed", "unknown_tool", ...), or "none" for no call.

    The list is empty if the environment does not report its calls; a `ToolEnv` reports them.
    """
    if not isinstance(turn.info.get("tool_calls"), list):
        return []
    outcomes = [call.get("outcome") for call in _calls(turn)]
    return [outcome for outcome in outcomes if isinstance(outcome, str)] or ["none"]


def faulty_tools(turn: Turn) -> list[str]:
    """Return the tool of each call of a turn that was a fault, "unknown" if it cannot be told."""
    return [str(call.get("name") or "unknown") for call in _calls(turn) if call.get("outcome") == TOOL_FAULT]


def _calls(turn: Turn) -> list[dict[str, Any]]:
    calls = turn.info.get("tool_calls")
    if isinstance(calls, list):
        return [call for call in calls if isinstance(call, dict)]
    return []


class MetricsLog:
    """Writes the metrics of every step to `metrics.jsonl` and to all trackers.

    For a resumed run, the file already holds the rows of `steps_done` steps, and trackers continue from there. What is
    known only later, such as an evaluation of the step's weights, is added to the row. A tracker that fails or
    hangs is logged once and dropped: the file has everything.

    Example::

        log = MetricsLog(Path("runs/x"), config={"seed": 0}, trackers=("tensorboard",))
        log.write(1, {"reward": 0.4}, stats)
        log.add({"eval/with_tool/accuracy": 0.3})
        log.close()

    Raises:
        UserError: a tracker cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        trackers: Sequence[str] = (),
        project: str = "trueturn",
        steps_done: int = 0,
    ) -> None:
        self.path = folder / METRICS
        self._trackers = open_trackers(trackers, TrackedRun(folder, config, project, steps_done))
        self._file = self.path.open("a", encoding="utf-8")
        self._last_start = self.path.stat().st_size
        self.rows: list[dict[str, Any]] = list(read_rows(self.path))
        assert len(self.rows) == steps_done, (len(self.rows), steps_done)

    def write(self, step: int, metrics: Mapping[str, float], stats: StepStats | None = None) -> dict[str, float]:
        """Add one step; return the row written."""
        row = {"step": float(step), **metrics, **(stats.row() if stats else {})}
        self.rows.append(row)
        self._last_start = self.path.stat().st_size
        self._write_last()
        self._each(lambda tracker: tracker.write(step, row))
        return row

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the row of the last step."""
        row = self.rows[-1]
        row |= metrics
        # The row is written again with what was added: readers see one line for each step.
        self._file.truncate(self._last_start)
        self._write_last()
        self._each(lambda tracker: tracker.write(int(row["step"]), {"step": row["step"], **metrics}))

    def _write_last(self) -> None:
        row = self.rows[-1]
        self._file.write(json.dumps({**row, "step": int(row["step"])}) + "\n")
        self._file.flush()

    def size(self) -> int:
        """Return the size of `metrics.jsonl` in bytes, after it is safely on disk."""
        self._file.flush()
        # A checkpoint names this size; after a power cut the file must have it.
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def close(self) -> None:
        """Close the file and all trackers."""
        self._file.close()
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, action: Callable[[Tracker], None]) -> None:
        """Call an action on every tracker; drop trackers that fail."""
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # of a library, such as no network; a run must not end because of it
                del self._trackers[name]
                reason = f"{type(error).__name__}: {error}"
                logger.warning(f"{name} failed and gets no more numbers, {self.path.name} has them: {reason:.300}")


def peak_memory_gib() -> float:
    """Return the largest resident memory of this process so far."""
    # bytes there, KiB elsewhere
    if sys.platform == "darwin":
        unit = 1
    else:
        unit = 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def read_rows(path: Path) -> list[dict[str, float | None]]:
    """Return the metrics of every complete step. Raises `UserError` where a line has anything but numbers."""
    rows: list[dict[str, float | None]] = []
    for number, (_, line) in enumerate(read_lines(path), 1):
        try:
            # A stranger's file: what draws and compares expects numbers.
            rows.append(_ROW.validate_json(line))
        except ValidationError as error:
            fix = "take the file from a copy of the run folder, or repair the line"
            raise UserError(f"{path} line {number}", "must be an object of numbers", first_line(error), fix) from error
    return rows
