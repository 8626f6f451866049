"""Threads for calls that may never return: functions come in and run, each soon, and on a thread of its own meanwhile.

Two threads serve quick calls, which is several times faster than one for each of a thousand. Where calls wait because
those threads are busy for long, or for ever, more take part, until nothing waits any more. All are daemons: one that
hangs is left behind and does not keep the program from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

R = TypeVar("R")
logger = logging.getLogger(__name__)

NUM_EAGER = 2
PATIENCE_S = 0.01
#: Calls that a thread takes in that time while all is well; calls of more than a few milliseconds are slow.
QUICK_CALLS = 4
SLOW_S = 0.05


class DaemonThreads:
    """As many threads at work as the calls need.

    Example::

        threads = DaemonThreads()
        threads.submit(work)           # `work` takes nothing and must not raise
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], Any]] = deque()
        self._idle: list[SimpleQueue[None]] = []  # what wakes a thread that waits, the latest last
        self._began: dict[int, float] = {}  # when each thread at work began its call
        self._num_allowed, self._num_taken = NUM_EAGER, 0
        self._blocked = threading.Event()
        self._watcher: threading.Thread | None = None

    def submit(self, work: Callable[[], Any]) -> None:
        """Let `work` start soon; never waits."""
        with self._lock:
            self._waiting.append(work)
            if len(self._began) < self._num_allowed:
                self._wake(1)
            elif not self._blocked.is_set():
                self._watch_out()

    def _wake(self, count: int) -> None:
        """Put so many more threads to work, idle ones first; the lock is held."""
        for _ in range(count):
            bell = self._idle.pop() if self._idle else None
            if bell is None:
                bell = SimpleQueue()
                thread = threading.Thread(target=self._serve, args=(bell,), daemon=True, name="environment")
                try:
                    thread.start()
                except RuntimeError:  # the system has no more; those at work take what waits
                    logger.warning("no thread can be started for an environment's call")
                    self._watch_out()
                    return
            self._began[id(bell)] = time.monotonic()
            bell.put(None)

    def _serve(self, bell: SimpleQueue[None]) -> None:
        me = id(bell)
        while True:
            bell.get()
            while (work := self._next(me, bell)) is not None:
                try:
                    work()
                except BaseException:  # `work` must not raise; if it does, the thread is still needed
                    logger.exception("a call on a thread raised")
                del work  # what it holds is not kept while the thread waits

    def _next(self, me: int, bell: SimpleQueue[None]) -> Callable[[], Any] | None:
        """Return the thread's next call; None, with the thread noted as idle, where there is none for it."""
        now = time.monotonic()
        with self._lock:
            if now - self._began[me] > SLOW_S:  # it was allowed for that it was slow
                self._num_allowed = max(NUM_EAGER, self._num_allowed - 1)
            if self._waiting and len(self._began) <= self._num_allowed:
                self._began[me] = now
                self._num_taken += 1
                return self._waiting.popleft()
            del self._began[me]
            self._idle.append(bell)
            return None

    def _watch_out(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, daemon=True, name="environments")
            self._watcher.start()
        self._blocked.set()

    def _watch(self) -> None:
        """While calls wait for slow ones, put more threads to work, several times as many each time."""
        while True:
            self._blocked.wait()
            num_taken = self._num_taken
            time.sleep(PATIENCE_S)
            with self._lock:
                num_working = len(self._began)
                if not self._waiting:
                    late = time.monotonic() - SLOW_S
                    self._num_allowed = NUM_EAGER + sum(began < late for began in self._began.values())
                    self._blocked.clear()
                elif self._num_taken - num_taken < QUICK_CALLS * num_working:
                    more = min(len(self._waiting), max(1, 3 * num_working))
                    self._num_allowed = num_working + more
                    self._wake(more)


_THREADS = DaemonThreads()


class CallTimeout(Exception):
    """The call took longer than its limit; its thread is left behind."""


class _Waiting:
    """The calls that one event loop waits for.

    The loop is woken once for all results that came meanwhile, and has one timer for all calls with one limit: a system
    call and a timer for each would take most of the time of quick calls.
    """

    def __init__(self) -> None:
        self._came: deque[tuple[asyncio.Future[Any], bool, Any]] = deque()
        self._is_awake = False
        self._deadlines: dict[float, dict[asyncio.Future[Any], float]] = {}  # by limit, the first to end in front
        self._has_timer: set[float] = set()

    def put(self, future: asyncio.Future[Any], is_error: bool, value: object) -> None:
        """Hand over the result of a call, or its error; from any thread."""
        self._came.append((future, is_error, value))
        loop = future.get_loop()
        if not self._is_awake and not loop.is_closed():
            self._is_awake = True
            loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._is_awake = False  # before the deque is read, so that nothing stays in it unseen
        while self._came:
            future, is_error, value = self._came.popleft()
            if not future.done():
                (future.set_exception if is_error else future.set_result)(value)

    async def result(self, future: asyncio.Future[R], limit_s: float) -> R:
        """Wait for a call; raise CallTimeout where it takes longer than the limit."""
        loop = future.get_loop()
        deadlines = self._deadlines.setdefault(limit_s, {})
        deadlines[future] = loop.time() + limit_s
        if limit_s not in self._has_timer:
            self._has_timer.add(limit_s)
            loop.call_later(limit_s, self._expire, loop, limit_s)
        try:
            return await future
        finally:
            deadlines.pop(future, None)

    def _expire(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """End the calls whose time is up, and look again when that of the next one is."""
        deadlines = self._deadlines[limit_s]
        for future, deadline in list(deadlines.items()):
            if deadline > loop.time():
                loop.call_at(deadline, self._expire, loop, limit_s)
                return
            if not future.done():
                future.set_exception(CallTimeout())
        self._has_timer.remove(limit_s)


#: Of each loop its own; one that is gone takes its calls along.
_WAITING: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting] = WeakKeyDictionary()


async def call_on_thread(function: Callable[..., R], *args: object, limit_s: float | None = None) -> R:
    """Run on a thread, which is left behind where nobody waits for it any more.

    Raises:
        CallTimeout: it took longer than the limit; besides, whatever the function raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()
    waiting = _WAITING.setdefault(loop, _Waiting())

    def work() -> None:
        try:
            outcome = (False, function(*args))
        except BaseException as error:  # handed to whoever waits
            outcome = (True, fit_for_a_loop(error))
        waiting.put(future, *outcome)

    _THREADS.submit(work)
    return await (future if limit_s is None else waiting.result(future, limit_s))


def fit_for_a_loop(error: BaseException) -> Exception:
    """Return an exception that may pass through an event loop: not SystemExit, and no StopIteration in a future."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError("".join(traceback.format_exception_only(error)).strip())
