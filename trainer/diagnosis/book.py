"""The names of all checks, and the book in which findings are written down as they come in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from envs.errors import UserError, did_you_mean
from trainer.diagnosis.finding import Finding, Verdict, examine, examine_async, skipped

#: Those that need a configuration alone, then those of a prepared run, then those of one whose engine runs.
BEFORE = ("versions", "run folder", "memory", "chat template")
PREPARED = (
    "set-up",
    "data",
    "template in play",
    "gold answers",
    "image preprocessing",
    "positions",
    "forward pass",
    "weights of the learner",
    "sight of the learner",
)
RUNNING = (
    "engine",
    "weights of the engine",
    "sight of the engine",
    "agreement",
    "caches after new weights",
)
CHECKS = (*BEFORE, *PREPARED, *RUNNING)


class Book:
    """Findings, of the checks that are wanted: all, or those with one of the words in their names.

    Example::

        book = Book(only=("sight",))
        book.add("versions", before.versions)           # not made
        await book.add_async("sight of the learner", patient.sight)
        book.faults()                                   # [] or [Finding("sight of the learner", "fault", ...)]
    """

    def __init__(self, only: Sequence[str] = (), on_check: Callable[[str], None] = lambda check: None) -> None:
        """`on_check` is told the name of each check before it is made.

        Raises:
            UserError: a word is in no check's name.
        """
        for word in only:
            if not any(word in check for check in CHECKS):
                raise UserError("--only", "must be in the name of a check", word, did_you_mean(word, CHECKS))
        self._only, self._on_check = only, on_check
        self.findings: list[Finding] = []

    def wants(self, *checks: str) -> bool:
        """Return whether any of these is to be made."""
        return not self._only or any(word in check for word in self._only for check in checks)

    def add(self, check: str, look: Callable[[], Verdict], is_needed: bool = False) -> None:
        """Make a check, where it is wanted, or others need what it makes."""
        if is_needed or self.wants(check):
            self._on_check(check)
            self.findings.append(examine(check, look))

    async def add_async(self, check: str, look: Callable[[], Awaitable[Verdict]], is_needed: bool = False) -> None:
        """Make a check that is waited for, likewise."""
        if is_needed or self.wants(check):
            self._on_check(check)
            self.findings.append(await examine_async(check, look()))

    def skip(self, checks: Sequence[str], reason: str) -> None:
        """Note that those that are not made yet cannot be made."""
        done = {finding.check for finding in self.findings}
        for check in checks:
            if check not in done:
                self.add(check, lambda: skipped(reason))

    def faults(self, *checks: str) -> list[Finding]:
        """Return what is wrong, in some checks or, with none named, in all."""
        return [f for f in self.findings if f.status == "fault" and (not checks or f.check in checks)]


def closing(findings: Sequence[Finding], seconds: float) -> str:
    """Return what was found, in one line.

    >>> closing([Finding("versions", "ok", "torch 2.13"), Finding("memory", "fault", "too little")], seconds=0.21)
    'doctor: 1 check sound, 1 fault, 0.2 s'
    """
    count = {status: sum(f.status == status for f in findings) for status in ("ok", "warning", "fault", "skipped")}
    parts = [f"{count['ok']} check{'s' * (count['ok'] != 1)} sound"]
    parts += [f"{count[word]} {word}{'s' * (count[word] != 1)}" for word in ("warning", "fault") if count[word]]
    parts += [f"{count['skipped']} skipped"] if count["skipped"] else []
    return f"doctor: {', '.join(parts)}, {seconds:.1f} s"
