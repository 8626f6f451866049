"""Checks that engine and learner are one policy: the learner scores turns that the engine generated.

The engine generates real turns on the run's own problems, at the run's temperature. The learner takes them in a
training step with advantage 0: it returns its statistics and learns nothing. Then both score one stream token by token,
which shows where they differ: before an image, after it, or in the model's turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agents.types import Trajectory
from envs.checks import Verdict, fault, ok, warning
from envs.execution.runner import last_line
from trainer.types import StepStats

#: KL in nats (k3, mean over model tokens). Above the first it is more than rounding, above the second another policy.
SUSPICIOUS_KL = 1e-3
DIFFERENT_KL = 1e-2
#: The verdict names the parts of a stream if one of them differs by more than this, in nats.
NAMED_GAP = 0.05


def check_agreement(stats: StepStats, tolerance: float, where: str = "") -> Verdict:
    """Return whether the engine's log-probs of its turns equal the learner's.

    `tolerance` is the run's limit on the mean gap; `where` says in which parts of a stream they differ.
    """
    turns = ", ".join(f"{kl:.1g}" for kl in stats.kl_by_turn)
    found = (
        f"KL {stats.rollout_train_kl:.1e} over {stats.num_tokens} tokens (by turn {turns}), |d| mean "
        f"{stats.logprob_gap_mean:.1e}, p99 {stats.logprob_gap_p99:.1e}, max {stats.logprob_gap_max:.1e}"
    )
    if not stats.num_tokens:
        return warning("the engine wrote no token", "raise --max-new-tokens")
    found += f"; {where}" if where else ""
    fix = "see what is found of weights, sight, positions and image preprocessing; else look at the engine's dtype"
    is_finite = np.isfinite([stats.rollout_train_kl, stats.logprob_gap_mean]).all()
    if not is_finite or stats.rollout_train_kl > DIFFERENT_KL or stats.logprob_gap_mean > tolerance:
        return fault(f"engine and learner are not one policy: {found}", fix)
    if stats.rollout_train_kl > SUSPICIOUS_KL:
        return warning(found, fix)
    return ok(found)


def check_episodes(played: Sequence[Trajectory]) -> Verdict | None:
    """Return a verdict on the episodes that broke; None if none broke."""
    broken = [trajectory for trajectory in played if not trajectory.end_reason.is_valid]
    if not broken:
        return None
    reason = broken[0].end_reason.value
    text = last_line(broken[0].error)
    found = f"{len(broken)} of {len(played)} episodes broke, the first as {reason}: {text:.200}"
    is_ours = any(trajectory.end_reason.value in ("invalid_stream", "aborted") for trajectory in broken)
    if is_ours:
        fix = "the engine's answers break the stream"
    else:
        fix = "see python -m envs.check"
    if is_ours or len(broken) == len(played):
        return fault(found, fix)
    return warning(found, fix)


def gaps_by_part(
    engine_T: NDArray[np.float32], learner_T: NDArray[np.float32], trajectory: Trajectory, image_token_id: int
) -> dict[str, float]:
    """Return the mean |engine - learner| over each part of a stream, in its order; empty parts are left out.

    Example: `{"prompt before the image": 0.0, "prompt after it": 0.31, "turn 1": 0.28}`.
    """
    ids_T = trajectory.ids_T
    is_text_T = ids_T != image_token_id
    places_T = np.arange(len(ids_T))
    if not is_text_T.all():
        first = int(np.argmin(is_text_T))
    else:
        first = len(ids_T)
    is_prompt_T = places_T < trajectory.prompt_length
    parts = {
        "prompt" if first == len(ids_T) else "prompt before the image": is_prompt_T & (places_T < first),
        "prompt after it": is_prompt_T & is_text_T & (places_T >= first),
    }
    parts |= {
        f"turn {number}": (places_T >= turn.start) & (places_T < turn.end)
        for number, turn in enumerate(trajectory.turns, 1)
    }
    gaps_T = np.abs(engine_T - learner_T)
    means = {name: gaps_T[mask_T[1:] & is_text_T[1:]] for name, mask_T in parts.items()}
    return {name: float(gaps.mean()) for name, gaps in means.items() if len(gaps)}


def describe_parts(parts: dict[str, float]) -> str:
    """Return the gaps of all parts as text; "" if none is larger than `NAMED_GAP`."""
    if not any(not gap <= NAMED_GAP for gap in parts.values()):
        return ""
    return "scored: " + ", ".join(f"{name} {gap:.2g}" for name, gap in parts.items())
