"""Named checks: the verdict of a check, the run that collects findings, and how findings are shown.

`envs.check`, `agents.check_engine` and `trainer.doctor` all use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from envs.console import Console
from envs.errors import UserError

#: From harmless to harmful; combined verdicts get the worst status among them.
Status = Literal["skipped", "ok", "warning", "fault"]
_ORDER: tuple[Status, ...] = ("skipped", "ok", "warning", "fault")
_STYLES: Mapping[Status, str] = {"skipped": "dim", "ok": "green", "warning": "yellow", "fault": "bold red"}
_WORDS: Mapping[Status, str] = {"skipped": "n/a", "ok": "passed", "warning": "warning", "fault": "FAILED"}
MAX_SHOWN = 300


@dataclass(frozen=True)
class Verdict:
    """The status, what was found (with numbers), and how to fix it.

    Example::

        fault("another image moves the text after it by 0 nats", "take SGLang 0.5.15 or later")
    """

    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Finding:
    """The verdict of a named check, and the seconds that it took.

    Example::

        Finding("sight of the engine", "fault", "another image moves the text after it by 0 nats", "...", 0.41).line
        # "sight of the engine: another image moves the text after it by 0 nats; ..."
    """

    check: str
    status: Status
    found: str
    fix: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def passed(self) -> bool | None:
        """Whether there is no fault; None if the check does not apply."""
        if self.status == "skipped":
            return None
        return self.status != "fault"

    @property
    def detail(self) -> str:
        """What was found and the fix, in one line."""
        return "; ".join(filter(None, (self.found, self.fix)))

    @property
    def line(self) -> str:
        """Name, what was found and the fix, in one line."""
        return f"{self.check}: {self.detail}"


class Broken(Exception):
    """Ends a check from within a function that it calls: `Broken(found, fix)` is the verdict `fault(found, fix)`."""


class NotApplicable(Exception):
    """Ends a check from within a function that it calls: `NotApplicable(reason)` is `skipped(reason)`."""


#: What a check returns: its verdict or, where all is well, the text of what was found.
Result = Verdict | str
Check = Callable[[], Result | Coroutine[Any, Any, Result]]


def ok(found: str) -> Verdict:
    """Return the verdict that all is well."""
    return Verdict("ok", found)


def warning(found: str, fix: str) -> Verdict:
    """Return the verdict that something may be wrong, or does little harm."""
    return Verdict("warning", found, fix)


def fault(found: str, fix: str = "") -> Verdict:
    """Return the verdict that something is wrong."""
    return Verdict("fault", found, fix)


def skipped(reason: str) -> Verdict:
    """Return the verdict that the check does not apply here, or could not run."""
    return Verdict("skipped", reason)


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """Return one verdict for several: the worst status, with everything that was found at that status.

    >>> combine([ok("torch 2.13"), warning("cuDNN 9.10", "take 9.15"), ok("ray 2.60")])
    Verdict(status='warning', found='cuDNN 9.10', fix='take 9.15')
    >>> combine([ok("torch 2.13"), ok("ray 2.60")]).found
    'torch 2.13; ray 2.60'
    """
    verdicts = list(verdicts)
    worst: Status = "skipped"
    for verdict in verdicts:
        if _ORDER.index(verdict.status) > _ORDER.index(worst):
            worst = verdict.status
    chosen = [verdict for verdict in verdicts if verdict.status == worst]
    fixes = dict.fromkeys(verdict.fix for verdict in chosen if verdict.fix)
    return Verdict(worst, "; ".join(verdict.found for verdict in chosen), "; ".join(fixes))


def crashed(error: Exception) -> Verdict:
    """Return the fault for an exception: a user error in its own words, any other with its class and place."""
    if isinstance(error, UserError):
        got = " ".join(str(error.got).split())
        return fault(f"{error.field} {error.rule}, got {got:.{MAX_SHOWN}}", error.fix)
    place = ""
    trace = error.__traceback__
    while trace is not None:  # the last place is the innermost
        place = f" ({trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    return fault(f"ended with {type(error).__name__}: {text:.{MAX_SHOWN}}{place}", "see what the message names")


class CheckRun:
    """Runs checks one after the other and collects their findings. A check that raises is a fault.

    Example::

        checks = CheckRun(only=("sight",))
        checks.run("versions", config_checks.versions)               # not run: no "sight" in its name
        checks.run("sight of the learner", prepared.image_sensitivity)
        checks.faults()                                              # [] or [Finding("sight of the learner", ...)]
    """

    def __init__(
        self,
        only: Sequence[str] = (),
        on_check: Callable[[str], None] = lambda name: None,
        wait: Callable[[Coroutine[Any, Any, Result]], Result] = asyncio.run,
    ) -> None:
        """Run the checks with one of the words `only` in their name, or all.

        `on_check(name)` is called before each, `wait(coroutine)` runs those that are asynchronous.
        """
        self._only = only
        self._on_check = on_check
        self._wait = wait
        self.findings: list[Finding] = []

    def wants(self, *names: str) -> bool:
        """Return whether any of these checks should run."""
        return not self._only or any(word in name for word in self._only for name in names)

    def run(self, name: str, check: Check, is_needed: bool = False) -> bool:
        """Run a check if it is wanted, or if other checks need its result; return whether it has found no fault."""
        if not is_needed and not self.wants(name):
            return True  # what was not looked at stops nothing
        self._on_check(name)
        started = time.perf_counter()
        try:
            result = check()
            if not isinstance(result, Verdict | str):
                result = self._wait(result)
            if isinstance(result, str):
                verdict = ok(result)
            else:
                verdict = result
        except Broken as broken:
            verdict = fault(*broken.args)
        except NotApplicable as reason:
            verdict = skipped(*reason.args)
        except Exception as error:  # one check must not hide what the others find
            verdict = crashed(error)
        self._add(name, verdict, time.perf_counter() - started)
        return verdict.status != "fault"

    def skip(self, names: Iterable[str], reason: str) -> None:
        """Add these checks as skipped if they are wanted and have not run."""
        done = {finding.check for finding in self.findings}
        for name in names:
            if name not in done and self.wants(name):
                self._add(name, skipped(reason), 0.0)

    def faults(self, *names: str) -> list[Finding]:
        """Return the faults that these checks, or with no names all checks, have found."""
        return [f for f in self.findings if f.status == "fault" and (not names or f.check in names)]

    def _add(self, name: str, verdict: Verdict, seconds: float) -> None:
        self.findings.append(Finding(name, verdict.status, verdict.found, verdict.fix, round(seconds, 3)))


def findings_table(
    findings: Iterable[Finding], words: Mapping[Status, str], columns: Sequence[str], title: str = ""
) -> Table:
    """Return findings for the screen, with a word for each status; a fourth column, if named, shows the seconds."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    check, result, found, *seconds = columns
    table.add_column(check, no_wrap=True)
    table.add_column(result, no_wrap=True)
    table.add_column(found, overflow="fold")
    for name in seconds:
        table.add_column(name, justify="right", no_wrap=True)
    for finding in findings:
        shown = Text(finding.found)
        if finding.status == "skipped":
            shown.stylize("dim")
        if finding.fix:
            shown.append(f"\n-> {finding.fix}", "bold")
        cells = [Text(finding.check), Text(words[finding.status], _STYLES[finding.status]), shown]
        table.add_row(*cells, *(f"{finding.seconds:.1f}" for _ in seconds))
    return table


def print_findings(name: str, what: str, findings: Sequence[Finding], console: Console) -> int:
    """Print findings about something of this name as a table; return the exit code."""
    console.print(findings_table(findings, _WORDS, ("check", "result", "detail"), f"{name}: {what}"))
    count = {passed: sum(finding.passed is passed for finding in findings) for passed in (True, False, None)}
    console.print(f"{name}: {count[True]} passed, {count[False]} failed, {count[None]} not applicable")
    return int(count[False] > 0)
