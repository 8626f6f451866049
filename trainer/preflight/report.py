"""The names of all checks, the settings that choose among them, and the last line about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from agents.cli.text import counted
from envs.checks import Finding
from envs.config.settings import Section
from trainer.config.run import RunConfig

#: Checks that need only the configuration (`ConfigChecks`).
CONFIG_CHECKS = ("versions", "run folder", "memory", "chat template")
#: Checks that need a prepared run (`PreparedChecks`); "set-up" is the preparation itself.
PREPARED_CHECKS = (
    "set-up",
    "data",
    "gold answers",
    "image preprocessing",
    "forward pass",
    "packed streams",
    "weights of the learner",
    "aggregation",
    "positions",
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


def summary_line(findings: Sequence[Finding], seconds: float) -> str:
    """Return the number of findings of each status, in one line.

    >>> summary_line([Finding("versions", "ok", "torch 2.13"), Finding("memory", "fault", "too little")], seconds=0.21)
    'doctor: 1 check sound, 1 fault, 0.2 s'
    """
    count = Counter(finding.status for finding in findings)
    parts = [f"{counted(count['ok'], 'check')} sound"]
    parts += [counted(count[word], word) for word in ("warning", "fault") if count[word]]
    if count["skipped"]:
        parts.append(f"{count['skipped']} skipped")
    return f"doctor: {', '.join(parts)}, {seconds:.1f} s"
