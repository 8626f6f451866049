"""Checks that engine and learner are one policy: the learner scores turns that the engine generated.

The engine generates real turns on the run's own problems, at the run's temperature. The learner takes them in a
training step with advantage 0: it returns its statistics and learns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.types import Trajectory
from envs.checks import Verdict, fault, ok, warning
from envs.execution.runner import last_line
from trainer.types import StepStats

#: KL in nats (k3, mean over model tokens). Above the first it is more than rounding, above the second another policy.
SUSPICIOUS_KL = 1e-3
DIFFERENT_KL = 1e-2


def check_agreement(stats: StepStats, tolerance: float) -> Verdict:
    """Return whether the engine's log-probs of its turns equal the learner's, with a mean gap below `tolerance`."""
    turns = ", ".join(f"{kl:.1g}" for kl in stats.kl_by_turn)
    found = (
        f"KL {stats.rollout_train_kl:.1e} over {stats.num_tokens} tokens (by turn {turns}), |d| mean "
        f"{stats.logprob_gap_mean:.1e}, p99 {stats.logprob_gap_p99:.1e}, max {stats.logprob_gap_max:.1e}"
    )
    fix = "see what is found of weights, sight, positions and image preprocessing; else look at the engine's dtype"
    is_finite = np.isfinite([stats.rollout_train_kl, stats.logprob_gap_mean]).all()
    if not is_finite or stats.rollout_train_kl > DIFFERENT_KL or stats.logprob_gap_mean > tolerance:
        return fault(f"engine and learner are not one policy: {found}", fix)
    if stats.rollout_train_kl > SUSPICIOUS_KL:
        return warning(found, fix)
    return ok(found)


def check_episodes(played: Sequence[Trajectory]) -> list[Verdict]:
    """Return a verdict on the episodes that broke; none if none broke."""
    broken = [trajectory for trajectory in played if not trajectory.end_reason.is_valid]
    if not broken:
        return []
    reason = broken[0].end_reason.value
    found = f"{len(broken)} of {len(played)} episodes broke, the first as {reason}: {last_line(broken[0].error):.200}"
    # A few problems may be broken; an engine that breaks the stream does so anywhere.
    if reason in ("invalid_stream", "aborted"):
        return [fault(found, "the engine's answers break the stream")]
    if len(broken) == len(played):
        return [fault(found, "see python -m envs.check")]
    return [warning(found, "see python -m envs.check")]
