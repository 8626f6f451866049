"""An event loop on a thread of its own, so that a user's code that blocks it does not block the program."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from envs.checks import Broken

R = TypeVar("R")
#: How long a cancelled call may take to end, and an event loop to answer, in seconds.
GRACE_S = 2.0


class LoopThread:
    """Runs coroutines one after the other, each for at most `limit_s`, until one hangs or `max_seconds` are over.

    Example::

        loop = LoopThread(limit_s=10, max_seconds=60)
        loop.run(engine.close())     # raises Broken after 12 seconds at most
        loop.stop()
    """

    def __init__(self, limit_s: float, max_seconds: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + max_seconds
        self._has_hung = False
        self._loop = asyncio.new_event_loop()
        # A daemon, because a thread that is blocked cannot be ended.
        threading.Thread(target=self._loop.run_forever, daemon=True, name="event loop of the engine").start()

    @property
    def is_over(self) -> bool:
        """Whether no check may begin any more."""
        return self._has_hung or time.monotonic() > self._end

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Return what a coroutine returns, or raise what it raises; `Broken` if it does not end in time."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        if wait([future], self.limit_s).done:
            return future.result()
        self._has_hung = True
        future.cancel()
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        found = f"did not end within {self.limit_s:.0f} s"
        if not answered.wait(GRACE_S):
            found += "; it blocks the event loop, so every other episode waits too"
        raise Broken(found, "return, or let others run meanwhile")

    def stop(self) -> None:
        """Cancel what still runs and end the thread, once no call blocks it."""
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        # Tasks need a moment to end after they were cancelled.
        self._loop.call_later(GRACE_S, self._loop.stop)
