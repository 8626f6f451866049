"""Threads for calls that may never return: a function in; its outcome, whenever it comes, to a callback out.

A thread whose call ended takes the next one. A thread whose call hangs is left behind: it is a daemon and does not keep
the program from ending.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class DaemonThreads:
    """As many threads as there are calls running, each kept for the next call.

    Example::

        threads = DaemonThreads()
        threads.submit(work)           # at once, on a thread; `work` takes nothing and must not raise
    """

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Callable[[], Any]]] = deque()

    def submit(self, work: Callable[[], Any]) -> None:
        """Start `work` at once; never waits."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), daemon=True, name="environment").start()
        inbox.put(work)

    def _serve(self, inbox: SimpleQueue[Callable[[], Any]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)
