"""Caches after new weights: what an engine has read and kept with older ones must not be used again.

Three ways to reuse it are tried after the learner has moved: the same stream scored again (encoded pictures), the same
prompt continued in a new session (the prefix cache), and a session that was open over the change (its own keys and
values). All must give the learner's new log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.diagnosis.finding import Verdict, fault, ok, warning

#: The learner must have moved by this, in nats on the text of the stream, for the check to tell anything.
LEAST_MOVE = 0.1
#: The engine may be off the new weights by what it was off the old ones, this many times, or this share of the move.
NOISE_TIMES, SHARE = 5.0, 0.1
LEAST_GAP = 1e-3


@dataclass(frozen=True)
class Followed:
    """Mean |d| in nats between engine and learner: before the push, and after it for each way to reuse a cache.

    `moved` is how far the learner has come. `is_tower_trained` says whether the vision tower came along.

    Example: an engine with stale pictures has `Followed(before=1e-7, moved=1.9, after={"scored again": 0.8, ...})`.
    """

    before: float
    moved: float
    after: dict[str, float]
    is_tower_trained: bool = True


def check_followed(followed: Followed) -> Verdict:
    """Return whether the engine follows new weights in all that it had read before.

    >>> check_followed(Followed(1e-7, 1.9, {"scored again": 0.8, "new session": 2e-7})).found
    'after a push that moved the learner by 1.9 nats the engine is off by 0.8 (scored again), 2e-07 (new session)'
    """
    shown = ", ".join(f"{gap:.1g} ({way})" for way, gap in followed.after.items())
    found = f"after a push that moved the learner by {followed.moved:.2g} nats the engine is off by {shown}"
    gaps = list(followed.after.values())
    most = max(LEAST_GAP, NOISE_TIMES * followed.before, SHARE * min(followed.moved, 1.0))
    if not np.isfinite([followed.moved, *gaps]).all() or max(gaps) > most:
        return fault(f"stale: {found}", "empty the engine's prefix and image caches with every push")
    if followed.moved < LEAST_MOVE:
        return warning(f"{found}: too little to tell", "look at rollout_train_kl of the first steps")
    return ok(found if followed.is_tower_trained else f"{found}; the vision tower is not trained and stayed")
