r"""Which answers graders take for right: `python -m benchmarks.graders`.

Grades the pairs of `tests/envs/grading/graded_pairs.txt` with our grader `math`, with math-verify as its README calls
it, and with mathruler if it is installed. Prints false accepts, false rejects and the slowest pair of each class, and
writes `benchmarks/results/graders.json` with every wrong verdict.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, commit, write_result
from envs.workers.worker import Worker, WorkerDied, WorkerError, WorkerTimeout
from tests.envs.grading.graded_pairs import Pair, graders, read_pairs

#: A grader that takes longer for a pair is stopped; the pair counts as not equal.
LIMIT_S = 10.0
PACKAGES = ("math-verify", "sympy", "latex2sympy2_extended")


@dataclass(frozen=True)
class Verdict:
    """What a grader said of a pair, and how long it took."""

    pair: Pair
    accepts: bool
    seconds: float


def judge(grader: Callable[[str, str], bool], pairs: Sequence[Pair]) -> list[Verdict]:
    """Return a grader's verdicts, given in a process that is killed where it hangs."""
    verdicts, worker = [], Worker()
    worker.call(grader, "x+1", "1+x")  # imports
    for pair in pairs:
        start = time.perf_counter()
        try:
            accepts = worker.call(grader, pair.answer, pair.label, timeout_s=LIMIT_S)
        except WorkerError:
            accepts = False
        except (WorkerDied, WorkerTimeout):
            worker.kill()
            worker, accepts = Worker(), False
        seconds = time.perf_counter() - start
        verdicts.append(Verdict(pair, accepts, seconds))
        if not worker.is_alive:
            worker.call(grader, "x+1", "1+x")
    worker.kill()
    return verdicts


def figures(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the counts of a class, or of all."""
    false_accepts = [v.pair for v in verdicts if v.accepts and not v.pair.is_right]
    false_rejects = [v.pair for v in verdicts if not v.accepts and v.pair.is_right]
    return {
        "num_pairs": len(verdicts),
        "false_accepts": [f"{pair.answer} against {pair.label}" for pair in false_accepts],
        "false_rejects": [f"{pair.answer} against {pair.label}" for pair in false_rejects],
        "slowest_ms": 1e3 * max(v.seconds for v in verdicts),
    }


def by_kind(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """Return the figures of each class and of all classes."""
    kinds = dict.fromkeys(v.pair.kind for v in verdicts)
    return {kind: figures([v for v in verdicts if v.pair.kind == kind]) for kind in kinds} | {"all": figures(verdicts)}


def show(results: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
    """Print the table: for each grader false accepts, false rejects and the slowest pair."""
    table = Table("class", "pairs", title="False accepts, false rejects, slowest pair in ms")
    for name in results:
        table.add_column(name, justify="right")
    for kind, first in next(iter(results.values())).items():
        cells = [
            f"{len(of[kind]['false_accepts'])}  {len(of[kind]['false_rejects']):3}  {of[kind]['slowest_ms']:7,.1f}"
            for of in results.values()
        ]
        table.add_row(kind, str(first["num_pairs"]), *cells, end_section=kind == "all")
    Console().print(table)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "graders.json")
    args = parser.parse_args()
    at, pairs = commit(), list(read_pairs())
    results = {name: by_kind(judge(grader, pairs)) for name, grader in graders().items()}
    write_result(args.out, "python -m benchmarks.graders", {"graders": results}, at, PACKAGES)
    show(results)


if __name__ == "__main__":
    main()
