"""What a process holds, as Linux tells it: children, open files, memory. Elsewhere there is nothing to be seen."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_MAX_READS = 20


def children(pid: int | str = "self") -> list[int]:
    """Return the processes that a process has started and not waited for."""
    tasks = _PROC / str(pid) / "task"
    found = sorted(_read_children(tasks))
    # A thread that ends gives its children to another one, which may have been read before: read until two reads agree.
    for _ in range(1, _MAX_READS):
        before = found
        found = sorted(_read_children(tasks))
        if found == before:
            break
    return found


def _read_children(tasks: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):  # the process has ended, or this is no Linux
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                yield from map(int, (task / "children").read_text().split())


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    found = children(pid)
    for child in found:  # grows while it is read
        found += children(child)
    return found


def num_files() -> int:
    """Return the number of open files of this process."""
    try:
        return len(list((_PROC / "self" / "fd").iterdir()))
    except OSError:
        return 0


def memory_mib() -> float:
    """Return the memory that this process holds, in MiB, without what is free and only not given back yet."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # of glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        pages = int((_PROC / "self" / "statm").read_text().split()[1])
    except (OSError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
