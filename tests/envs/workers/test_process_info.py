"""What a process holds is told whole, also while its threads end. Each test looks at a new process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from envs.workers.process_info import children, descendants
from envs.workers.worker import Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def counts_while_threads_end() -> set[int]:
    """Start three children; return how many are seen while threads begin and end."""
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    has_ended = threading.Event()

    def begin_threads() -> None:
        while not has_ended.is_set():
            thread = threading.Thread(target=str)
            thread.start()
            thread.join()

    busy = threading.Thread(target=begin_threads)
    busy.start()
    counts = {len(children()) for _ in range(2_000)}
    has_ended.set()
    busy.join()
    for child in started:
        child.kill()
    return counts


def counts_of_children_of_ended_threads(num_children: int) -> list[int]:
    """Start each child in a thread of its own; return how many are seen after each."""
    counts = []
    for _ in range(num_children):
        thread = threading.Thread(target=subprocess.Popen, args=(["sleep", "60"],))
        thread.start()
        thread.join()
        counts.append(len(descendants(os.getpid())))
    return counts


def test_children_are_told_whole_while_threads_end() -> None:
    assert Worker().call(counts_while_threads_end, timeout_s=60) == {3}


def test_a_child_stays_known_when_the_thread_that_started_it_ends() -> None:
    assert Worker().call(counts_of_children_of_ended_threads, 40, timeout_s=60) == [*range(1, 41)]
