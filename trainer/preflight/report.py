"""The names of all checks, the settings that choose among them, and the log that collects their findings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import Field

from envs.config.settings import Section
from envs.errors import UserError, did_you_mean
from trainer.config.run import RunConfig
from trainer.preflight.finding import Finding, Verdict, run_check, run_check_async, skipped

#: Checks that need only the configuration (`ConfigChecks`).
CONFIG_CHECKS = ("versions", "run folder", "memory", "chat template")
#: Checks that need a prepared run (`PreparedChecks`); "set-up" is the preparation itself.
PREPARED_CHECKS = (
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
#: Checks that need a running engine (`EngineChecks`); "engine" is its start.
ENGINE_CHECKS = (
    "engine",
    "weights of the engine",
    "sight of the engine",
    "agreement",
    "caches after new weights",
)
CHECKS = (*CONFIG_CHECKS, *PREPARED_CHECKS, *ENGINE_CHECKS)


class CheckupConfig(Section):
    """Which checks run, and on how many problems."""

    only: tuple[str, ...] = Field(
        default=(), description=f"checks to run, by a part of their name; {', '.join(CHECKS)}"
    )
    problems: int = Field(default=4, ge=1, description="problems on which the engine generates two episodes each")
    answers: int = Field(default=32, ge=1, description="problems whose right and wrong answers are graded")
    report: Path | None = Field(default=None, description="file to write the findings to, as JSON")


class DoctorConfig(RunConfig):
    """The run to check, and how."""

    checkup: CheckupConfig = CheckupConfig()


class FindingLog:
    """Runs checks and collects their findings: all checks, or those with one of the words `only` in their name.

    Example::

        log = FindingLog(only=("sight",))
        log.add("versions", config_checks.versions)           # not run: no "sight" in its name
        await log.add_async("sight of the learner", prepared.image_sensitivity)
        log.faults()                                          # [] or [Finding("sight of the learner", "fault", ...)]
    """

    def __init__(self, only: Sequence[str] = (), on_check: Callable[[str], None] = lambda name: None) -> None:
        """`on_check(name)` is called before each check.

        Raises:
            UserError: a word of `only` is in no check's name.
        """
        for word in only:
            if not any(word in name for name in CHECKS):
                raise UserError("--only", "must be in the name of a check", word, did_you_mean(word, CHECKS))
        self._only = only
        self._on_check = on_check
        self.findings: list[Finding] = []

    def wants(self, *names: str) -> bool:
        """Return whether any of these checks should run."""
        return not self._only or any(word in name for word in self._only for name in names)

    def add(self, name: str, check: Callable[[], Verdict], is_needed: bool = False) -> None:
        """Run a check if it is wanted, or if other checks need its result."""
        if is_needed or self.wants(name):
            self._on_check(name)
            self.findings.append(run_check(name, check))

    async def add_async(self, name: str, check: Callable[[], Awaitable[Verdict]], is_needed: bool = False) -> None:
        """Run an asynchronous check if it is wanted, or if other checks need its result."""
        if is_needed or self.wants(name):
            self._on_check(name)
            self.findings.append(await run_check_async(name, check()))

    def skip(self, names: Sequence[str], reason: str) -> None:
        """Log these checks as skipped, unless they have run."""
        done = {finding.check for finding in self.findings}
        for name in names:
            if name not in done:
                self.add(name, lambda: skipped(reason))

    def faults(self, *names: str) -> list[Finding]:
        """Return the faults that these checks, or with no names all checks, have found."""
        return [f for f in self.findings if f.status == "fault" and (not names or f.check in names)]


def summary_line(findings: Sequence[Finding], seconds: float) -> str:
    """Return the number of findings of each status, in one line.

    >>> summary_line([Finding("versions", "ok", "torch 2.13"), Finding("memory", "fault", "too little")], seconds=0.21)
    'doctor: 1 check sound, 1 fault, 0.2 s'
    """
    count = {status: sum(f.status == status for f in findings) for status in ("ok", "warning", "fault", "skipped")}
    parts = [f"{count['ok']} check{'s' * (count['ok'] != 1)} sound"]
    parts += [f"{count[word]} {word}{'s' * (count[word] != 1)}" for word in ("warning", "fault") if count[word]]
    parts += [f"{count['skipped']} skipped"] if count["skipped"] else []
    return f"doctor: {', '.join(parts)}, {seconds:.1f} s"
