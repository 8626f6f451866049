"""Claims about what episodes leave in the program, and about the time that the check of an environment takes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs import Env, Sample
from envs.check import check_env
from envs.checks import Finding
from envs.execution.process_env import ProcessEnv
from envs.spec import EnvSpec
from envs.workers.process_info import children, num_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
#: A number that no other test waits for.
SLEEP_S = "600.0625"
_HERE = Path.cwd()
_random = random.random
_kept: list[Any] = []


def samples(split: str, size: int, seed: int) -> list[Sample]:
    return [Sample(str(n), ({"role": "user", "content": "Say yes."},), "yes") for n in range(size)]


class Tidy(Env):
    """Right is "yes"."""

    def __init__(self, sample: Sample, args: Any) -> None:
        self.sample = sample

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        self.leave()
        return {}, True, {}

    def reward(self, final_text: str) -> float:
        return float(final_text == "yes")

    def solution(self) -> list[str]:
        return ["yes"]

    def leave(self) -> None:
        pass


class LeavesChild(Tidy):
    def leave(self) -> None:
        subprocess.Popen(["sleep", SLEEP_S])


class LeavesChildInASession(Tidy):
    def leave(self) -> None:
        subprocess.Popen(["sleep", SLEEP_S], start_new_session=True)


class LeavesThread(Tidy):
    def leave(self) -> None:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


class LeavesFile(Tidy):
    def leave(self) -> None:
        _kept.append(Path(os.devnull).open())  # noqa: SIM115 - the fault


class Walks(Tidy):
    def leave(self) -> None:
        os.chdir("/")


class Sets(Tidy):
    def leave(self) -> None:
        os.environ["TIDY_TEST"] = "left"


class Patches(Tidy):
    def leave(self) -> None:
        random.random = lambda: 0.5


class KeepsOne(Tidy):
    """Makes its resources once and keeps them, as a client does."""

    def leave(self) -> None:
        if not _kept:
            _kept.append(subprocess.Popen(["sleep", SLEEP_S]))
            _kept.append(Path(os.devnull).open())  # noqa: SIM115 - kept on purpose


class HangsInClose(Tidy):
    def close(self) -> None:
        time.sleep(600)


class Slow(Tidy):
    def leave(self) -> None:
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def clean_up() -> Iterator[None]:
    """Undo what the environments leave."""
    before = set(children())
    yield
    os.chdir(_HERE)
    os.environ.pop("TIDY_TEST", None)
    random.random = _random
    for item in _kept:
        item.kill() if isinstance(item, subprocess.Popen) else item.close()
    _kept.clear()
    for child in set(children()) - before:
        if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"):
            os.kill(child, 9)


def spec_of(env: type, **keys: Any) -> EnvSpec:
    entry = {"entry_point": f"{__name__}:{env.__name__}", "dataset": f"{__name__}:samples", "max_turns": 1}
    return EnvSpec.model_validate({"id": "tidy", "description": "x", **entry, **keys})


def checked(env: type, max_seconds: float = 120, **keys: Any) -> dict[str, Finding]:
    return {each.check: each for each in check_env(spec_of(env, **keys), num_samples=3, max_seconds=max_seconds)}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (LeavesChild, "processes"),
        (LeavesThread, "threads"),
        (LeavesFile, "open files"),
        (Walks, "the working directory is now /"),
        (Sets, "TIDY_TEST"),
        (Patches, "random.random"),
    ],
)
def test_what_outlives_an_episode_is_found_and_nothing_else(env: type, words: str) -> None:
    findings = checked(env)
    assert [name for name, found in findings.items() if found.passed is False] == ["leftovers"]
    assert words in findings["leftovers"].detail and "isolation: process" in findings["leftovers"].detail
    assert Path.cwd() == _HERE


@pytest.mark.parametrize("env", [Tidy, KeepsOne])
def test_what_is_made_once_and_kept_is_no_leftover(env: type) -> None:
    assert checked(env)["leftovers"].passed is True


def played(env: type) -> ProcessEnv:
    """Play an episode in a worker and close it."""
    sample = samples("train", 1, 0)[0]
    spec = spec_of(env, isolation="process")
    one = ProcessEnv(spec, sample, spec.args())
    one.reset()
    one.step("yes")
    one.close()
    return one


@pytest.mark.parametrize("env", [LeavesChild, LeavesChildInASession])
def test_a_worker_ends_the_processes_that_an_episode_leaves(env: type) -> None:
    def sleepers() -> int:
        found = subprocess.run(["pgrep", "-c", "-f", f"sleep {SLEEP_S}"], capture_output=True, text=True, check=False)
        return int(found.stdout)

    before = sleepers()
    for _ in range(5):
        played(env)
    deadline = time.monotonic() + 5
    while sleepers() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleepers() == before


def test_a_worker_whose_episodes_leave_files_is_replaced_in_time() -> None:
    workers = [played(LeavesFile)._worker for _ in range(40)]
    assert len({id(worker) for worker in workers}) > 1


def test_a_worker_is_kept_while_its_episodes_are_tidy() -> None:
    assert len({id(played(Tidy)._worker) for _ in range(5)}) == 1


@pytest.mark.alone
def test_a_close_that_hangs_ends_the_check_after_one_limit() -> None:
    started = time.monotonic()
    findings = checked(HangsInClose, step_timeout_s=0.5)
    assert findings["closing"].passed is False and "longer than 0.5 s" in findings["closing"].detail
    assert time.monotonic() - started < 3


@pytest.mark.alone
def test_no_episode_begins_when_the_time_of_the_check_is_up() -> None:
    started = time.monotonic()
    findings = checked(Slow, max_seconds=1)
    assert 1 < time.monotonic() - started < 3
    assert findings["contract"].detail.startswith("stopped after 1 s (--max-seconds); ")
    assert findings["leftovers"].passed is None


def test_open_files_are_counted() -> None:
    before = num_files()
    with Path(os.devnull).open():
        assert num_files() == before + 1
