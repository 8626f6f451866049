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


class DaemonThreads:
    """A thread pool that grows while calls are blocked.

    Example::

        threads = DaemonThreads()
        threads.submit(work)           # `work` takes nothing and must not raise
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_taken = 0
        self._may_block = threading.Event()

    def submit(self, work: Callable[[], Any]) -> None:
        """Schedule `work` to start soon; return at once."""
        self._waiting.put(work)
        if self._num_threads < NUM_EAGER:
            with self._lock:
                if self._num_threads == 0:
                    threading.Thread(target=self._watch, daemon=True, name="environments").start()
                self._start(1)
        if not self._may_block.is_set():
            self._may_block.set()

    def _start(self, count: int) -> None:
        for _ in range(count):
            try:
                threading.Thread(target=self._serve, daemon=True, name="environment").start()
            except RuntimeError:  # no more threads; the working ones take the waiting calls
                logger.warning("no thread can be started for an environment's call")
                return
            self._num_threads += 1

    def _serve(self) -> None:
        while True:
            work = self._waiting.get()
            self._num_taken += 1
            try:
                work()
            except BaseException:  # `work` must not raise; if it does, keep the thread
                logger.exception("a call on a thread raised")
            del work  # release what it holds while the thread waits

    def _watch(self) -> None:
        """While calls wait for blocked threads, start more threads, up to four times as many in each round."""
        while True:
            self._may_block.wait()
            self._may_block.clear()
            num_taken = self._num_taken
            time.sleep(PATIENCE_S)
            if num_waiting := self._waiting.qsize():
                # Quick calls wait too; more threads would only fight for the interpreter.
                self._may_block.set()
                if self._num_taken - num_taken < QUICK_CALLS * self._num_threads:
                    self._start(min(num_waiting, max(1, 3 * self._num_threads)))


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
    """The calls that one event loop waits for: one wake-up delivers all results that have arrived.

    A system call for each would take most of the time of quick calls.
    """

    def __init__(self) -> None:
        self._arrived: deque[tuple[asyncio.Future[Any], bool, Any]] = deque()
        self._is_awake = False

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
    if limit_s is None:
        return await future
    # It is queued behind results that have arrived: one in time is never lost to a late event loop.
    timer = loop.call_later(limit_s, calls.put, future, True, CallTimeout())
    try:
        return await future
    finally:
        timer.cancel()


def fit_for_a_loop(error: BaseException) -> Exception:
    """Return an exception that an event loop can pass on: SystemExit and StopIteration become RuntimeError."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError("".join(traceback.format_exception_only(error)).strip())
