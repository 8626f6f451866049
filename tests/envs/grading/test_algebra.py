"""The processes that run math-verify: a hog is killed at its limit, costs it once, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from envs.errors import UserError
from envs.grading import algebra, grade
from envs.grading.algebra import equal_by_algebra
from envs.grading.algebra_worker import compare, is_equal, prepare
from envs.grading.normal_form import read
from envs.grading.screening import are_comparable, is_readable, is_tower
from envs.workers.worker import Worker, WorkerDied, WorkerError, WorkerPool
from tests.paths import ROOT

HOG = "9^{9^{9}}"


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(algebra, "ALGEBRA_LIMIT_S", 0.3)
    return 0.3


@pytest.fixture
def prepared() -> Worker:
    worker = Worker()
    assert worker.call(prepare, algebra.ALGEBRA_MEMORY_BYTES, timeout_s=60.0)
    return worker


def test_a_hog_is_killed_when_it_has_used_its_processor_time(prepared: Worker) -> None:
    start = time.perf_counter()
    with pytest.raises(WorkerDied, match="SIGPROF"):
        prepared.call(compare, HOG, "5", 0.3, timeout_s=60.0)
    assert not prepared.is_alive
    assert 0.25 < time.perf_counter() - start < 10.0


def test_a_worker_lives_on_after_comparisons_within_the_limit(prepared: Worker) -> None:
    verdicts = [prepared.call(compare, f"x+{n}", f"{n % 3}+x", 0.5, timeout_s=60.0) for n in range(60)]
    assert verdicts == [n == n % 3 for n in range(60)]
    assert prepared.is_alive
    prepared.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits it")
def test_a_worker_cannot_take_more_than_its_memory(prepared: Worker) -> None:
    with pytest.raises(WorkerError, match="MemoryError"):
        prepared.call(bytearray, algebra.ALGEBRA_MEMORY_BYTES, timeout_s=60.0)
    assert prepared.call(compare, "x+1", "1+x", 2.0, timeout_s=60.0)
    prepared.kill()


@pytest.mark.alone
def test_a_hog_is_not_shown_equal_costs_its_limit_once_and_does_not_harm_the_next_call(short_limit: float) -> None:
    start = time.perf_counter()
    assert not equal_by_algebra(HOG, "once")
    first = time.perf_counter() - start
    assert not equal_by_algebra(HOG, "once")
    second = time.perf_counter() - start - first
    assert equal_by_algebra("once+1", "1+once")
    assert first >= short_limit > second


@pytest.mark.alone
def test_hogs_in_several_threads_all_end_and_the_pool_recovers(
    monkeypatch: pytest.MonkeyPatch, short_limit: float
) -> None:
    monkeypatch.setattr(algebra, "_POOL", WorkerPool(2))
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        verdicts = list(threads.map(lambda n: equal_by_algebra(f"{HOG}+{n}", "7"), range(4)))
        again = list(threads.map(lambda n: equal_by_algebra(f"xyz+{n}", f"{n}+zyx"), range(4)))
    assert (verdicts, again) == ([False] * 4, [True] * 4)
    # two hogs one after the other, and each new process 0.6 s
    assert 0.5 < time.perf_counter() - start < 30.0


def test_the_import_of_sympy_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "ALGEBRA_LIMIT_S", 0.2)  # it takes twice as long
    monkeypatch.setattr(algebra, "_POOL", WorkerPool(1))
    assert equal_by_algebra("cold+1", "1+cold")


def _raise(error: type[BaseException]) -> None:
    raise error


def _fail_to_import(memory_bytes: int) -> bool:
    raise ImportError(f"no sympy in {memory_bytes} bytes")


def test_a_worker_that_something_else_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "_POOL", pool := WorkerPool(1))
    assert equal_by_algebra("alive+1", "1+alive")
    with pool.worker() as worker:
        pass
    os.kill(worker.pid, signal.SIGKILL)
    assert equal_by_algebra("killed+1", "1+killed")


def _wait(answer: str, label: str, limit_s: float) -> bool:
    time.sleep(600)
    return True


def test_a_worker_that_waits_instead_of_computing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert algebra.ALGEBRA_LIMIT_S < algebra.ALGEBRA_WALL_LIMIT_S <= 60
    monkeypatch.setattr(algebra, "_POOL", WorkerPool(1))
    with monkeypatch.context() as waiting:
        waiting.setattr(algebra, "compare", _wait)
        waiting.setattr(algebra, "ALGEBRA_WALL_LIMIT_S", 0.2)
        assert not equal_by_algebra("waits+1", "1+waits")
    assert equal_by_algebra("later+1", "1+later")


def test_where_math_verify_does_not_run_it_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "prepare", _fail_to_import)
    monkeypatch.setattr(algebra, "_POOL", WorkerPool(1))
    for _ in range(2):  # the place in the pool is free again
        with pytest.raises(UserError, match=r"math-verify: .* got ImportError: no sympy in .*; install"):
            equal_by_algebra("absent+1", "1+absent")


def test_grading_works_in_many_threads_at_once() -> None:
    scores: list[float] = []
    threads = [
        threading.Thread(target=lambda n=n: scores.append(grade(f"{n}y + y", f"{n + 1}y"))) for n in range(2, 10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * 8


def test_grading_works_inside_of_a_worker_process() -> None:
    worker = Worker()
    assert worker.call(grade, "y + y + 7", "2y+7", timeout_s=60.0) == 1.0
    worker.kill()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), 9)"])
def test_no_process_is_left_behind_by_a_program_that_ends_amid_hogs(end: str) -> None:
    """Every descendant inherits the pipe of the output, so `run` returns only when all have ended."""
    program = f"""
import os, sys, threading, time
from envs.grading import algebra, grade
from envs.workers.worker import Worker
algebra.ALGEBRA_LIMIT_S = algebra.ALGEBRA_WALL_LIMIT_S = 300.0
worker = Worker()
print(grade("y + y", "2y"), worker.call(grade, "y + y", "2y"), flush=True)
threading.Thread(target=lambda: algebra.equal_by_algebra("{HOG}", "5"), daemon=True).start()
threading.Thread(target=lambda: worker.call(algebra.equal_by_algebra, "{HOG}", "5"), daemon=True).start()
time.sleep(0.3)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1.0 1.0\n"


@pytest.mark.parametrize(
    "hog",
    [HOG, "9^9^9", "(9^9)^{9^9}", "x^{99999}", "9^{9!}", "99999!", "5!!", "((9^{99})^{99})^{99}", r"\sqrt[999]{9}"],
)
def test_a_tower_never_reaches_math_verify(hog: str) -> None:
    assert is_tower(read(hog))


@pytest.mark.parametrize(
    "text",
    ["e^{-x^2}", "2^{n+1}", "x^{\\frac{1}{2}}", "(n+1)!", "\\sqrt[n]{x}", "1.05^{10}x", "e^{-0.693t}", "(x+y)^{9}"],
)
def test_an_honest_power_does(text: str) -> None:
    assert is_readable(read(text)) and not is_tower(read(text))


@pytest.mark.parametrize(
    "text",
    [
        "angle 3 is x",
        r"\angle 3",
        r"\triangle ABC",
        "5 or x",
        "x 2 3",
        "2_3x",
        "x.y",
        "(x",
        "x)",
        "{" * 9 + "x" + "}" * 9,
    ],
)
def test_what_math_verify_would_misread_does_not_reach_it(text: str) -> None:
    assert not is_readable(read(text))


@pytest.mark.parametrize(
    ("left", "right"),
    [("3", "3x"), ("68", "5=68"), ("3y=2x", "2x"), ("2x", "2X"), ("(a,b)", "a,b"), ("(a,b)", "[a,b]")],
)
def test_a_pair_that_cannot_be_equal_does_not_reach_it(left: str, right: str) -> None:
    assert not are_comparable(read(left), read(right))
    assert not are_comparable(read(right), read(left))


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        (r"8\sqrt{2}", "2", False),  # a bare 8\sqrt{2} is read as 2
        ("(x+1)(2)(3)", "5(x+1)", False),  # it reads (2)(3) at the end of a product as 2 + 3
        ("(x+1)(2)(3)", "6(x+1)", True),
        ("a2(3)", "6a", True),
        (r"\log_2(8)", "3", True),
        ("x>5", r"(5,\infty)", True),
        (r"(5,\infty)", "x>5", True),
        ("1<x<2", "[1,2]", False),
        ("(1,2)", "[1,2]", False),
        ("5h", "5g", False),  # it takes h and g for units
        ("2ab+c", "2ab", False),
        (r"\pi\sqrt{\infty}", "5", False),  # it takes their difference for 0
        (r"\frac{x}{0}", r"\frac{5}{0}", False),
        (r"(-\infty,3)\cup(5,\infty)", r"(5,\infty)\cup(-\infty,3)", True),
        (r"\angle", "x", False),
        # What is not defined equals nothing, not even itself; a lone infinity does.
        (r"\infty-\infty", r"\infty-\infty", False),
        (r"0\cdot\infty", r"0\cdot\infty", False),
        (r"\frac{1}{0}", r"\frac{1}{0}", False),
        (r"\infty", r"\infty", True),
        (r"-\infty", r"-\infty", True),
    ],
)
def test_math_verify_itself_is_asked_in_the_way_it_understands(answer: str, label: str, expected: bool) -> None:
    assert is_equal(answer, label) is expected
