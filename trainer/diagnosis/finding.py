"""What a check says: a verdict on what it was given, and the finding that a table, a file or a run is told.

A check is a function that returns a `Verdict`; `examine` calls it, times it, and makes a finding of whatever it raises.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from envs.errors import UserError

#: From harmless to harmful; several verdicts together are as bad as the worst of them.
Status = Literal["skipped", "ok", "warning", "fault"]
_ORDER: tuple[Status, ...] = ("skipped", "ok", "warning", "fault")
MAX_SHOWN = 300


@dataclass(frozen=True)
class Verdict:
    """How it is, what was found with figures, and what mends it.

    Example::

        fault("another picture moves the text after it by 0 nats", "take SGLang 0.5.15 or later")
    """

    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Finding:
    """The verdict of one check, and the seconds that it took.

    Example::

        Finding("sight of the engine", "fault", "another picture moves the text after it by 0 nats", "...", 0.41).line
        # "sight of the engine: another picture moves the text after it by 0 nats; ..."
    """

    check: str
    status: Status
    found: str
    fix: str = ""
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """All of it but the seconds, in one line."""
        return f"{self.check}: {self.found}{f'; {self.fix}' if self.fix else ''}"


def ok(found: str) -> Verdict:
    """Return that it is as it should be."""
    return Verdict("ok", found)


def warning(found: str, fix: str) -> Verdict:
    """Return that it may be wrong, or harm little."""
    return Verdict("warning", found, fix)


def fault(found: str, fix: str) -> Verdict:
    """Return that a run would be wrong, or not end."""
    return Verdict("fault", found, fix)


def skipped(reason: str) -> Verdict:
    """Return that it does not apply here, or could not be looked at."""
    return Verdict("skipped", reason)


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Return one verdict of several: the worst, with all that was found at its level.

    >>> together([ok("torch 2.13"), warning("cuDNN 9.10", "take 9.15"), ok("ray 2.60")])
    Verdict(status='warning', found='cuDNN 9.10', fix='take 9.15')
    >>> together([ok("torch 2.13"), ok("ray 2.60")]).found
    'torch 2.13; ray 2.60'
    """
    verdicts = list(verdicts)
    worst: Status = "skipped"
    for status in _ORDER:
        worst = status if any(verdict.status == status for verdict in verdicts) else worst
    chosen = [verdict for verdict in verdicts if verdict.status == worst]
    fixes = dict.fromkeys(verdict.fix for verdict in chosen if verdict.fix)
    return Verdict(worst, "; ".join(verdict.found for verdict in chosen), "; ".join(fixes))


def examine(check: str, look: Callable[[], Verdict]) -> Finding:
    """Call a check; what it raises is a fault, named as such."""
    started = time.perf_counter()
    try:
        verdict = look()
    except Exception as error:  # one check must not hide what the others find
        verdict = crashed(error)
    return _finding(check, verdict, started)


async def examine_async(check: str, look: Awaitable[Verdict]) -> Finding:
    """Wait for a check, as `examine` calls one."""
    started = time.perf_counter()
    try:
        verdict = await look
    except Exception as error:
        verdict = crashed(error)
    return _finding(check, verdict, started)


def _finding(check: str, verdict: Verdict, started: float) -> Finding:
    return Finding(check, verdict.status, verdict.found, verdict.fix, round(time.perf_counter() - started, 3))


def crashed(error: Exception) -> Verdict:
    """Return what an exception says: a user error in its own words, any other by its class and place."""
    if isinstance(error, UserError):
        got = " ".join(str(error.got).split())
        return fault(f"{error.field} {error.rule}, got {got:.{MAX_SHOWN}}", error.fix)
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    return fault(f"ended with {type(error).__name__}: {text:.{MAX_SHOWN}}{place}", "see what the message names")
