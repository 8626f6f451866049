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
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO, Protocol

from envs.errors import UserError
from envs.execution.watchdog_process import (
    BEAT,
    BEAT_S,
    CALL,
    COUNT,
    ENDING,
    ENDING_AT,
    INLINE,
    LABEL_SIZE,
    LONGEST_S,
    NUM_CALLS,
    SIZE,
    SLOT_SIZE,
)
from envs.safe_text import escape_controls

#: Where the traceback of all threads is asked for: no code of ours or of a library listens to it.
SIGNAL: int = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2


class Watched(Protocol):
    """A call under way: `begin` and `end` on the thread that runs it, `abandon` once nobody waits for it any more."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def abandon(self) -> None: ...


class Watcher(Protocol):
    """What `EnvRunner` tells of its calls: `Watchdog`, or another that acts when a call keeps the interpreter."""

    def call(self, label: str, limit_s: float, inline: bool = False) -> Watched: ...


class Watchdog:
    """Watches the calls of this process; its own process starts with the first call.

    Example::

        call = WATCHDOG.call("RegexEnv.step of sample 17", limit_s=30)
        call.begin()        # on the thread that runs it
        call.end()          # there too, when it is over; it is watched until then, also if nobody waits for it
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._free: deque[int] = deque()
        self._num_inline = 0
        self._advice = ""
        os.register_at_fork(after_in_child=self._forget)

    def advise(self, advice: str) -> None:
        """Set what is said, besides the call, where the program is ended: the command that resumes it."""
        self._advice = advice
        self._write_ending(is_over=False)

    def _write_ending(self, is_over: bool = True) -> None:
        if self._memory is not None:
            ENDING.pack_into(self._memory, ENDING_AT, is_over, escape_controls(self._advice).encode())

    def call(self, label: str, limit_s: float, inline: bool = False, is_isolated: bool = True) -> WatchedCall:
        """Return a call to be watched. The program ends if it keeps the interpreter, or inline runs, for `limit_s`.

        `is_isolated` says that the `isolation` of an entry decides where it runs.
        """
        if self._memory is None:
            with self._lock:
                if self._memory is None:
                    self._start()
        assert self._memory is not None
        self._num_inline += inline
        number = self._num_inline if inline else 0
        return WatchedCall(self._memory, self._free, label, limit_s, number, is_isolated)

    def _start(self) -> None:
        with _shared_file() as shared:
            memory = mmap.mmap(shared.fileno(), SIZE)
            self._free = deque(range(NUM_CALLS))
            if hasattr(faulthandler, "register"):
                self._traces = tempfile.TemporaryFile()  # noqa: SIM115 - open to the end
                faulthandler.register(SIGNAL, file=self._traces, all_threads=True)
                if not faulthandler.is_enabled():
                    faulthandler.enable(self._traces)
                program = Path(__file__).with_name("watchdog_process.py")
                files = [shared.fileno(), self._traces.fileno()]
                command = [sys.executable, "-I", "-S", str(program), *map(str, (os.getpid(), int(SIGNAL), *files))]
                self._process = subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL)
        threading.Thread(target=_beat, args=(memory,), daemon=True, name="watchdog").start()
        self._memory = memory
        self._write_ending(is_over=False)
        atexit.register(self._write_ending)

    def _forget(self) -> None:
        """Start anew in a forked process: it has neither the thread nor a watching process of its own."""
        self._lock = threading.Lock()
        self._memory = None


class WatchedCall:
    """A call under way; `begin` and `end` run on one thread, `abandon` on that of the event loop."""

    __slots__ = ("_free", "_inline", "_is_isolated", "_is_over", "_label", "_limit_s", "_memory", "_slots")

    def __init__(
        self, memory: mmap.mmap, free: deque[int], label: str, limit_s: float, inline: int, is_isolated: bool
    ) -> None:
        self._memory = memory
        self._free = free
        self._label = label
        self._limit_s = limit_s
        self._is_isolated = is_isolated
        self._inline = inline  # its number among the calls on the event loop, 0 on a thread
        self._slots: list[int] = []  # none or one
        self._is_over = False

    def begin(self) -> None:
        """Write down that this thread runs the call; beyond `NUM_CALLS` at a time a call is not watched."""
        if self._is_over:  # it waited for a thread until nobody waited for it
            return
        try:
            slot = self._free.popleft()
        except IndexError:
            return
        label = escape_controls(self._label).encode()[:LABEL_SIZE]
        ids = threading.get_native_id(), threading.get_ident()
        CALL.pack_into(self._memory, slot * SLOT_SIZE + BEAT.size, self._limit_s, *ids, self._is_isolated, label)
        self._slots.append(slot)
        if self._inline:
            INLINE.pack_into(self._memory, COUNT.size, self._inline, slot + 1)

    def abandon(self) -> None:
        """Let it not begin any more; one that has begun is watched to its end."""
        self._is_over = True

    def end(self) -> None:
        """Clear the entry."""
        if self._inline:
            INLINE.pack_into(self._memory, COUNT.size, 0, 0)
        for slot in self._slots:
            CALL.pack_into(self._memory, slot * SLOT_SIZE + BEAT.size, 0.0, 0, 0, False, b"")
            self._free.append(slot)


def _shared_file() -> IO[bytes]:
    """Return a new file without a name, for the memory that both processes share."""
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        file.truncate(SIZE)
    except OSError as error:
        size = -(-SIZE // 1024)
        reason = error.strerror
        rule = f"must be a folder where a file of {size} KiB can be written (see also `ulimit -f`)"
        folder = os.environ.get("TMPDIR") or "/tmp"
        fix = f"give another folder ({reason})"
        raise UserError("TMPDIR", rule, folder, fix) from error
    return file


def _beat(memory: mmap.mmap) -> None:
    """Count up for as long as this thread gets the interpreter."""
    for number in count(1):
        COUNT.pack_into(memory, 0, number)
        time.sleep(BEAT_S)


WATCHDOG = Watchdog()


@contextlib.contextmanager
def watched(label: str, limit_s: float = LONGEST_S) -> Iterator[None]:
    """Watch code of a user that the whole program waits for: `with watched("--sampler my.py:Hard"): ...`.

    The program ends, with a message that names it, if it takes longer than `limit_s` (`math.inf`: it may).
    """
    call = WATCHDOG.call(label, limit_s, inline=True, is_isolated=False)
    call.begin()
    try:
        yield
    finally:
        call.end()


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
