"""Log-probs of episodes that wait for the trainer's: kept while they are few, so that most files are read once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 64 * 2**20


class Waiting:
    """Keeps arrays by episode; the oldest are given up where all are more than `max_bytes`.

    Example::

        waiting = Waiting()
        waiting.put(3, [-0.5, None])
        waiting.take(3)     # array([-0.5, nan]); None the next time
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[int, NDArray[np.float64]] = OrderedDict()

    def put(self, index: int, logprobs: Sequence[float | None]) -> None:
        """Keep an episode's log-probs."""
        self.take(index)
        self._kept[index] = logprobs_N = np.array(logprobs, dtype=np.float64)
        self.num_bytes += logprobs_N.nbytes
        while self.num_bytes > self.max_bytes:
            self.take(next(iter(self._kept)))

    def take(self, index: int) -> NDArray[np.float64] | None:
        """Return what is kept of an episode, and keep it no longer; None where nothing is."""
        kept = self._kept.pop(index, None)
        self.num_bytes -= 0 if kept is None else kept.nbytes
        return kept
