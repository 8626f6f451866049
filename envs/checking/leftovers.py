"""The state of the program that episodes may change for others: processes, threads, files, memory, settings."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from envs.workers.process_info import children, memory_mib, num_files

#: Threads that run the environments' calls; they stay for the next call.
_OURS = ("environment", "environments", "watchdog")
#: Python's own modules whose functions an environment may replace.
_PATCHABLE = [
    "builtins",
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
]


@dataclass(frozen=True)
class ProcessState:
    """What a program holds at one moment: amounts that may grow, and settings by name.

    Where the system does not tell, an amount is 0.
    """

    pid: int
    amounts: Mapping[str, float]
    directory: str
    settings: frozenset[tuple[str, object]]

    @classmethod
    def now(cls, temporary: Path, printed: Path) -> ProcessState:
        """Return the state of this program; it takes about 20 ms."""
        gc.collect()  # what only waits to be collected is no leftover
        threads = [thread for thread in threading.enumerate() if thread.name not in _OURS]
        return cls(
            pid=os.getpid(),
            amounts={
                "processes": len(children()),
                "threads": len(threads),
                "open files": num_files(),
                "temporary files": len(list(temporary.iterdir())),
                "bytes of output": printed.stat().st_size,
                "MiB of memory": memory_mib(),
            },
            directory=_directory(),
            settings=frozenset((*os.environ.items(), *_functions(), *_settings())),
        )


def _directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - as the system has it
    except OSError:
        return "one that is gone"


def _functions() -> Iterator[tuple[str, int]]:
    """Yield the functions and classes of Python's own modules that were loaded first, by name and identity."""
    for module in map(importlib.import_module, _PATCHABLE):
        for name, value in vars(module).items():
            if callable(value):
                yield f"{module.__name__}.{name}", id(value)


def _settings() -> Iterator[tuple[str, object]]:
    """Yield what a program sets once for all of its code."""
    yield "the level of the root logger", logging.root.level
    yield "the handlers of the root logger", tuple(map(id, logging.root.handlers))
    yield "logging.disable", logging.root.manager.disable
    yield "the recursion limit", sys.getrecursionlimit()
    yield "the garbage collector", gc.isenabled()
    yield "the default timeout of sockets", socket.getdefaulttimeout()
    for name in ("stdin", "stdout", "stderr", "excepthook"):
        yield f"sys.{name}", id(getattr(sys, name))
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        yield f"the handler of signal {int(number)}", handler if isinstance(handler, int) else id(handler)
    if sys.platform != "win32":
        for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
            yield f"signal.{name}", signal.getitimer(getattr(signal, name))[0] > 0


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
            states["numpy.random"] = hash(pickle.dumps(numpy.random.get_state()))
        return states
