"""Claims about worker processes: values and errors come back, the end of a process is explained, nothing is left."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.execution.threads import DaemonThreads
from envs.workers.worker import Worker, WorkerDied, WorkerError, WorkerPool, WorkerTimeout
from tests.paths import ROOT


def spin() -> None:
    while True:
        pass


def nested() -> tuple[int, float]:
    worker = Worker()
    return worker.pid, worker.call(math.sqrt, 4.0)


def unpicklable() -> object:
    return lambda: None


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ends(pid: int, within_s: float) -> bool:
    """Wait for the end of a process; return whether it came in time."""
    deadline = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_a_value_comes_back() -> None:
    assert Worker().call(math.sqrt, 2.0, timeout_s=20) == math.sqrt(2)


def test_a_worker_is_another_process_that_takes_one_call_after_the_other() -> None:
    worker = Worker()
    assert worker.pid != os.getpid()
    assert {worker.call(os.getpid) for _ in range(3)} == {worker.pid}


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (math.sqrt, ("x",), "must be real number, not str"),
        (sys.exit, (3,), "SystemExit: 3"),
        (unpicklable, (), "pickle"),
    ],
)
def test_what_the_call_raises_comes_back_as_its_traceback(function: Callable, args: tuple, message: str) -> None:
    worker = Worker()
    with pytest.raises(WorkerError, match=message) as caught:
        worker.call(function, *args)
    assert "Traceback" in str(caught.value)
    assert worker.call(math.sqrt, 4.0) == 2.0  # it lives on


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [(os._exit, (3,), "exit code 3"), (os.abort, (), "signal SIGABRT"), (signal.raise_signal, (11,), "signal SIGSEGV")],
)
def test_how_a_process_ended_is_said(function: Callable, args: tuple, message: str) -> None:
    worker = Worker()
    with pytest.raises(WorkerDied, match=message):
        worker.call(function, *args)
    assert not worker.is_alive
    with pytest.raises(WorkerDied, match="ended before the call"):
        worker.call(math.sqrt, 4.0)


def test_a_call_over_its_limit_is_killed_even_where_it_never_yields() -> None:
    worker, started = Worker(), time.perf_counter()
    with pytest.raises(WorkerTimeout, match=r"longer than 0\.2 s"):
        worker.call(spin, timeout_s=0.2)
    assert time.perf_counter() - started < 5
    assert not is_running(worker.pid)


def test_killing_a_worker_ends_the_call_that_runs_in_it() -> None:
    worker = Worker()
    threading.Timer(0.2, worker.kill).start()
    with pytest.raises(WorkerDied):
        worker.call(time.sleep, 60)
    assert not is_running(worker.pid)


def test_an_interrupted_call_takes_its_worker_along(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(timeout: float | None) -> bool:
        raise KeyboardInterrupt

    worker = Worker()
    monkeypatch.setattr(worker._connection, "poll", interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.call(time.sleep, 60)
    assert not worker.is_alive and not is_running(worker.pid)  # or its answer would be that of the next call


def test_a_worker_may_have_workers_of_its_own() -> None:
    worker = Worker()
    pid, value = worker.call(nested, timeout_s=60)
    assert (value, pid not in (os.getpid(), worker.pid)) == (2.0, True)


def test_a_pool_lends_again_what_it_got_back_alive() -> None:
    pool = WorkerPool()
    with pool.worker() as first:
        pass
    with pool.worker() as second:
        assert second is first
        second.kill()
    with pool.worker() as third:
        assert third is not first


def test_a_pool_with_a_size_lets_no_more_run_at_once() -> None:
    pool, counts = WorkerPool(size=2), []
    running = 0
    lock = threading.Lock()

    def use() -> None:
        nonlocal running
        with pool.worker() as worker:
            with lock:
                running += 1
                counts.append(running)
            worker.call(time.sleep, 0.05)
            with lock:
                running -= 1

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(counts) == 2 and len(counts) == 6


@pytest.mark.parametrize("how", ["returns", "is killed"])
def test_no_process_outlives_the_program(how: str) -> None:
    code = """
        import threading, time, os
        from envs.workers.worker import Worker
        idle, busy = Worker(), Worker()
        idle.call(os.getpid)
        threading.Thread(target=busy.call, args=(time.sleep, 60), daemon=True).start()
        time.sleep(0.2)
        print(idle.pid, busy.pid, flush=True)
        KILL
    """.replace("KILL", "os.kill(os.getpid(), 9)" if how == "is killed" else "")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert [pid for pid in pids if not ends(pid, within_s=5)] == []


def test_a_program_without_a_main_guard_may_use_workers() -> None:
    code = "from envs.workers.worker import Worker; import math; print(Worker().call(math.sqrt, 9.0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "3.0"


def test_quick_calls_share_a_few_threads() -> None:
    threads, seen, done = DaemonThreads(), set(), threading.Semaphore(0)

    def note() -> None:
        seen.add(threading.get_ident())
        done.release()

    for _ in range(2_000):
        threads.submit(note)
    assert all(done.acquire(timeout=20) for _ in range(2_000))
    assert len(seen) <= 64


def test_calls_that_hang_hold_up_no_other() -> None:
    threads, ended = DaemonThreads(), threading.Semaphore(0)
    started = time.perf_counter()
    for _ in range(100):
        threads.submit(lambda: time.sleep(60))
    for _ in range(100):
        threads.submit(ended.release)
    assert all(ended.acquire(timeout=20) for _ in range(100))
    assert time.perf_counter() - started < 5


def test_calls_that_block_run_at_once() -> None:
    threads, meeting = DaemonThreads(), threading.Barrier(65, timeout=20)
    for _ in range(64):
        threads.submit(meeting.wait)
    meeting.wait()  # nobody passes before all are there


def test_a_fork_server_that_was_killed_is_replaced() -> None:
    code = """
        import math, os, signal, time
        from envs.workers import worker
        first = worker.Worker()
        server = worker._FORK_SERVER._process
        server.kill(); server.wait()
        print(worker.Worker().call(math.sqrt, 9.0))
        first.kill()
        print(worker.Worker().call(math.sqrt, 16.0))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["3.0", "4.0"], done.stderr


def test_a_fork_server_that_is_stopped_is_replaced() -> None:
    code = """
        import math, os, signal
        from envs.workers import worker
        worker.ANSWER_LIMIT_S = 3.0
        first = worker.Worker()
        os.kill(worker._FORK_SERVER._process.pid, signal.SIGSTOP)
        try:
            first.call(os._exit, 3)
        except worker.WorkerDied:
            print(worker.Worker().call(math.sqrt, 9.0))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["3.0"], done.stderr


def test_a_worker_that_cannot_start_leaves_its_slot_to_the_next() -> None:
    faults = iter([OSError("no more processes")])

    def make() -> Worker:
        for fault in faults:
            raise fault
        return Worker()

    pool = WorkerPool(size=1, make=make)
    with pytest.raises(OSError, match="no more"):
        pool.acquire()
    assert pool._free_slots is not None and pool._free_slots.acquire(blocking=False)


def close_everything() -> None:
    os.closerange(3, 256)


def leave_an_alarm() -> None:
    def ring(number: int, frame: object) -> None:
        raise RuntimeError("too late")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)


def fork_in_c_and_return() -> None:
    ctypes.CDLL(None).fork()


def start_a_child(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(str(child.pid))
    child.wait()


def test_a_worker_whose_channel_breaks_takes_no_other_along() -> None:
    broken, good = Worker(), Worker()
    with pytest.raises(WorkerDied):
        broken.call(close_everything, timeout_s=20)
    assert good.call(math.sqrt, 4.0) == 2.0


def test_what_an_alarm_does_to_an_idle_worker_is_not_taken_for_an_answer() -> None:
    pool = WorkerPool()
    with pool.worker() as rigged:
        rigged.call(leave_an_alarm)
    time.sleep(0.4)
    with pool.worker() as worker:
        assert worker is not rigged
        assert [worker.call(math.sqrt, float(n * n)) for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_two_answers_to_one_call_are_not_taken_for_those_of_the_next() -> None:
    worker = Worker()
    worker.call(fork_in_c_and_return)
    time.sleep(0.2)
    assert not worker.is_idle
    with pytest.raises(WorkerDied, match="answered call 1 instead of call 2"):
        worker.call(math.sqrt, 4.0)


def test_a_child_that_a_call_forks_does_not_answer_for_its_worker() -> None:
    worker = Worker()
    child = worker.call(os.fork)
    time.sleep(0.2)
    assert worker.is_idle and worker.call(math.sqrt, 4.0) == 2.0
    worker.kill()
    assert not is_running(child)


def test_a_worker_that_ends_is_found_out_at_once_though_a_child_that_it_forked_goes_on(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="exit code 3"):
        Worker().call(end_with_a_forked_child, str(tmp_path / "pid"), timeout_s=60)
    assert not is_running(int((tmp_path / "pid").read_text()))


def end_with_a_forked_child(path: str) -> None:
    if child := os.fork():
        Path(path).write_text(str(child))
        os._exit(3)
    time.sleep(120)


def test_a_killed_worker_takes_its_children_along(tmp_path: Path) -> None:
    worker, note = Worker(), tmp_path / "pid"
    with pytest.raises(WorkerTimeout):
        worker.call(start_a_child, str(note), timeout_s=2.0)
    assert ends(int(note.read_text()), within_s=10)


def start_a_daemon(path: str) -> None:
    """Start a process as daemons do: in a session of its own, and its parent ends."""
    if (first := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            Path(path).write_text(str(os.getpid()))
            time.sleep(120)
        os._exit(0)
    os.waitpid(first, 0)


def end_with_a_daemon(path: str) -> None:
    daemon = subprocess.Popen(["sleep", "120"], start_new_session=True, stdout=subprocess.DEVNULL)
    Path(path).write_text(str(daemon.pid))
    os._exit(3)


@pytest.mark.skipif(sys.platform != "linux", reason="another parent is a service of Linux")
def test_a_daemon_ends_with_its_worker(tmp_path: Path) -> None:
    worker, path = Worker(), tmp_path / "pid"
    worker.call(start_a_daemon, str(path), timeout_s=20)
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    assert is_running(int(path.read_text()))
    worker.kill()
    assert ends(int(path.read_text()), within_s=5)


@pytest.mark.skipif(sys.platform != "linux", reason="another parent is a service of Linux")
def test_a_daemon_ends_with_a_worker_that_ends_by_itself(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="exit code 3"):
        Worker().call(end_with_a_daemon, str(tmp_path / "pid"), timeout_s=20)
    assert ends(int((tmp_path / "pid").read_text()), within_s=5)


def test_what_an_environment_prints_in_a_worker_cannot_control_the_terminal() -> None:
    printing = r"print('\x1b[2J said', flush=True)"
    code = f"from envs.workers.worker import Worker; Worker().call(eval, {printing!r}, timeout_s=20)"
    done = subprocess.run([sys.executable, "-u", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\\x1b[2J said\n"
