"""Measures how long an engine, or one of its servers, has been writing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class BusyTime:
    """The seconds in which at least one request was under way.

    Example::

        busy = BusyTime()
        with busy.request():          # requests may overlap: two of 3 s that begin 1 s apart make 4 s
            ...
        busy.seconds
    """

    def __init__(self) -> None:
        self._num_requests = 0
        self._ended_s = 0.0
        self._since = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count the block as a request that is under way."""
        if not self._num_requests:
            self._since = time.perf_counter()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._ended_s += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        return self._ended_s + (time.perf_counter() - self._since if self._num_requests else 0.0)
