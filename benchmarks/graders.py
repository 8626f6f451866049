r"""Which answers graders take for right, and what a grade costs: `python -m benchmarks.graders`.

Grades the pairs of `tests/envs/grading/graded_pairs.txt` with our grader `math`, with math-verify as its README calls
it, and with mathruler if it is installed. Then times ours: a grade of a new pair and of a pair seen before, for pairs
that exact arithmetic settles and for pairs that go to math-verify, and what a hog costs on its own and in threads.
Prints three tables, and writes `benchmarks/results/graders.json` with every wrong verdict.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, commit, write_result
from envs.grading import GRADERS, grade
from envs.grading.algebra import ALGEBRA_LIMIT_S, equal_by_algebra
from envs.workers.worker import Worker, WorkerDied, WorkerError, WorkerTimeout
from tests.envs.grading.graded_pairs import Pair, graders, read_pairs

#: A grader that takes longer for a pair is stopped; the pair counts as not equal.
LIMIT_S = 10.0
PACKAGES = ("math-verify", "sympy", "latex2sympy2_extended")
HOG = "9^{9^{9}}"
#: Pairs to time, by kind.
TIMED: dict[str, Callable[[int], tuple[str, str]]] = {
    "integers, wrong": lambda n: (str(n), str(n + 1)),
    "a root, right": lambda n: (f"\\frac{{{2 * n}\\sqrt{{3}}}}{{2}}", f"{n} \\sqrt {{ 3 }}"),
    "a text, wrong": lambda n: (f"side {n} is longer", "A D and B E"),
    "a tower, refused": lambda n: (f"9^{{9^{{{n}}}}}", "x+1"),
    "sums, right": lambda n: (f"x+{n}", f"{n}+x"),
    "products, right": lambda n: (f"(x+{n})(x-{n})", f"x^2-{n * n}"),
    "products, wrong": lambda n: (f"(x+{n})(x-{n})", f"x^2-{n * n + 1}"),
    "intervals, right": lambda n: (f"x>{n}", f"({n},\\infty)"),
}


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


def microseconds(pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Return the time of each grade."""
    return [1e6 * seconds(lambda pair=pair: GRADERS["math"](*pair)) for pair in pairs]


def measure_kind(kind: str, count: int) -> dict[str, Any]:
    """Return the times of one kind of pair: new ones, and the same again."""
    pairs = [TIMED[kind](n) for n in range(2, count + 2)]
    asked = equal_by_algebra.cache_info().misses
    new = sorted(microseconds(pairs))
    again = microseconds(pairs)
    return {
        "kind": kind,
        "num_pairs": count,
        "math_verify": equal_by_algebra.cache_info().misses > asked,
        "new_us_median": median(new),
        "new_us_99th": new[int(0.99 * (count - 1))],
        "again_us_median": median(again),
    }


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_hogs(num_threads: int) -> dict[str, Any]:
    """Return the times of hogs that are given to math-verify: one, the same again, the next pair, and many at once."""
    first = seconds(lambda: equal_by_algebra(HOG, "5"))
    again = seconds(lambda: equal_by_algebra(HOG, "5"))
    after = seconds(lambda: equal_by_algebra("x+y+1", "1+y+x"))
    with ThreadPoolExecutor(num_threads) as threads:
        many = seconds(lambda: list(threads.map(lambda n: equal_by_algebra(f"{HOG}+{n}", "5"), range(num_threads))))
    return {
        "limit_s": ALGEBRA_LIMIT_S,
        "one_s": first,
        "one_again_s": again,
        "next_pair_s": after,
        "num_threads": num_threads,
        "one_in_each_thread_s": many,
    }


def show_costs(first_s: float, kinds: Sequence[dict[str, Any]], hogs: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table("pair", "math-verify", "new, median", "99th", "again", title="One grade, in microseconds")
    for column in table.columns[2:]:
        column.justify = "right"
    for kind in kinds:
        times = (f"{kind[key]:,.1f}" for key in ("new_us_median", "new_us_99th", "again_us_median"))
        table.add_row(kind["kind"], "yes" if kind["math_verify"] else "", *times)
    slow = Table("what", "seconds", title="Processes")
    slow.columns[1].justify = "right"
    slow.add_row("the first pair for math-verify (starts a process, imports sympy)", f"{first_s:.2f}")
    slow.add_row(f"a hog, stopped after {hogs['limit_s']:g} s of processor time", f"{hogs['one_s']:.2f}")
    slow.add_row("the same hog again", f"{hogs['one_again_s']:.6f}")
    slow.add_row("the next pair (a new process)", f"{hogs['next_pair_s']:.2f}")
    slow.add_row(f"{hogs['num_threads']} hogs in as many threads", f"{hogs['one_in_each_thread_s']:.2f}")
    console = Console()
    console.print(table)
    console.print(slow)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="pairs of each kind to time")
    parser.add_argument("--threads", type=int, default=8, help="hogs at once")
    parser.add_argument("--out", type=Path, default=RESULTS / "graders.json")
    args = parser.parse_args()
    at = commit()
    # First, while no process of math-verify runs.
    first_s = seconds(lambda: grade("y+x", "x+y"))
    kinds = [measure_kind(kind, args.count) for kind in TIMED]
    hogs = measure_hogs(args.threads)
    pairs = list(read_pairs())
    results = {name: by_kind(judge(grader, pairs)) for name, grader in graders().items()}
    command = f"python -m benchmarks.graders --count {args.count} --threads {args.threads}"
    cost = {"first_s": first_s, "kinds": kinds, "hogs": hogs}
    write_result(args.out, command, {"graders": results, "cost": cost}, at, PACKAGES)
    show(results)
    show_costs(first_s, kinds, hogs)


if __name__ == "__main__":
    main()
