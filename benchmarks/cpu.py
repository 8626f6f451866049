"""Everything that two cores can measure, beside other trainers: `python -m benchmarks.cpu`. Takes about an hour.

Runs the benchmarks of `PARTS` one after the other, each in a process of its own, and keeps what each measured in
`benchmarks/results/`. A peer's packages are put into a folder of `--sites` by pip, with pinned versions. Prints one
table, that of `docs/results-cpu.md`, and writes `benchmarks/results/cpu.json`. A part or peer that fails has no
figures and says why; a part that is not asked for keeps the figures that it has.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from agents.model import STARTER_PATH
from benchmarks.report import RESULTS, commit, markdown, run_beside, write_result

#: What was measured, in which unit, our figure, and those of others, or why they have none.
Row = tuple[str, str, float, Mapping[str, float | str]]


def training_steps(found: Mapping[str, Any]) -> Iterable[Row]:
    """Return the seconds of a training step."""
    for workload, trainers in found["results"].items():
        seconds = {name: median(trainer["seconds"]) for name, trainer in trainers.items()}
        yield f"a training step, {workload}", "s", seconds.pop("TrueTurn"), seconds


def loops(found: Mapping[str, Any]) -> Iterable[Row]:
    """Return the cost of a turn in the loop of each trainer."""
    timed = [row for row in found["rows"] if "at_once" in row]
    failed = {row["trainer"]: row["why"] for row in found["rows"] if "why" in row}
    for at_once in sorted({row["at_once"] for row in timed}):
        costs = {row["trainer"]: row["cpu_us_per_turn"] for row in timed if row["at_once"] == at_once}
        yield f"a turn of the loop, {at_once} at once", "µs", costs.pop("TrueTurn"), costs | failed


def own_loop(found: Mapping[str, Any]) -> Iterable[Row]:
    """Return the cost of a turn where many episodes are played, beside a bare loop over the environment."""
    rows = {(row["where"], row["concurrency"]): row for row in found["figures"]}
    for at_once in (1024, 8192):
        inline = rows["inline", at_once]
        others = {
            "tools on threads": rows["thread", at_once]["cpu_us_per_turn"],
            "its checks alone": inline["check_us_per_turn"],
            "bare loop": rows["bare loop", 1]["cpu_us_per_turn"],
        }
        yield f"a turn of the loop, {at_once:,} at once", "µs", inline["cpu_us_per_turn"], others


def environments(found: Mapping[str, Any]) -> Iterable[Row]:
    """Return how many episodes an environment plays in a second, by where it runs."""
    rates = {(row["env"], row["isolation"], row["concurrency"]): row["episodes_per_s"] for row in found["figures"]}
    for env in dict.fromkeys(name for name, *_ in rates):
        others = {place: rates[env, place, 64] for place in ("thread", "process")}
        others["bare loop"] = rates[env, "bare loop", 1]
        yield f"episodes of `{env}`, 64 at once", "/s", rates[env, "inline", 64], others


def parsers(found: Mapping[str, Any]) -> Iterable[Row]:
    """Return what mutated and adversarial responses did to the readers of tool calls."""
    yield f"exceptions, of {found['fuzz']['responses']:,} mutated responses", "", found["fuzz"]["exceptions"], {}
    yield f"slowest of {len(found['adversarial_ms'])} responses of 1 MB", "ms", found["slowest_ms"], {}


def graders(found: Mapping[str, Any]) -> Iterable[Row]:
    """Return how often graders are wrong, and what a grade of ours costs."""
    totals = {name: kinds["all"] for name, kinds in found["graders"].items()}
    number = totals["trueturn"]["num_pairs"]
    for fault, meaning in (("false_accepts", "wrong answers accepted"), ("false_rejects", "right answers rejected")):
        counts = {name: len(total[fault]) for name, total in totals.items()}
        yield f"{meaning}, of {number:,} pairs", "", counts.pop("trueturn"), counts
    for kind in found["cost"]["kinds"]:
        yield f"a grade, {kind['kind']}", "µs", kind["new_us_median"], {"seen before": kind["again_us_median"]}


@dataclass(frozen=True)
class Part:
    """A benchmark with its flags, the packages of others that it needs here, and the rows that its figures make."""

    arguments: Sequence[str]
    rows: Callable[[Mapping[str, Any]], Iterable[Row]]
    packages: Sequence[str] = ()


PARTS: Mapping[str, Part] = {
    "laptop_step": Part(("--steps", "12"), training_steps, ("trl==1.16.0",)),
    "loop_peers": Part(("--episodes", "512", "--repeats", "3"), loops),
    "agent_loop": Part(("--episodes", "8192", "--repeats", "3"), own_loop),
    "env_throughput": Part(("--episodes", "4096", "--repeats", "3"), environments),
    "fuzz_tool_calls": Part(("--count", "200000", "--seed", "0"), parsers),
    "graders": Part(("--count", "500"), graders, ("mathruler==0.1.0", "pylatexenc==2.11")),
}


def run(name: str, out: Path, sites: Path, model: str) -> dict[str, Any]:
    """Run a part; return how long it took and, if it failed, why."""
    arguments = [*PARTS[name].arguments, "--out", str(out)]
    if name == "loop_peers":
        arguments += ["--model", model, "--sites", str(sites)]
    out.unlink(missing_ok=True)
    begun = time.perf_counter()
    why = run_beside([sites / name], PARTS[name].packages, f"benchmarks.{name}", arguments)
    return {"seconds": round(time.perf_counter() - begun), "why": why}


def table(parts: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """Return a Markdown table of the figures in a folder, and of the parts that have none."""
    lines: list[Sequence[object]] = []
    for name, part in PARTS.items():
        why = parts.get(name, {}).get("why", "not run")
        path = folder / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            for what, unit, ours, others in part.rows(found):
                lines.append((what, unit, number(ours), ", ".join(beside(others, ours))))
        elif why:
            lines.append((f"`{name}`", "", "", why))
    return markdown(("what", "unit", "TrueTurn", "others (of ours)"), lines)


def beside(others: Mapping[str, float | str], ours: float) -> Iterable[str]:
    """Return each figure of others, and what multiple of ours it is; why it is missing, if it is."""
    for name, value in others.items():
        if isinstance(value, str):
            yield f"{name}: {value}"
        elif ours:
            yield f"{name} {number(value)} ({value / ours:.2g} x)"
        else:
            yield f"{name} {number(value)}"


def number(value: float) -> str:
    """Return three significant digits."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default=str(STARTER_PATH), help="folder with Qwen3-VL's tokenizer, for `loop_peers`")
    parser.add_argument("--sites", type=Path, default=Path.home() / ".cache" / "trueturn-cpu-peers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    at = commit()
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / "cpu.json"
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    for name in args.parts:
        print(f"{name} ...", flush=True)
        load = os.getloadavg()[0]  # of other work: figures are worth little where it is high
        parts[name] = {"commit": at, "load": load, **run(name, args.results / f"{name}.json", args.sites, args.model)}
        # After each part, since the next may take long.
        shown = table(parts, args.results).splitlines()
        write_result(path, "python -m benchmarks.cpu", {"parts": parts, "table": shown}, at)
    print(table(parts, args.results))


if __name__ == "__main__":
    main()
