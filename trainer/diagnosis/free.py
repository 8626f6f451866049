"""What memory is free: of the host, and of the GPUs that this process sees."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 2**30


@dataclass(frozen=True)
class Free:
    """Bytes that are free: of the host's memory, and of each GPU that this process sees, with the GPU's whole size.

    Example, an H100 on a host of 128 GiB: `Free(host=120 * GIB, gpus=((78 * GIB, 79 * GIB),))`.
    """

    host: int
    gpus: tuple[tuple[int, int], ...] = ()

    @classmethod
    def now(cls, with_gpus: bool) -> Free:
        """Ask; GPUs only where they are wanted, for that takes a moment."""
        return cls(host_free(), gpus_free() if with_gpus else ())


def gpus_free() -> tuple[tuple[int, int], ...]:
    """Return free and all bytes of each GPU that this process sees.

    The driver's own command is asked: torch would take some hundred MiB of each GPU to answer. Where there is no such
    command, all of a GPU counts as free.
    """
    count, seen = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
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
    """Return the bytes of memory that can be had: MemAvailable, or what the control group leaves if that is less."""
    available = 0
    for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError, IndexError):  # no limit ("max"), or none that can be read
        limit, used = (int((group / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        stat = (group / "memory.stat").read_text(encoding="utf-8").split()
        cache = int(stat[stat.index("inactive_file") + 1])
        available = min(available, limit - used + cache)
    return available
