"""Threads for calls that may never return: functions come in and run, each soon, and on a thread of its own meanwhile.

A few threads serve quick calls, which is faster than one for each of a thousand. Where calls wait because those threads
are busy for long, or for ever, more are started. All are daemons: one that hangs is left behind and does not keep the
program from ending.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

NUM_EAGER = 2
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
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Callable[[], Any]]] = []  # the inboxes of threads that wait, the latest last
        self._waiting: deque[Callable[[], Any]] = deque()  # calls for which there was no such thread
        self._blocked = threading.Event()
        self._num_threads = self._num_taken = 0

    def submit(self, work: Callable[[], Any]) -> None:
        """Let `work` start soon; never waits."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(work)
                return
            self._waiting.append(work)
        if self._num_threads < NUM_EAGER:
            self._start(1)
        else:
            self._blocked.set()

    def _start(self, count: int) -> None:
        if self._num_threads == 0:
            threading.Thread(target=self._watch, daemon=True, name="environments").start()
        self._num_threads += count
        for _ in range(count):
            threading.Thread(target=self._serve, daemon=True, name="environment").start()

    def _serve(self) -> None:
        inbox: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        while True:
            with self._lock:
                self._num_taken += 1
                work = self._waiting.popleft() if self._waiting else None
                if work is None:
                    self._idle.append(inbox)
            (work or inbox.get())()
            work = None  # what it holds is not kept while the thread waits

    def _watch(self) -> None:
        """Start more threads, twice as many each time, while calls wait for slow ones."""
        while True:
            self._blocked.wait()
            num_taken = self._num_taken
            time.sleep(PATIENCE_S)
            num_waiting = len(self._waiting)
            if num_waiting == 0:
                self._blocked.clear()
            elif self._num_taken - num_taken < QUICK_CALLS * self._num_threads:
                self._start(min(num_waiting, self._num_threads))
