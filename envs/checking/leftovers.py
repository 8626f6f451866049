"""The state of the program that episodes may change for others: processes, threads, files, memory, settings."""

from __future__ import annotations

import builtins
import gc
import logging
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.workers.process_info import children, memory_mib, num_files

#: Threads that run the environments' calls; they stay for the next call.
_OURS = ("environment", "environments", "watchdog")
#: Python's own modules whose functions an environment may replace.
_PATCHABLE = (
    "io",
    "json",
    "math",
    "os",
    "os.path",
    "pathlib",
    "random",
    "re",
    "socket",
    "subprocess",
    "threading",
    "time",
)


@dataclass(frozen=True)
class ProcessState:
    """What a program holds at one moment; where the system does not tell, a number is 0.

    `num_temporary` are files in its folder for temporary files, `num_printed` bytes of its output.
    """

    pid: int
    num_children: int
    num_threads: int
    num_files: int
    num_temporary: int
    num_printed: int
    memory_mib: float
    directory: str
    variables: frozenset[tuple[str, str]]
    functions: frozenset[tuple[str, int]]
    settings: frozenset[tuple[str, str]]

    @classmethod
    def now(cls, temporary: Path, printed: Path) -> ProcessState:
        """Return the state of this program; it takes about 20 ms."""
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name not in _OURS]
        return cls(
            pid=os.getpid(),
            num_children=len(children()),
            num_threads=len(threads),
            num_files=num_files(),
            num_temporary=len(list(temporary.iterdir())),
            num_printed=printed.stat().st_size,
            memory_mib=memory_mib(),
            directory=_directory(),
            variables=frozenset(os.environ.items()),
            functions=frozenset(_functions()),
            settings=frozenset(_settings()),
        )


def _directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as the system has it
    except OSError:
        return "one that is gone"


def _functions() -> Iterator[tuple[str, int]]:
    """Yield the functions and classes of Python's own modules that were loaded first, by name and identity."""
    for module in (builtins, *(sys.modules[name] for name in _PATCHABLE if name in sys.modules)):
        for name, value in vars(module).items():
            if callable(value):
                yield f"{module.__name__}.{name}", id(value)


def _settings() -> Iterator[tuple[str, str]]:
    """Yield what a program sets once for all of its code."""
    yield "the level of the root logger", str(logging.root.level)
    yield "the handlers of the root logger", repr(list(map(id, logging.root.handlers)))
    yield "logging.disable", str(logging.root.manager.disable)
    yield "the recursion limit", str(sys.getrecursionlimit())
    yield "the garbage collector", str(gc.isenabled())
    yield "the default timeout of sockets", str(socket.getdefaulttimeout())
    for name in ("stdin", "stdout", "stderr", "excepthook"):
        yield f"sys.{name}", str(id(getattr(sys, name)))
    for number in signal.valid_signals():
        yield f"the handler of signal {int(number)}", _handler(number)
    for timer in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
        if hasattr(signal, timer):
            yield f"signal.{timer}", str(signal.getitimer(getattr(signal, timer))[0] > 0)


def _handler(number: int) -> str:
    handler = signal.getsignal(number)
    if isinstance(handler, int):
        return str(handler)
    return str(id(handler))


class Generators:
    """The random number generators of the whole program, Python's and NumPy's if that is loaded.

    Each episode begins with another seed. So two plays of an episode end in one state only if it set a seed itself.
    """

    @staticmethod
    def seed(number: int) -> None:
        """Begin anew."""
        random.seed(number)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(number)

    @staticmethod
    def states() -> dict[str, int]:
        """Return a hash of the state of each generator."""
        states = {"random": hash(random.getstate())}
        if numpy := sys.modules.get("numpy"):
            _, keys, place, *_ = numpy.random.get_state()
            states["numpy.random"] = hash((keys.tobytes(), place))
        return states
