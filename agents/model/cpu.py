"""Memory and threads of a process whose network runs on a CPU."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: Parameters of glibc's `mallopt`, see its manual page.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
#: OpenMP's `omp_pause_soft`: threads end, settings stay.
_SOFT = 1


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed tensors of up to 32 MiB for the next ones; on other systems nothing changes.

    By default it returns them to the kernel, which clears every page when it hands it out again: 8 % of a small step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


async def compute(work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Run work of torch in a thread which has all cores to itself, as far as this process goes.

    Every thread that computes gets a team of threads from GNU OpenMP, and keeps it. Once they are more than there are
    cores, a team sleeps after each operation in place of waiting for the next one, and small operations take half as
    long again. So the teams of this thread and of that one end when they have nothing to do.
    """
    end_team()
    return await asyncio.to_thread(alone, work, *args, **options)


def alone(work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Do some work, and end this thread's team."""
    try:
        return work(*args, **options)
    finally:
        end_team()


def end_team() -> None:
    """End the threads that GNU OpenMP keeps for this one; its next operation starts them again, in 0.1 ms."""
    for pause in _pauses():
        pause(_SOFT)


@functools.cache
def _pauses() -> list[Any]:
    """Return the function of each GNU OpenMP of this process, which concerns the calling thread alone."""
    if sys.platform != "linux":
        return []
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    files = {line[5] for line in lines if len(line) > 5 and Path(line[5]).name.startswith("libgomp")}
    found = []
    for file in files:
        with contextlib.suppress(OSError, AttributeError):  # it was replaced, or is older than GCC 9
            found.append(ctypes.CDLL(file).omp_pause_resource_all)
    return found
