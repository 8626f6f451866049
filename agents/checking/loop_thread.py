"""An event loop on a thread of its own, so that a user's code that blocks it does not block the program."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as NotDone
from typing import Any, TypeVar

R = TypeVar("R")
#: How long a cancelled call may take to end, and an event loop to answer, in seconds.
GRACE_S = 2.0


class Hung(Exception):
    """A call has not ended in time; the message says whether it also keeps the event loop from running."""


class LoopThread:
    """Runs coroutines one after the other, each with a time limit.

    Example::

        loop = LoopThread()
        loop.run(engine.close(), limit_s=10)     # Hung after 12 seconds at most
        loop.stop()
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="event loop of the engine").start()

    def run(self, coroutine: Coroutine[Any, Any, R], limit_s: float) -> R:
        """Return what a coroutine returns, or raise what it raises.

        Raises:
            Hung: it did not end in time. It is cancelled, and may still be running.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(limit_s)
        except NotDone:
            if future.done():  # the coroutine's own TimeoutError
                raise
        future.cancel()
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        if answered.wait(GRACE_S):
            blocked = ""
        else:
            blocked = "; it blocks the event loop, so every other episode waits too"
        raise Hung(f"did not end within {limit_s:.0f} s{blocked}")

    def stop(self) -> None:
        """Cancel what still runs and end the thread, once no call blocks it."""
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(GRACE_S, self._loop.stop)
