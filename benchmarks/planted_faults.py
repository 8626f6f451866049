"""Plant ten kinds of faults, and print what the doctor finds: `python -m benchmarks.planted_faults`.

The faults are those of the doctor's tests (`tests/trainer/preflight/planted_faults.py`). The control is the same run
with nothing planted. Writes `benchmarks/results/planted_faults.json`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.checks import Finding
from tests.trainer.preflight.planted_faults import CONTROL, FAULTS, PlantedFault, examine, odd
from trainer.metrics.console import open_console


@dataclass(frozen=True)
class Outcome:
    """What the doctor said of a planted fault, or of the control, which must have no finding at all."""

    planted: PlantedFault
    findings: Sequence[Finding]
    seconds: float

    @property
    def found(self) -> Finding | None:
        """What the check that was to find it said."""
        return next((finding for finding in odd(self.findings) if finding.check == self.planted.expected), None)

    @property
    def is_right(self) -> bool:
        """Whether that is a fault; of the control, whether nothing was found."""
        return self.found is not None and self.found.status == "fault" if self.planted.expected else not self.others

    @property
    def others(self) -> list[str]:
        """The other checks that found something, and how bad."""
        return [f"{f.check} ({f.status})" for f in odd(self.findings) if f.check != self.planted.expected]

    @property
    def text(self) -> str:
        """What was found."""
        if self.found:
            return self.found.found
        return "NOT FOUND" if self.planted.expected else "no finding" if self.is_right else "FINDINGS"

    def row(self) -> list[str]:
        """Return the line of the table."""
        p = self.planted
        cells = (p.kind, p.name, p.how, p.expected, self.text, ", ".join(self.others), f"{self.seconds:.1f}")
        return [cell.replace("|", "\\|") for cell in cells]

    def figures(self) -> dict[str, Any]:
        """Return what is kept of it; of the control all findings, of others those that are odd."""
        p = self.planted
        kept = odd(self.findings) if p.expected else self.findings
        named = {"kind": p.kind, "fault": p.name, "how": p.how, "expected": p.expected, "is_found": self.is_right}
        return {**named, "seconds": round(self.seconds, 1), "findings": [asdict(finding) for finding in kept]}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="kinds to plant, such as abe; empty: all, and the control")
    args = parser.parse_args()
    at = commit()
    open_console()
    outcomes = []
    for planted in (*FAULTS, CONTROL):
        if not args.only or (planted.kind and planted.kind in args.only):
            started = time.perf_counter()
            outcomes.append(Outcome(planted, examine(planted), time.perf_counter() - started))
            print(f"{planted.name}: {outcomes[-1].text}", flush=True)
    print(markdown(("", "fault", "how planted", "found by", "finding", "also", "s"), [o.row() for o in outcomes]))
    missed = [outcome.planted.name for outcome in outcomes if not outcome.is_right]
    if not args.only:
        result = {"faults": len(FAULTS), "missed": missed, "rows": [outcome.figures() for outcome in outcomes]}
        packages = ("torch", "transformers")
        write_result(RESULTS / "planted_faults.json", "python -m benchmarks.planted_faults", result, at, packages)
    if missed:
        raise SystemExit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
