"""Claims about code of an environment that keeps the interpreter, so that no time limit can act."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from envs.env import Env
from envs.execution.runner import EnvRunner
from envs.execution.watchdog import WATCHDOG
from envs.execution.watchdog_process import NUM_RECORDS, stack_of, under_way
from envs.spec import EnvLimits
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads processor times of threads from /proc")


class Quiet(Env):
    """Says nothing."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return {}, True, {}

    def reward(self, final_text: str) -> float:
        return 0.0


#: In place of the 10 s below which no limit is.
SHORTEST_S = 2.0
#: Plays three environments at once; that of sample 1 does what `deed` says, the others are over at once.
PROGRAM = """
    import asyncio, ctypes, re, sys, time
    from envs.env import Env
    from envs.execution import watchdog
    from envs.execution.runner import EnvRunner
    from envs.spec import EnvLimits

    watchdog.SHORTEST_S = {shortest_s}

    class Odd(Env):
        def __init__(self, number):
            self.number = number
        def reset(self):
            return {{}}, {{}}
        def reward(self, final_text):
            return 0.0
        def step(self, response_text):
            if self.number == 1:
                {deed}
            return {{}}, True, {{}}

    class Says:
        def __repr__(self):
            return str(re.match(r"(a+)+$", "a" * 60 + "b"))

    class Raises(Exception):
        def __str__(self):
            return repr(Says())

    async def play(number):
        runner = EnvRunner(lambda: Odd(number), EnvLimits(step_timeout_s=2, inline={inline}), str(number))
        await runner.open()
        await runner.step("")
        print("played", number, flush=True)

    async def main():
        await asyncio.gather(*map(play, range(3)), return_exceptions=True)
        await asyncio.sleep({wait})
        print("over", flush=True)

    asyncio.run(main())
"""


def run_program(
    deed: str, tmp_path: Path, inline: bool = False, wait: int = 0
) -> tuple[subprocess.CompletedProcess[str], float]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).format(deed=deed, inline=inline, wait=wait, shortest_s=SHORTEST_S))
    started = time.monotonic()
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, env=variables, timeout=120
    )
    return done, time.monotonic() - started


@pytest.mark.slow
@pytest.mark.parametrize(
    "deed",
    ['re.match(r"(a+)+$", "a" * 60 + "b")', "ctypes.PyDLL(None).sleep(1000)", "sum(range(10**14))"],
    ids=["regex", "C code that sleeps", "a loop in C"],
)
def test_a_call_that_keeps_the_interpreter_ends_the_program_and_is_named_with_its_line(
    deed: str, tmp_path: Path
) -> None:
    done, seconds = run_program(deed, tmp_path)
    assert done.returncode == -signal.SIGKILL and "over" not in done.stdout
    assert done.stderr.startswith("error: step of Odd, sample 1: must let other code run within its limit of 2 s")
    assert "isolation: process" in done.stderr and f'{tmp_path}/program.py", line 19 in step' in done.stderr
    assert SHORTEST_S < seconds < SHORTEST_S + 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "wait"),
    [("return {}, True, {'a': Says()}", 0), ("raise Raises", 0), ("time.sleep(3); repr(Says())", 15)],
    ids=["the text of an info", "the text of an error", "a call that nobody waits for"],
)
def test_whatever_runs_code_of_an_environment_is_named(deed: str, wait: int, tmp_path: Path) -> None:
    done, _ = run_program(deed, tmp_path, wait=wait)
    assert done.returncode == -signal.SIGKILL and "over" not in done.stdout
    assert done.stderr.startswith("error: step of Odd, sample 1: must let other code run within its limit of 2 s")
    assert re.search(rf'{tmp_path}/program.py", line \d+ in __repr__\n', done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["time.sleep(1000)", "while True: pass"])
def test_an_inline_call_that_does_not_return_ends_the_program_and_is_named(deed: str, tmp_path: Path) -> None:
    done, _ = run_program(deed, tmp_path, inline=True)
    assert done.returncode == -signal.SIGKILL and "over" not in done.stdout
    assert done.stderr.startswith("error: step of Odd, sample 1: must return within its limit of 2 s")
    assert "isolation: thread" in done.stderr and f'{tmp_path}/program.py", line 19 in step' in done.stderr


@pytest.mark.slow
def test_a_program_that_was_stopped_and_continued_goes_on(tmp_path: Path) -> None:
    wakes = f"'sleep {SHORTEST_S + 3}; kill -CONT ' + str(os.getpid())"
    deed = f"subprocess.Popen(['sh', '-c', {wakes}], start_new_session=True); os.kill(os.getpid(), signal.SIGSTOP)"
    done, _ = run_program(f"import os, signal, subprocess; {deed}", tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("over\n")
    assert done.stderr == ""


@pytest.mark.slow
def test_code_of_others_that_keeps_the_interpreter_for_a_while_goes_on(tmp_path: Path) -> None:
    # Counts in C on a thread of its own, while the call of sample 1 only waits.
    holds = "import threading; threading.Thread(target=lambda: sum(range(int(4e8)))).start(); time.sleep(0.5)"
    done, _ = run_program(holds, tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("over\n")


@pytest.mark.parametrize("place", ["reader gone", "reader paused"])
def test_the_program_ends_also_where_nobody_reads_the_message(place: str, tmp_path: Path) -> None:
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    reads, writes = os.pipe()
    if place == "reader gone":
        os.close(reads)
    else:
        os.set_blocking(writes, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writes, bytes(1 << 16))
        os.set_blocking(writes, True)
    ends = "end(int(sys.argv[1]), memoryview(bytes(SIZE)), Call(1, 1, 0, 0, True, b'x'), '', '', '')"
    program = f"import sys; from envs.execution.watchdog_process import SIZE, Call, end; {ends}"
    subprocess.run([sys.executable, "-c", program, str(watched.pid)], stderr=writes, timeout=60, cwd=ROOT, check=False)
    assert watched.wait(10) == -signal.SIGKILL


def test_a_stack_is_found_whatever_its_functions_and_files_are_called() -> None:
    stacks = (
        'Thread 0x00007fbb1ffff6c0 (most recent call first):\n  File "/x/0xzz/a.py", line 3 in step_0xff\n'
        '  File "/y/envs/execution/runner.py", line 1 in watched\n\n'
        'Current thread 0x00007fbb2ffff6c0 [python] (most recent call first):\n  File "b.py", line 4 in main\n'
    )
    assert stack_of(stacks, 0x7FBB1FFFF6C0) == ['  File "/x/0xzz/a.py", line 3 in step_0xff']
    assert stack_of(stacks, 0x7FBB2FFFF6C0) == ['  File "b.py", line 4 in main']
    assert stack_of(stacks, 1) == stack_of("", 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["time.sleep(1000)", "while True: pass"])
def test_a_call_that_lets_others_run_costs_its_own_episode_alone(deed: str, tmp_path: Path) -> None:
    done, _ = run_program(deed, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == sorted(["played", "0", "played", "2", "over"])


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("import os; time.sleep(0.3); os._exit(3)", "by os._exit"),
        ("import os; time.sleep(0.3); os.abort()", "Aborted"),
        ("time.sleep(0.3); ctypes.string_at(0)", "Segmentation fault"),
        ("import os; time.sleep(0.3); os.kill(os.getpid(), 9)", "or by a signal such as SIGKILL"),
    ],
)
def test_a_call_that_ends_the_program_is_named_with_what_to_do(deed: str, cause: str, tmp_path: Path) -> None:
    advise = "from envs.execution.watchdog import WATCHDOG; WATCHDOG.advise('resume with: trueturn \\x1b[2J'); "
    done, _ = run_program(advise + deed, tmp_path)
    assert done.returncode and "over" not in done.stdout
    assert done.stderr.startswith("error: the program has ended during step of Odd, sample 1 (")
    assert cause in done.stderr and r"; resume with: trueturn \x1b[2J" in done.stderr
    if "(by" not in done.stderr:
        assert f'{tmp_path}/program.py", line 19 in step' in done.stderr


def test_a_program_that_ends_by_itself_beside_a_call_that_hangs_says_nothing_of_it(tmp_path: Path) -> None:
    done, _ = run_program("time.sleep(1000)", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_code_that_the_whole_program_waits_for_ends_it_at_its_limit_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import time\nfrom envs.execution import watchdog\nwatchdog.SHORTEST_S = 2\n"
        "with watchdog.watched('sample 7', 1):\n    time.sleep(1000)\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.startswith("error: sample 7: must return within its limit of 1 s")
    assert "isolation" not in done.stderr and f'{path}", line 5' in done.stderr


def test_no_call_is_watched_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Quiet):
        def step(self, response_text: str) -> Any:
            time.sleep(0.4)
            if response_text == "raise":
                raise ValueError
            return {}, True, {}

    async def play(text: str) -> None:
        runner = EnvRunner(Slow, EnvLimits(step_timeout_s=0.2 if text == "hang" else 5))
        await runner.open()
        await runner.step(text)

    def watched() -> int:
        memory = WATCHDOG._memory
        assert memory is not None
        # Calls that other tests have left hanging are watched too.
        return sum("Slow" in call.text for call in under_way(memory))

    async def main() -> list[int]:
        playing = [asyncio.create_task(play(text)) for text in ("fine", "raise", "hang")]
        await asyncio.sleep(0.1)
        during = watched()
        await asyncio.gather(*playing, return_exceptions=True)
        await asyncio.sleep(0.5)  # the thread of the call that hung
        return [during, watched()]

    assert asyncio.run(main()) == [3, 0]


def test_more_calls_than_are_watched_are_played_all_the_same() -> None:
    class Waits(Quiet):
        def step(self, response_text: str) -> Any:
            time.sleep(0.05)
            return {}, True, {}

    async def play() -> bool:
        runner = EnvRunner(Waits, EnvLimits(step_timeout_s=20))
        await runner.open()
        return (await runner.step("")).done

    async def main() -> list[bool]:
        return await asyncio.gather(*(play() for _ in range(2 * NUM_RECORDS)))

    assert all(asyncio.run(main()))


def test_the_watching_process_ends_with_the_program_however_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import os\nfrom envs.execution.watchdog import WATCHDOG\n"
        "WATCHDOG.watch('x', 1).__enter__()\nprint(WATCHDOG._process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, env=variables)
    watching, deadline = Path(f"/proc/{int(done.stdout)}"), time.monotonic() + 10
    while watching.exists() and watching.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
