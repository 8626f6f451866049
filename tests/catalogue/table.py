"""Checks the whole catalogue and prints what was found: `python -m tests.catalogue.table`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from envs.check import check_env, longest_s
from envs.checks import Finding
from envs.errors import UserError
from tests.catalogue import contract, data, graders, hangs, healthy, leftovers, not_found, resources, tools
from tests.catalogue.base import Row

KINDS = {
    "contract": contract.ROWS,
    "tools": tools.ROWS,
    "graders": graders.ROWS,
    "data": data.ROWS,
    "hangs": hangs.ROWS,
    "leftovers": leftovers.ROWS,
    "resources": resources.ROWS,
}
FAULTY = [row for rows in KINDS.values() for row in rows]
NOT_FOUND, HEALTHY = not_found.ROWS, healthy.ROWS
MAX_SECONDS = 30.0


@dataclass(frozen=True)
class Checked:
    """What the check has found of an environment, in how many seconds; `bound_s` is what it stated before."""

    row: Row
    findings: Sequence[Finding]
    seconds: float
    bound_s: float

    @property
    def failed(self) -> list[Finding]:
        """The findings that failed."""
        return [finding for finding in self.findings if finding.passed is False]

    @property
    def is_found(self) -> bool:
        """Whether the row's check tells the row's word."""
        return any(
            finding.check == self.row.check and self.row.word in finding.detail and finding.passed is self.row.is_remark
            for finding in self.findings
        )


def check(row: Row) -> Checked:
    """Check an environment of the catalogue."""
    started = time.monotonic()
    try:
        findings = check_env(row.spec, num_samples=3, max_seconds=MAX_SECONDS)
    except UserError as error:
        findings = [Finding("error", "fault", str(error))]
    return Checked(row, findings, time.monotonic() - started, longest_s(row.spec, MAX_SECONDS))


def main() -> None:
    """Print a Markdown table of all environments."""
    started = time.monotonic()
    print("| kind | environment | fault | found by | seconds |\n|---|---|---|---|---|")
    for kind, rows in {**KINDS, "not found": NOT_FOUND, "healthy": HEALTHY}.items():
        for row in rows:
            checked = check(row)
            found = f"{row.check}: {row.word}" if checked.is_found else f"({row.word})" if row.word else ""
            others = [finding.check for finding in checked.failed if finding.check != row.check]
            also = f"; also {', '.join(others)}" if others else ""
            is_as_said = checked.is_found if row.check else not checked.failed
            print(
                f"| {kind} | {row.spec.id if row.env.__name__ == 'Sound' else row.name} | {row.fault} "
                f"| {'' if is_as_said else 'NOT AS SAID '}{found}{also} | {checked.seconds:.1f} |",
                flush=True,
            )
    print(
        f"\n{len(FAULTY)} faulty, {len(HEALTHY)} sound, {len(NOT_FOUND)} not found; {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
