"""Ends the program, with a message, when code of an environment keeps the interpreter, or inline the event loop, for
longer than its time limit.

A catastrophic regular expression, or C code that never releases the interpreter's lock, stops all threads and the event
loop. No time limit can act then, and nothing can be printed. So a small process watches (`watchdog_process`). It shares
memory with this one: a number that a thread here counts up as long as it gets the interpreter, and the calls under way.
It also names these calls where one of them has ended this process, by `os._exit` or a crash.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

from envs.execution.watchdog_process import (
    BEAT,
    BEAT_S,
    CALL,
    ENDING,
    FIRST,
    INLINE,
    LABEL_SIZE,
    NUM_RECORDS,
    SIGNAL,
    SIZE,
    SPARE,
)
from envs.safe_text import escape_controls

#: A pause that an honest program may need to import a library or to copy a network: no limit is shorter.
SHORTEST_S = 10.0
LONGEST_S = 600.0
_NO_CALL = bytes(CALL.size)


class Watchdog:
    """Watches the calls of this process; its own process starts with the first call.

    Example::

        with WATCHDOG.watch("RegexEnv.step of sample 17", limit_s=30):      # on the thread that runs the call
            env.step(text)
    """

    def __init__(self) -> None:
        self._advice = ""
        self._numbers = count(1)
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # A forked process has neither the thread nor a watching process of its own: it starts anew.
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None

    def advise(self, advice: str) -> None:
        """Set what is said, besides the call, where the program is ended: the command that resumes it."""
        self._advice = advice
        if self._memory is not None:
            self._write_ending(self._memory)

    def _write_ending(self, memory: mmap.mmap, is_over: bool = False) -> None:
        _write(memory, ENDING, number=is_over, label=self._advice)

    @contextlib.contextmanager
    def watch(self, label: str, limit_s: float, inline: bool = False, is_isolated: bool = True) -> Iterator[None]:
        """Watch the code of a `with` block: the program ends if it keeps the interpreter for `limit_s`.

        `inline` says that the whole program waits for it, so that it ends where the code only takes so long.
        `is_isolated` says that the `isolation` of an entry decides where it runs.
        """
        memory = self._memory or self._start()
        free = self._free
        try:
            place = INLINE if inline else free.popleft()
        except IndexError:
            place = SPARE  # more calls at once than places: this one is not watched
        _write(memory, place, next(self._numbers), limit_s, is_isolated, label)
        try:
            yield
        finally:
            memory[place * CALL.size : (place + 1) * CALL.size] = _NO_CALL
            if place >= FIRST:
                free.append(place)

    def _start(self) -> mmap.mmap:
        with self._lock:
            if self._memory is None:
                memory = self._watched_memory()
                self._free = deque(range(FIRST, NUM_RECORDS))
                self._write_ending(memory)
                atexit.register(self._write_ending, memory, is_over=True)
                threading.Thread(target=_beat, args=(memory,), daemon=True, name="watchdog").start()
                self._memory = memory
            return self._memory

    def _watched_memory(self) -> mmap.mmap:
        if sys.platform != "linux":  # the watching process reads /proc
            return mmap.mmap(-1, SIZE)
        calls = os.memfd_create("calls")
        os.ftruncate(calls, SIZE)
        traces = os.memfd_create("traces")
        faulthandler.register(SIGNAL, file=traces, all_threads=True)
        # A crash in C writes its traceback there too, unless somebody has chosen another file.
        if not faulthandler.is_enabled():
            faulthandler.enable(traces)
        program = str(Path(__file__).with_name("watchdog_process.py"))
        numbers = map(str, (os.getpid(), calls, traces, SHORTEST_S))
        # Without site-packages and the program's path it starts in milliseconds.
        command = [sys.executable, "-I", "-S", program, *numbers]
        self._process = subprocess.Popen(command, pass_fds=(calls, traces), stdin=subprocess.DEVNULL)
        memory = mmap.mmap(calls, SIZE)
        os.close(calls)  # the mapping stays; the traces are written to until the end
        return memory


def _write(
    memory: mmap.mmap, place: int, number: int = 0, limit_s: float = 0.0, is_isolated: bool = False, label: str = ""
) -> None:
    """Write a record about this thread; without a limit there is no call."""
    text = escape_controls(label).encode()[:LABEL_SIZE]
    thread = threading.get_native_id()
    CALL.pack_into(memory, place * CALL.size, number, limit_s, thread, threading.get_ident(), is_isolated, text)


def _beat(memory: mmap.mmap) -> None:
    """Count up for as long as this thread gets the interpreter."""
    for number in count(1):
        _write(memory, BEAT, number)
        time.sleep(BEAT_S)


#: Watches the calls of this process. The worker of a check has another one, with the same methods.
WATCHDOG = Watchdog()


def watched(label: str, limit_s: float = LONGEST_S) -> AbstractContextManager[None]:
    """Watch code of a user that the whole program waits for: `with watched("--sampler my.py:Hard"): ...`.

    The program ends, with a message that names it, if it takes longer than `limit_s` (`math.inf`: it may).
    """
    return WATCHDOG.watch(label, limit_s, inline=True, is_isolated=False)


@contextlib.contextmanager
def bounded(label: str, limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in what the program waits for, such as a stranger's chat template, after `limit_s`.

    Only Python code on the main thread can be stopped so. Anything else is watched: after twice the time the program
    ends.
    """
    with watched(label, 2 * limit_s):
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            yield
            return

        def stop(number: int, frame: object) -> None:
            raise TimeoutError(f"{label} took longer than {limit_s:g} s")

        handler = signal.signal(signal.SIGALRM, stop)
        timer = signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)
