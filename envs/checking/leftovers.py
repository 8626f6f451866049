"""The state of the program that episodes may change for others: processes, threads, files, directory, modules."""

from __future__ import annotations

import builtins
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from envs.workers.process_info import children, num_files

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
    """What a program holds at one moment; where the system does not tell, a number is 0."""

    num_children: int
    num_threads: int
    num_files: int
    directory: str
    variables: frozenset[tuple[str, str]]
    functions: frozenset[tuple[str, int]]

    @classmethod
    def now(cls) -> ProcessState:
        """Return the state of this program; it takes about 20 ms."""
        threads = [thread for thread in threading.enumerate() if thread.name not in _OURS]
        directory, variables = os.getcwd(), frozenset(os.environ.items())  # noqa: PTH109 - as the system has it
        return cls(len(children()), len(threads), num_files(), directory, variables, frozenset(_functions()))


def _functions() -> Iterator[tuple[str, int]]:
    """Yield the functions and classes of Python's own modules that were loaded first, by name and identity."""
    for module in (builtins, *(sys.modules[name] for name in _PATCHABLE if name in sys.modules)):
        for name, value in vars(module).items():
            if callable(value):
                yield f"{module.__name__}.{name}", id(value)
