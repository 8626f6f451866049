"""Runs calls that may never return on threads, and lets an event loop, or a thread, wait for them with a time limit.

Two threads serve quick calls, which is several times faster than one thread per call. If calls wait because the threads
are blocked, more threads start until no call waits. All threads are daemons, so one that hangs does not keep the
program from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

R = TypeVar("R")
logger = logging.getLogger(__name__)

NUM_EAGER = 2
PATIENCE_S = 0.01
#: Calls that a thread finishes within PATIENCE_S if they are quick (a few milliseconds each).
QUICK_CALLS = 4
SLOW_S = 0.05


class DaemonThreads:
    """A thread pool that grows while calls are blocked.

    Example::

        threads = DaemonThreads()
        threads.submit(work)           # `work` takes nothing and must not raise
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], Any]] = deque()
        self._idle: list[SimpleQueue[None]] = []  # wakes an idle thread; the latest one is last
        self._began: dict[int, float] = {}  # when each working thread began its call
        self._num_allowed = NUM_EAGER
        self._num_taken = 0
        self._blocked = threading.Event()
        self._watcher: threading.Thread | None = None

    def submit(self, work: Callable[[], Any]) -> None:
        """Schedule `work` to start soon; return at once."""
        with self._lock:
            self._waiting.append(work)
            if len(self._began) < self._num_allowed:
                self._wake(1)
            elif not self._blocked.is_set():
                self._watch_out()

    def _wake(self, count: int) -> None:
        """Wake `count` more threads, idle ones first. The caller holds the lock."""
        for _ in range(count):
            bell = self._idle.pop() if self._idle else None
            if bell is None:
                bell = SimpleQueue()
                thread = threading.Thread(target=self._serve, args=(bell,), daemon=True, name="environment")
                try:
                    thread.start()
                except RuntimeError:  # no more threads; the working ones take the waiting calls
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
                except BaseException:  # `work` must not raise; if it does, keep the thread
                    logger.exception("a call on a thread raised")
                del work  # release what it holds while the thread waits

    def _next(self, me: int, bell: SimpleQueue[None]) -> Callable[[], Any] | None:
        """Return the thread's next call; if there is none, mark the thread as idle and return None."""
        now = time.monotonic()
        with self._lock:
            if now - self._began[me] > SLOW_S:  # it raised the limit because it was slow
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
        """While calls wait for blocked threads, wake more threads, up to four times as many in each round."""
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


class DaemonThread:
    """One thread that makes the calls it is given, in order. Whoever waits for one that hangs may give up.

    Example::

        thread = DaemonThread("tracker")
        answer = thread.begin(work)        # `work` takes nothing
        wait([answer], 120.0).done         # empty if it hangs; calls after it hang too
        thread.end()
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name=name).start()

    def begin(self, work: Callable[[], R]) -> Future[R]:
        """Schedule `work`, and return at once what will hold its value or its error."""
        answer: Future[R] = Future()
        self._calls.put((work, answer))
        return answer

    def end(self) -> None:
        """End the thread after the calls that were begun."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            work, answer = call
            try:
                answer.set_result(work())
            except BaseException as error:  # passed to whoever waits
                answer.set_exception(error)
            del call, work, answer  # release what they hold while the thread waits


_THREADS = DaemonThreads()


class CallTimeout(Exception):
    """The call exceeded its time limit; its thread is abandoned."""


class _LoopCalls:
    """The calls that one event loop waits for.

    One wake-up delivers all results that have arrived, and one timer serves all calls with the same limit. A system
    call and a timer for each would take most of the time of quick calls.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple[asyncio.Future[Any], bool, Any]] = deque()
        self._is_awake = False
        self._deadlines: dict[float, dict[asyncio.Future[Any], float]] = {}  # by limit; the earliest deadline is first
        self._has_timer: set[float] = set()

    def put(self, future: asyncio.Future[Any], is_error: bool, value: object) -> None:
        """Hand over the result or the error of a call; any thread may call this."""
        self._arrived.append((future, is_error, value))
        loop = future.get_loop()
        if not self._is_awake and not loop.is_closed():
            self._is_awake = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_awake = False  # before the deque is read, so that no result is missed
        while self._arrived:
            future, is_error, value = self._arrived.popleft()
            if not future.done():
                (future.set_exception if is_error else future.set_result)(value)

    async def result(self, future: asyncio.Future[R], limit_s: float) -> R:
        """Wait for a call; raise CallTimeout after the limit."""
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
        """Fail the calls that are over their limit, and set the timer for the next deadline."""
        deadlines = self._deadlines[limit_s]
        for future, deadline in list(deadlines.items()):
            if deadline > loop.time():
                loop.call_at(deadline, self._expire, loop, limit_s)
                return
            if not future.done():
                future.set_exception(CallTimeout())
        self._has_timer.remove(limit_s)


#: One per event loop; the entry goes away with its loop.
_LOOP_CALLS: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopCalls] = WeakKeyDictionary()


async def call_on_thread(function: Callable[..., R], *args: object, limit_s: float | None = None) -> R:
    """Run on a thread; after the time limit the thread is abandoned.

    Raises:
        CallTimeout: the call took longer than the limit. Exceptions of the function pass through.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()
    calls = _LOOP_CALLS.setdefault(loop, _LoopCalls())

    def work() -> None:
        try:
            outcome = (False, function(*args))
        except BaseException as error:  # passed to the waiting caller
            outcome = (True, fit_for_a_loop(error))
        calls.put(future, *outcome)

    _THREADS.submit(work)
    return await (future if limit_s is None else calls.result(future, limit_s))


def fit_for_a_loop(error: BaseException) -> Exception:
    """Return an exception that an event loop can pass on: SystemExit and StopIteration become RuntimeError."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError("".join(traceback.format_exception_only(error)).strip())
