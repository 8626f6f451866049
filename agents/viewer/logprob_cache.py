"""Keeps the log-probs of recent episodes until their score arrives, so that most episodes are read only once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 64 * 2**20


class LogprobCache:
    """Keeps one array per episode; drops the oldest when all together exceed `max_bytes`.

    Example::

        cache = LogprobCache()
        cache.put(3, [-0.5, None])
        cache.pop(3)     # array([-0.5, nan]); None the next time
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._arrays: OrderedDict[int, NDArray[np.float64]] = OrderedDict()

    def put(self, index: int, logprobs: Sequence[float | None]) -> None:
        """Add an episode's log-probs."""
        self.pop(index)
        self._arrays[index] = logprobs_N = np.array(logprobs, dtype=np.float64)
        self.num_bytes += logprobs_N.nbytes
        while self.num_bytes > self.max_bytes:
            self.pop(next(iter(self._arrays)))

    def pop(self, index: int) -> NDArray[np.float64] | None:
        """Remove an episode's log-probs and return them; None if they are not in the cache."""
        found = self._arrays.pop(index, None)
        self.num_bytes -= 0 if found is None else found.nbytes
        return found
