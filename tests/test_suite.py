"""Claims about the suite itself: `make test-all` runs every test, and is what a change must pass."""

from __future__ import annotations

import itertools
import re

from tests.paths import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def selections() -> dict[str, list[str]]:
    """Return the mark expressions of the pytest commands by target."""
    found: dict[str, list[str]] = {}
    target = ""
    for line in MAKEFILE.splitlines():
        if name := re.match(r"([a-z-]+):", line):
            target = name[1]
        elif "$(PYTEST)" in line:
            (expression,) = re.findall(r'-m (?:"([^"]+)"|(?:\w+))$', line)
            found.setdefault(target, []).append(expression or line.split()[-1])
    return found


def test_every_test_is_run_by_make_test_all_whatever_its_marks() -> None:
    parts = selections()
    assert parts.keys() == {"test", "test-all"} and re.search(r"^test-all: test\b", MAKEFILE, re.MULTILINE)
    for marks in itertools.product([False, True], repeat=3):
        slow, alone, hypothesis = marks
        named = {"slow": slow, "alone": alone, "hypothesis": hypothesis}
        quick, rest = ([bool(eval(e, {}, named)) for e in parts[target]] for target in ("test", "test-all"))
        assert quick == [not slow and not alone], named
        assert any(quick + rest), named
        assert sum(rest) == (slow or alone or hypothesis), named  # random cases in full number, the others once


def test_what_measures_time_limits_runs_last_and_in_one_process() -> None:
    *_, last = [line for line in MAKEFILE.splitlines() if "$(PYTEST)" in line]
    assert last.split("$(PYTEST)")[1].split() == ["-m", "alone"]


def test_a_change_must_pass_all_tests() -> None:
    assert "stage test-all\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_target_of_make_is_in_its_help() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert [name for name in targets.split() if not re.search(rf"^{name}:.*## \w", MAKEFILE, re.MULTILINE)] == []
