"""Tunes Python's garbage collection for the agent loop."""

from __future__ import annotations

import gc

#: Python looks through the youngest objects once this many more were made than have died; its own number is 700.
YOUNG_OBJECTS = 20_000


def tune_garbage_collection() -> None:
    """Exclude all objects that exist now from later collections, and collect less often. Call it once all is loaded.

    The libraries and the model are some 350,000 objects, and every full collection walks all of them: 0.2 s in which no
    episode runs. With 1,024 episodes in flight that is a third of the agent loop's time (`benchmarks.agent_loop`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
