"""The reference run over several seeds: `python -m benchmarks.demo --seeds 0 1 2`.

Runs the default command once per seed, each in a process of its own, and measures the policy before and after, with its
tools and without. Prints tables of accuracy and of families, and writes
`benchmarks/results/demo.json` after each seed.

Choose settings with `--split validation`, and look at `heldout`, the default, once: `--model` and every other flag of
`trainer.run` go to the runs. What zooming is worth: `--env geo3k_zoom --max-turns 4 --max-new-tokens 1024`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pillow")
WHEN = ("before", "after")
WAYS = ("with_tool", "without_tool")


def train(args: argparse.Namespace, extra: Sequence[str], seed: int, folder: Path) -> dict[str, Any]:
    """Run one seed in a folder and return its summary, with the evaluations of the chosen split."""
    flags = [*_flags(args), *extra]
    unmeasured = ["--eval-size", "0"] if args.split != "heldout" else []
    name = f"seed-{seed}"
    _python(
        "trainer.run", *flags, *unmeasured, "--seed", str(seed), "--out", str(folder), "--name", name, jobs=args.jobs
    )
    summary = json.loads((folder / name / "summary.json").read_text())
    if unmeasured:
        start = extra[extra.index("--model") + 1] if "--model" in extra else "starter"
        for when, model in zip(WHEN, (start, folder / name), strict=True):
            summary[f"evaluation_{when}"] = evaluate(args, str(model), folder / f"{name}-{when}")
    return summary


def evaluate(args: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Return the evaluation of each way on the chosen split."""
    place = ["--out", str(folder.parent), "--name", folder.name, "--record", "0"]
    _python("trainer.evaluate", *_flags(args), "--model", model, "--split", args.split, *place, jobs=args.jobs)
    return json.loads((folder / "evaluation.json").read_text())["ways"]


def _flags(args: argparse.Namespace) -> list[str]:
    registry = ["--registry", str(args.registry)] if args.registry else []
    limits = ["--max-turns", str(args.max_turns), "--max-new-tokens", str(args.max_new_tokens)]
    return ["--env", args.env, *registry, *limits]


def _python(module: str, *argv: str, jobs: int) -> None:
    """Run a command; several at once share the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)} if jobs > 1 else None
    subprocess.run([sys.executable, "-m", module, *argv], cwd=ROOT, env=env, check=True)


def accuracy_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return accuracy with its 95 % interval and the mean turns and calls, a row for each seed and their mean."""
    rows = []
    for run in runs:
        row = [str(run["seed"])]
        for way in WAYS:
            row.append(" -> ".join(_estimate(run[f"evaluation_{when}"][way]["accuracy"]) for when in WHEN))
        row.append(f"{_gap(run):+.3f}")
        rows.append([*row, *_behaviour([run])])
    cells = ["mean"]
    for way in WAYS:
        before, after = (mean(run[f"evaluation_{when}"][way]["accuracy"]["value"] for run in runs) for when in WHEN)
        cells.append(f"{before:.3f} -> {after:.3f} ({after - before:+.3f})")
    rows.append([*cells, f"{mean(map(_gap, runs)):+.3f}", *_behaviour(runs)])
    return markdown(
        (
            "seed",
            "with tool",
            "without tool",
            "tool's worth, after",
            "turns",
            "tool calls",
            "seconds",
            "peak GiB",
            "largest KL",
        ),
        rows,
    )


def _gap(run: Mapping[str, Any]) -> float:
    with_tool, without = (run["evaluation_after"][way]["accuracy"]["value"] for way in WAYS)
    return with_tool - without


def _estimate(estimate: Mapping[str, Any] | None) -> str:
    return "-" if estimate is None else f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _behaviour(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for figure in ("mean_turns", "mean_tool_calls"):
        values = (mean(run[f"evaluation_{when}"]["with_tool"][figure] for run in runs) for when in WHEN)
        cells.append(" -> ".join(f"{value:.2f}" for value in values))
    return [
        *cells,
        f"{mean(run['seconds'] for run in runs):.0f}",
        f"{max(run['peak_memory_gib'] for run in runs):.2f}",
        f"{max(run['max_rollout_train_kl'] for run in runs):.1e}",
    ]


def family_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean accuracy of all seeds by family, before and after, in each way."""

    def by_family(when: str, way: str, family: str) -> float:
        return mean(run[f"evaluation_{when}"][way]["by_tag"]["family"][family]["value"] for run in runs)

    families = runs[0]["evaluation_after"]["with_tool"]["by_tag"].get("family", {})
    rows = [
        [
            family,
            str(found["num_problems"]),
            *(" -> ".join(f"{by_family(when, way, family):.2f}" for when in WHEN) for way in WAYS),
        ]
        for family, found in families.items()
    ]
    return markdown(("family", "problems", "with tool", "without tool"), rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run at the same time and share the cores")
    parser.add_argument("--split", choices=("heldout", "validation"), default="heldout", help="problems to measure on")
    parser.add_argument("--env", default="geo3k")
    parser.add_argument("--max-turns", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--registry", type=Path, help="a registry file with the environment")
    parser.add_argument("--keep", type=Path, help="folder for the runs; without it, they are deleted")
    parser.add_argument("--out", type=Path, default=RESULTS / "demo.json")
    args, extra = parser.parse_known_args()
    at, runs = commit(), []
    command = " ".join(["python -m trainer.run", *_flags(args), *extra, "--seed SEED"])
    place = tempfile.TemporaryDirectory() if args.keep is None else nullcontext(args.keep)
    with place as folder, ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed([pool.submit(train, args, extra, seed, Path(folder)) for seed in args.seeds]):
            runs = sorted([*runs, done.result()], key=lambda run: run["seed"])
            figures = {"split": args.split, "at_once": args.jobs, "runs": runs}
            write_result(args.out, command, figures, at, PACKAGES)
    print("\n\n".join(table(runs) for table in (accuracy_table, family_table)))


if __name__ == "__main__":
    main()
