"""What a process holds is told whole, also while its threads end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from envs.workers.process_info import children, descendants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_children_are_told_whole_while_threads_end(started: list[subprocess.Popen[bytes]]) -> None:
    started += [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    has_ended = threading.Event()

    def begin_threads() -> None:
        while not has_ended.is_set():
            thread = threading.Thread(target=str)
            thread.start()
            thread.join()

    busy = threading.Thread(target=begin_threads)
    busy.start()
    try:
        for _ in range(2_000):
            assert {process.pid for process in started} <= set(children())
    finally:
        has_ended.set()
        busy.join()


def test_a_child_stays_known_when_the_thread_that_started_it_ends(started: list[subprocess.Popen[bytes]]) -> None:
    for _ in range(40):
        thread = threading.Thread(target=lambda: started.append(subprocess.Popen(["sleep", "60"])))
        thread.start()
        thread.join()
        assert {process.pid for process in started} <= set(descendants(os.getpid()))
