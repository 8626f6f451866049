"""Tests in a fork of this process: which test runs which lines, and whether any fails.

A fork has imported nothing of the tree, so it imports the files as they are then.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: What a test may take on a mutant: so many times what it took without, and some seconds.
TIMES, GRACE_S = 5.0, 20.0
MEMORY_BYTES = 3 * 2**30
#: Tests that measure time are left out: on a busy machine they would catch any mutant.
TIMED = "not hog and not threads and not linear_time and not microseconds and not at_once"
ARGUMENTS = (
    "-q", "-x", "-m", "not alone", "-k", TIMED, "-p", "no:cacheprovider", "-p", "no:warnings",
    "--tb=no", "--no-header",
)  # fmt: skip


@dataclass
class Plan:
    """Which tests run which lines of the mutated files, and how long each takes."""

    took_s: dict[str, float] = field(default_factory=dict)
    #: By file, then by line; "" are lines that are run when the file is imported.
    tests: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    def tests_of(self, path: str, lines: Iterable[int]) -> list[str]:
        """Return the tests that run any of the lines: all where the import does, or where none does here.

        Another process may, which nobody measures.
        """
        by_line = self.tests.get(path, {})
        found = {test for line in lines for test in by_line.get(line, [])}
        return sorted(self.took_s) if "" in found or not found else sorted(found)


def measure(copy: Path, tests: Sequence[str], files: Sequence[str]) -> Plan:
    """Run all tests on the unchanged copy; raise where one fails."""
    result = copy.parent / "plan.json"

    def run() -> int:
        import coverage

        cover = coverage.Coverage(data_file=None, include=[str(copy / path) for path in files])
        cover.start()
        plan = _Recorder(cover)
        status = _pytest([*ARGUMENTS, *tests], plan)
        cover.stop()
        data = cover.get_data()
        lines = {path: data.contexts_by_lineno(str(copy / path)) for path in files}
        result.write_text(json.dumps({"took_s": plan.took_s, "tests": lines}))
        return status

    status = _in_fork(copy, run, 1800.0)
    if status != 0:
        raise RuntimeError(f"the tests of {', '.join(files)} do not pass unchanged: status {status}")
    found = json.loads(result.read_text())
    by_line = {path: {int(line): names for line, names in lines.items()} for path, lines in found["tests"].items()}
    return Plan(found["took_s"], by_line)


def all_pass(copy: Path, tests: Sequence[str], plan: Plan) -> bool:
    """Return whether all of some tests pass, the quickest first; false too where they take far longer than planned."""
    names = sorted({test.split("::", 1)[0] for test in tests})
    took_s = {test: plan.took_s[test] for test in tests}
    limit_s = TIMES * sum(took_s.values()) + GRACE_S
    return _in_fork(copy, lambda: _pytest([*ARGUMENTS, *names], _Chooser(took_s)), limit_s) == 0


class _Recorder:
    """Tells coverage which test runs, and keeps how long each takes."""

    def __init__(self, cover: Any) -> None:
        self._cover, self.took_s = cover, dict[str, float]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._cover.switch_context(nodeid)
        self.took_s[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.took_s[nodeid] = time.monotonic() - self.took_s[nodeid]


class _Chooser:
    """Leaves only the tests that are to run, the quickest first."""

    def __init__(self, took_s: Mapping[str, float]) -> None:
        self._took_s = took_s

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._took_s), key=lambda item: self._took_s[item.nodeid]
        )


def _pytest(arguments: Sequence[str], plugin: object) -> int:
    import pytest

    return int(pytest.main(list(arguments), plugins=[plugin]))


def _in_fork(copy: Path, run: Callable[[], int], limit_s: float) -> int:
    """Return the status of `run` in a fork that works in the copy; 124 where it takes longer than the limit."""
    process = os.fork()
    if process == 0:
        status = 125
        try:
            os.setsid()
            silent = os.open(os.environ.get("MUTATION_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            os.chdir(copy)
            sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in ("", os.environ["MUTATION_ROOT"]))]
            status = run()
        finally:
            os._exit(status)
    deadline = time.monotonic() + limit_s
    try:
        while True:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return 124
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what its tests have started
