"""Garbage collection for a program that keeps much and makes much: called once, when all that stays is loaded."""

from __future__ import annotations

import gc

#: How many objects more than have died are made before the youngest are looked through; Python's own number is 700.
YOUNG_OBJECTS = 20_000


def settle_heap() -> None:
    """Leave all objects that exist now out of later collections, and collect less often.

    The libraries and the model are some 350,000 objects, and each full collection walks all of them: 0.2 s in which no
    episode goes on. With 1,024 episodes in flight that is a third of the agent loop's time (`benchmarks.agent_loop`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
