"""Compares a run with the recorded run whose rollouts it trained on: metrics and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from agents.cli.text import one_line
from envs.config.settings import FieldPath, changed, flag_of, is_under, leaves
from trainer.config.run import RunConfig
from trainer.config.sources import INHERITED
from trainer.types import StepStats

#: Metrics of the objective, besides the fields of `StepStats`.
OBJECTIVE = ("clip_frac", "ratio_mean", "correction_mean", "correction_clipped_frac", "ref_kl")
_METRICS = (*(f.name for f in fields(StepStats) if f.name not in ("kl_by_turn", "objective", "logprobs")), *OBJECTIVE)
#: Named first in a message; the others are counted.
_FIRST = ("loss", "grad_norm", "rollout_train_kl", "entropy")
MAX_SHOWN = 6
#: Settings that change what a step computes from its groups.
_RELATED = (*INHERITED, ("model", "model"), ("model", "device"), ("cluster", "num_gpus"), ("cluster", "num_learners"))


@dataclass(frozen=True)
class Comparison:
    """How far two runs are equal, to the bit.

    `differing` maps each metric of the first differing step to its two values, there and here; None is a missing one.

    Example::

        compare([{"step": 1, "loss": 0.5}], [{"step": 1, "loss": 0.25}])
        # Comparison(num_steps=1, num_equal=0, num_figures=1, differing={"loss": (0.5, 0.25)})
    """

    num_steps: int
    num_equal: int
    num_figures: int
    differing: Mapping[str, tuple[float | None, float | None]]

    def lines(self, other: str) -> list[str]:
        """Return the result as lines to print; `other` names the run compared with."""
        if not self.num_figures:
            return [f"against {other}: there are no figures of training to compare with"]
        if not self.differing:
            named = ", ".join(_FIRST)
            if self.num_steps > 1:
                steps = f"all {self.num_steps} steps"
            else:
                steps = "the step"
            return [f"against {other}: {named} and all {self.num_figures} figures are equal to the bit in {steps}"]
        if self.num_equal == 1:
            same = "the first step"
        else:
            same = f"the first {self.num_equal} steps"
        if self.num_equal:
            before = f"equal to the bit in {same}; "
        else:
            before = ""
        shown = sorted(self.differing.items(), key=lambda item: item[0] not in _FIRST)
        if len(shown) > MAX_SHOWN:
            more = f", and {len(shown) - MAX_SHOWN} more figures"
        else:
            more = ""
        parts = [f"{name} {_pair(there, here)}" for name, (there, here) in shown[:MAX_SHOWN]]
        return [f"against {other}: {before}step {self.num_equal + 1} differs: {'; '.join(parts)}{more}"]


def compare(there: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare the training metrics of some steps with those of the same steps of another run."""
    num_figures = 0
    for number, (other, own) in enumerate(zip(there, here, strict=False)):
        names = training_metrics(other)
        num_figures = max(num_figures, len(names))
        if not names:
            continue
        names = list(dict.fromkeys((*names, *training_metrics(own))))
        pairs = {name: (other.get(name), own.get(name)) for name in names}
        if differing := {name: pair for name, pair in pairs.items() if not _is_same(*pair)}:
            return Comparison(min(len(there), len(here)), number, num_figures, differing)
    return Comparison(min(len(there), len(here)), min(len(there), len(here)), num_figures, {})


def training_metrics(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the training metrics in a line of metrics: those of `StepStats.row()`."""
    return [name for name in row if name in _METRICS or name.startswith("rollout_train_kl/")]


def other_settings(config: RunConfig, base: RunConfig) -> list[str]:
    """Return the settings that differ between two runs and change what a step computes.

    Example: `["--lr 0.0001 (there 5e-05)", "--no-scale-by-std"]`.
    """
    by_path: dict[FieldPath, Any] = dict(leaves(RunConfig))
    related = {path: pair for path, pair in changed(config, base).items() if is_under(path, _RELATED)}
    if config.optim.schedule == base.optim.schedule == "constant":
        related.pop(("steps",), None)
    return [_flag(flag_of(path[-1], by_path[path]), old, new) for path, (old, new) in related.items()]


def _flag(flag: str, old: object, new: object) -> str:
    """Return a flag as it is given here, with the other run's value."""
    if isinstance(new, bool):
        if new:
            return flag
        return f"--no-{flag.removeprefix('--')}"
    return f"{flag} {new} (there {one_line(str(old), 200)})"


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def _pair(there: float | None, here: float | None) -> str:
    if there is None or here is None:
        return f"{there} there, {here} here"
    return f"{there:.9g} there, {here:.9g} here ({abs(here - there):.1e} apart)"
