"""Tool calls under fire: `python -m benchmarks.fuzz_tool_calls --count 200000 --seed 0`.

Reads random mutations of valid responses in both formats and counts what comes out; then times adversarial responses of
a million characters. Prints two tables, writes `benchmarks/results/fuzz_tool_calls.json` and exits with 1 if anything
was raised or a response took longer than the limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, commit, write_result
from envs.tool_calls import ToolFormat, find_tool_calls, outside_tool_calls
from tests.envs.tool_calls.fuzz import FORMATS, OUTCOMES, UNITS, adversarial, outcomes, responses

LIMIT_MS = 50.0
REPEATS = 3


def fuzz(count: int, seed: int) -> dict[str, Any]:
    """Read `count` responses in both formats; return counts of calls by outcome and the first faults."""
    counts: dict[str, Counter[str]] = {format: Counter() for format in FORMATS}
    faults: list[str] = []
    num_faults = 0
    start = time.perf_counter()
    for text in responses(count, seed):
        for format in FORMATS:
            try:
                counts[format].update(outcomes(text, format))
            except Exception as error:
                num_faults += 1
                faults.append(f"{format}: {error!r} for {text!r}")
                del faults[10:]
    return {
        "responses": count,
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "exceptions": num_faults,
        "first_exceptions": faults,
        "calls": {format: {name: counts[format][name] for name in OUTCOMES} for format in FORMATS},
    }


def milliseconds(read: Callable[[str, ToolFormat], object], text: str, format: ToolFormat) -> float:
    """Return the processor time of one reading; the best of three where it is long, for the machine may be shared."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        read(text, format)
        best = min(best, 1000 * (time.thread_time() - start))
        if best < LIMIT_MS / 2:
            break
    return best


def slowest(unit: str) -> dict[str, float]:
    """Return the longest time per format over all heads, tails and both functions."""
    found = dict.fromkeys(FORMATS, 0.0)
    for text in adversarial(unit):
        for format in FORMATS:
            for read in (find_tool_calls, outside_tool_calls):
                found[format] = max(found[format], milliseconds(read, text, format))
    return {format: round(value, 2) for format, value in found.items()}


def print_tables(counted: dict[str, Any], timed: dict[str, dict[str, float]]) -> None:
    """Print what became of the calls, and the times."""
    table = Table("format", *OUTCOMES, title=f"{counted['responses']:,} responses, {counted['exceptions']} exceptions")
    for format in FORMATS:
        table.add_row(format, *(f"{counted['calls'][format][name]:,}" for name in OUTCOMES))
    times = Table("a million characters of", *FORMATS, title=f"longest processor time in ms (limit {LIMIT_MS:.0f})")
    for name, row in sorted(timed.items(), key=lambda item: -max(item[1].values())):
        times.add_row(name, *(f"{row[format]:.1f}" for format in FORMATS))
    console = Console()
    console.print(table, times)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=200_000, help="how many mutated responses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "fuzz_tool_calls.json")
    args = parser.parse_args()
    at = commit()
    counted = fuzz(args.count, args.seed)
    timed = {name: slowest(unit) for name, unit in UNITS.items()}
    worst = max(max(row.values()) for row in timed.values())
    command = f"python -m benchmarks.fuzz_tool_calls --count {args.count} --seed {args.seed}"
    figures = {"fuzz": counted, "limit_ms": LIMIT_MS, "slowest_ms": worst, "adversarial_ms": timed}
    write_result(args.out, command, figures, at)
    print_tables(counted, timed)
    return 1 if counted["exceptions"] or worst > LIMIT_MS else 0


if __name__ == "__main__":
    sys.exit(main())
