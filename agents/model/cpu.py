"""Threads of a process whose network runs on a CPU."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: OpenMP's `omp_pause_soft`: threads end, settings stay.
_SOFT = 1


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
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Any | None:
    """Return the function of torch's GNU OpenMP, which concerns the calling thread alone; None with another OpenMP."""
    if sys.platform == "linux":
        return getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    return None
