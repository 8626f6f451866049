"""The result of a check: the `Verdict` that the check returns, and the `Finding` that is printed and written.

`run_check` calls a check, times it, and makes a finding of its verdict or of the exception that it raises.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from envs.errors import UserError

#: From harmless to harmful; combined verdicts get the worst status among them.
Status = Literal["skipped", "ok", "warning", "fault"]
_ORDER: tuple[Status, ...] = ("skipped", "ok", "warning", "fault")
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
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """Name, what was found and the fix, in one line."""
        return f"{self.check}: {self.found}{f'; {self.fix}' if self.fix else ''}"


def ok(found: str) -> Verdict:
    """Return the verdict that all is well."""
    return Verdict("ok", found)


def warning(found: str, fix: str) -> Verdict:
    """Return the verdict that something may be wrong, or does little harm."""
    return Verdict("warning", found, fix)


def fault(found: str, fix: str) -> Verdict:
    """Return the verdict that a run would be wrong, or would fail."""
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
    for status in _ORDER:
        worst = status if any(verdict.status == status for verdict in verdicts) else worst
    chosen = [verdict for verdict in verdicts if verdict.status == worst]
    fixes = dict.fromkeys(verdict.fix for verdict in chosen if verdict.fix)
    return Verdict(worst, "; ".join(verdict.found for verdict in chosen), "; ".join(fixes))


def run_check(name: str, check: Callable[[], Verdict]) -> Finding:
    """Run a check and return its finding; an exception becomes a fault."""
    started = time.perf_counter()
    try:
        verdict = check()
    except Exception as error:  # one check must not hide what the others find
        verdict = crashed(error)
    return _finding(name, verdict, started)


async def run_check_async(name: str, check: Awaitable[Verdict]) -> Finding:
    """Await a check and return its finding; an exception becomes a fault."""
    started = time.perf_counter()
    try:
        verdict = await check
    except Exception as error:
        verdict = crashed(error)
    return _finding(name, verdict, started)


def _finding(name: str, verdict: Verdict, started: float) -> Finding:
    return Finding(name, verdict.status, verdict.found, verdict.fix, round(time.perf_counter() - started, 3))


def crashed(error: Exception) -> Verdict:
    """Return the fault for an exception: a user error in its own words, any other with its class and place."""
    if isinstance(error, UserError):
        got = " ".join(str(error.got).split())
        return fault(f"{error.field} {error.rule}, got {got:.{MAX_SHOWN}}", error.fix)
    place = ""
    trace = error.__traceback__
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    return fault(f"ended with {type(error).__name__}: {text:.{MAX_SHOWN}}{place}", "see what the message names")
