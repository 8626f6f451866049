"""Claims about threads of a process whose network runs on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import asyncio, os, torch
from concurrent.futures import ThreadPoolExecutor
from agents.model.cpu import compute

def threads():
    return len(os.listdir("/proc/self/task"))

def work(scale):
    return float((torch.ones(700, 700) @ torch.ones(700, 700)).mean()) * scale

async def main():
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    work(1)
    before = threads()
    found = [await compute(work, scale=2), threads(), threads() - before]
    found += [await compute(threads), work(1), threads()]
    try:
        await compute(work, "no number")
    except TypeError:
        found.append(threads())
    print(before, *found)

torch.set_num_threads(3)  # which starts threads of its own
started = threads()
asyncio.run(main())
print(started)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another OpenMP")
def test_threads_that_have_computed_keep_no_others() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    numbers, (started,) = (line.split() for line in done.stdout.splitlines())
    before, result, after, difference, within, again, busy, failed = map(float, numbers)
    alone = float(started) + 1  # and the thread of asyncio
    assert (result, again) == (1400, 700)
    assert before == float(started) + 2 and (after, difference) == (alone, -1)
    assert within == alone
    assert busy == alone + 2 and failed == alone
