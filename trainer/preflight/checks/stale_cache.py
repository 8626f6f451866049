"""Checks that an engine uses no cache of older weights after new weights were pushed.

Three caches are tried after the learner's weights have changed: encoded images (the same stream is scored again), the
prefix cache (the same prompt is continued in a new session), and the keys and values of a session that was open during
the push. In all three, the engine must give the learner's new log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envs.checks import Verdict, fault, ok, warning

#: The learner's log-probs of the stream must move by this, in nats, for the check to mean anything.
LEAST_MOVE = 0.1
#: After the push, the gap may be this many times the gap before it, or this share of the learner's move. But an engine
#: whose gap was float32's rounding has no business with either.
NOISE_TIMES = 5.0
SHARE = 0.1
EXACT = 1e-5
LEAST_GAP = 1e-3


@dataclass(frozen=True)
class CacheGaps:
    """Mean |engine - learner| in nats before a push, and after it for each use of a cache.

    `moved` is how far the learner's own log-probs moved. `is_tower_trained` says whether the vision tower changed too.

    Example: an engine with stale images has `CacheGaps(before=1e-7, moved=1.9, after={"scored again": 0.8, ...})`.
    """

    before: float
    moved: float
    after: dict[str, float]
    is_tower_trained: bool = True


def check_caches(gaps: CacheGaps) -> Verdict:
    """Return whether the engine gives the learner's new log-probs for everything that it had read before.

    >>> check_caches(CacheGaps(1e-7, 1.9, {"scored again": 0.8, "new session": 2e-7})).found
    'after a push that moved the learner by 1.9 nats the engine is off by 0.8 (scored again), 2e-07 (new session)'
    """
    shown = ", ".join(f"{gap:.1g} ({use})" for use, gap in gaps.after.items())
    found = f"after a push that moved the learner by {gaps.moved:.2g} nats the engine is off by {shown}"
    after = list(gaps.after.values())
    if gaps.before > EXACT:
        noise = max(NOISE_TIMES * gaps.before, SHARE * min(gaps.moved, 1.0))
    else:
        noise = 0.0
    most = max(LEAST_GAP, noise)
    if not np.isfinite([gaps.moved, *after]).all() or max(after) > most:
        return fault(f"stale: {found}", "empty the engine's prefix and image caches with every push")
    if gaps.moved < LEAST_MOVE:
        return warning(f"{found}: too little to tell", "look at rollout_train_kl of the first steps")
    return ok(found if gaps.is_tower_trained else f"{found}; the vision tower is not trained and stayed")
