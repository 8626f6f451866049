r"""What grading costs: `python -m benchmarks.grading`.

Times a grade of a new pair and of a pair seen before, for pairs that exact arithmetic settles and for pairs that go to
math-verify, then what a hog costs on its own and in threads. Prints two tables and writes
`benchmarks/results/grading.json`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, commit, write_result
from envs.grading import GRADERS, grade
from envs.grading.algebra import ALGEBRA_LIMIT_S, equal_by_algebra

HOG = "9^{9^{9}}"
PACKAGES = ("math-verify", "sympy", "latex2sympy2_extended")

KINDS: dict[str, Callable[[int], tuple[str, str]]] = {
    "integers, wrong": lambda n: (str(n), str(n + 1)),
    "a root, right": lambda n: (f"\\frac{{{2 * n}\\sqrt{{3}}}}{{2}}", f"{n} \\sqrt {{ 3 }}"),
    "a text, wrong": lambda n: (f"side {n} is longer", "A D and B E"),
    "a tower, refused": lambda n: (f"9^{{9^{{{n}}}}}", "x+1"),
    "sums, right": lambda n: (f"x+{n}", f"{n}+x"),
    "products, right": lambda n: (f"(x+{n})(x-{n})", f"x^2-{n * n}"),
    "products, wrong": lambda n: (f"(x+{n})(x-{n})", f"x^2-{n * n + 1}"),
    "intervals, right": lambda n: (f"x>{n}", f"({n},\\infty)"),
}


def microseconds(pairs: Sequence[tuple[str, str]], grader: str) -> list[float]:
    """Return the time of each grade."""
    times = []
    for answer, label in pairs:
        start = time.perf_counter()
        GRADERS[grader](answer, label)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def measure_kind(kind: str, count: int) -> dict[str, Any]:
    """Return the times of one kind of pair: new ones, and the same again."""
    pairs = [KINDS[kind](n) for n in range(2, count + 2)]
    asked = equal_by_algebra.cache_info().misses
    new = sorted(microseconds(pairs, "math"))
    again = microseconds(pairs, "math")
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


def show(first_s: float, kinds: Sequence[dict[str, Any]], hogs: dict[str, Any]) -> None:
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
    parser.add_argument("--count", type=int, default=500, help="pairs of each kind")
    parser.add_argument("--threads", type=int, default=8, help="hogs at once")
    parser.add_argument("--out", type=Path, default=RESULTS / "grading.json")
    args = parser.parse_args()
    at = commit()
    first_s = seconds(lambda: grade("y+x", "x+y"))
    kinds = [measure_kind(kind, args.count) for kind in KINDS]
    hogs = measure_hogs(args.threads)
    command = f"python -m benchmarks.grading --count {args.count} --threads {args.threads}"
    write_result(args.out, command, {"first_s": first_s, "kinds": kinds, "hogs": hogs}, at, PACKAGES)
    show(first_s, kinds, hogs)


if __name__ == "__main__":
    main()
