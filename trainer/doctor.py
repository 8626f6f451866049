"""Find what is wrong with a run before step 0: `python -m trainer.doctor` with the flags of `python -m trainer.run`.

It builds what the run would build, lets the engine generate a few turns, changes the learner's weights to see whether
they reach the engine, and deletes everything again. Every run starts with a quick form (`trainer.preflight.quick`).
`trainer.preflight` says how to add a check.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.text import Text

from envs.checks import Status, findings_table
from envs.config.cli import exit_code, parse
from envs.config.settings import with_absolute_paths
from envs.console import Console
from trainer.config.sources import SOURCES
from trainer.metrics.console import open_console
from trainer.preflight.report import DoctorConfig, summary_line

_WORDS: Mapping[Status, str] = {"skipped": "skipped", "ok": "sound", "warning": "warning", "fault": "FAULT"}


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags, run the checks and print their findings; return 1 if there is a fault."""
    description = "Find what is wrong with a run before step 0. Takes the flags of trainer.run."
    config = with_absolute_paths(parse(DoctorConfig, argv, "python -m trainer.doctor", description, SOURCES))
    # Imported late, so that --help and a mistyped flag answer at once.
    from trainer.preflight.diagnosis import diagnose

    console = open_console()
    if not console.is_terminal:
        # In a log the table would wrap at 80 columns.
        console = Console(width=120)
    started = time.perf_counter()
    with console.status("") as status:
        findings = diagnose(config, lambda check: status.update(Text(f"checking: {check}")))
    console.print(findings_table(findings, _WORDS, ("check", "result", "found", "s")))
    console.print(summary_line(findings, time.perf_counter() - started))
    if config.checkup.report:
        text = json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1)
        config.checkup.report.write_text(text + "\n", encoding="utf-8")
    return int(any(finding.status == "fault" for finding in findings))


if __name__ == "__main__":
    sys.exit(exit_code(run))
