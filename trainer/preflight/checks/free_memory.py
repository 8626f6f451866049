"""Measures the free memory of the host and of the GPUs that this process sees."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes of the host, and free and total bytes of each GPU that this process sees.

    Example, an H100 on a host of 128 GiB: `FreeMemory(host=120 * GIB, gpus=((78 * GIB, 79 * GIB),))`.
    """

    host: int
    gpus: tuple[tuple[int, int], ...] = ()

    @classmethod
    def measure(cls, with_gpus: bool) -> FreeMemory:
        """Measure now; GPUs only if asked for, because that takes a moment."""
        return cls(host_free(), gpus_free() if with_gpus else ())


def gpus_free() -> tuple[tuple[int, int], ...]:
    """Return the free and total bytes of each GPU that this process sees.

    It runs `nvidia-smi`, because torch would allocate some hundred MiB on each GPU to answer. Without that command, all
    memory counts as free.
    """
    count = torch.cuda.device_count()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count:
        return ()
    command = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, *(["-i", seen] if seen else [])], capture_output=True, text=True, timeout=20, check=True
        )
        rows = [line.split(",") for line in done.stdout.strip().splitlines()]
        return tuple((int(free) * 2**20, int(whole) * 2**20) for free, whole in rows[:count])
    except (OSError, ValueError, subprocess.SubprocessError):
        sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(count)]
        return tuple((size, size) for size in sizes)


def host_free(root: Path = Path("/")) -> int:
    """Return the free bytes of host memory: MemAvailable, or what the control group leaves if that is less."""
    available = 0
    for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError, IndexError):  # no limit ("max"), or no readable one
        limit, used = (int((group / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        stat = (group / "memory.stat").read_text(encoding="utf-8").split()
        # Pages of files that can be dropped count as used, but they are free.
        cache = int(stat[stat.index("inactive_file") + 1])
        available = min(available, limit - used + cache)
    return available
