"""Threads for calls that may never return: functions come in and run, each soon, and on a thread of its own meanwhile.

A few threads serve quick calls, which is faster than one for each of a thousand. Where calls wait because those threads
are busy for long, or for ever, more are started. All are daemons: one that hangs is left behind and does not keep the
program from ending.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

NUM_EAGER = 4
PATIENCE_S = 0.005
#: Calls that a thread takes in that time while all is well; calls of more than about a millisecond are slow.
QUICK_CALLS = 4


class DaemonThreads:
    """As many threads as the calls need.

    Example::

        threads = DaemonThreads()
        threads.submit(work)           # `work` takes nothing and must not raise
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._num_threads = self._num_idle = self._num_taken = 0

    def submit(self, work: Callable[[], Any]) -> None:
        """Let `work` start soon; never waits."""
        self._calls.put(work)
        if self._num_idle == 0:
            if self._num_threads < NUM_EAGER:
                self._start(1)
            else:
                self._busy.set()

    def _start(self, count: int) -> None:
        with self._lock:
            if self._num_threads == 0:
                threading.Thread(target=self._watch, daemon=True, name="environments").start()
            self._num_threads += count
        for _ in range(count):
            threading.Thread(target=self._serve, daemon=True, name="environment").start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._num_idle += 1
            work = self._calls.get()
            with self._lock:
                self._num_idle -= 1
                self._num_taken += 1
            work()

    def _watch(self) -> None:
        """Start more threads, twice as many each time, while calls wait for slow ones."""
        while True:
            self._busy.wait()
            taken = self._num_taken
            time.sleep(PATIENCE_S)
            num_waiting = self._calls.qsize()
            if num_waiting == 0:
                self._busy.clear()
            elif self._num_taken - taken < QUICK_CALLS * self._num_threads:
                self._start(min(num_waiting, self._num_threads))
