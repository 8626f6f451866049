"""Memory of a process whose network runs on a CPU."""

from __future__ import annotations

import ctypes
import functools
import sys

#: Parameters of glibc's `mallopt`, see its manual page.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed tensors of up to 32 MiB for the next ones; on other systems nothing changes.

    By default it returns them to the kernel, which clears every page when it hands it out again: 8 % of a small step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**25)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
