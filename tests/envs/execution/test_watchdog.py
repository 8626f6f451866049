"""Claims about code of an environment that keeps the interpreter, so that no time limit can act."""

from __future__ import annotations

import asyncio
import os
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
from envs.execution.watchdog_process import CALL, NUM_CALLS, SHORTEST_S
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


#: Plays three environments at once; that of sample 1 does what `deed` says, the others are over at once.
PROGRAM = """
    import asyncio, ctypes, re, sys, time
    from envs.env import Env
    from envs.execution.runner import EnvRunner
    from envs.spec import EnvLimits

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

    async def play(number):
        runner = EnvRunner(lambda: Odd(number), EnvLimits(step_timeout_s=2), str(number))
        await runner.open()
        await runner.step("")
        print("played", number, flush=True)

    async def main():
        await asyncio.gather(*map(play, range(3)), return_exceptions=True)
        print("over", flush=True)

    asyncio.run(main())
"""


def run_program(deed: str, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).format(deed=deed))
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
    assert "isolation: process" in done.stderr and f'{tmp_path}/program.py", line 16 in step' in done.stderr
    assert SHORTEST_S < seconds < 2 * SHORTEST_S


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["time.sleep(1000)", "while True: pass"])
def test_a_call_that_lets_others_run_costs_its_own_episode_alone(deed: str, tmp_path: Path) -> None:
    done, _ = run_program(deed, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == sorted(["played", "0", "played", "2", "over"])


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
        return sum(CALL.unpack_from(memory, 8 + slot * CALL.size)[0] > 0 for slot in range(NUM_CALLS))

    async def main() -> list[int]:
        playing = [asyncio.create_task(play(text)) for text in ("fine", "raise", "hang")]
        await asyncio.sleep(0.1)
        during = watched()
        await asyncio.gather(*playing, return_exceptions=True)
        return [during, watched()]

    before = 0 if WATCHDOG._memory is None else watched()
    assert asyncio.run(main()) == [before + 3, before]


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
        return await asyncio.gather(*(play() for _ in range(2 * NUM_CALLS)))

    assert all(asyncio.run(main()))


def test_the_watching_process_ends_with_the_program_however_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import os\nfrom envs.execution.watchdog import WATCHDOG\n"
        "WATCHDOG.call('x', 1)\nprint(WATCHDOG._process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, env=variables)
    watching, deadline = Path(f"/proc/{int(done.stdout)}"), time.monotonic() + 10
    while watching.exists() and watching.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
