"""What a curriculum is worth at equal tokens: `python -m benchmarks.curriculum --seeds 0 1 2`.

Trains the bundled model on a set of problems that is small enough to be played several times: once in shuffled epochs,
once with `--curriculum`, and once with equal groups replaced (`--filter-equal`), which plays more for a step. Rows
compare the held-out accuracy of the last evaluation for which every run has sampled enough tokens. Writes curves and
pools to `benchmarks/results/curriculum.json` after each run. Every other flag goes to `trainer.run`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import RESULTS, ROOT, markdown, train_all

#: What each arm of the comparison adds to the command.
ARMS: Mapping[str, Sequence[str]] = {
    "uniform": (),
    "curriculum": ("--curriculum",),
    "filter": ("--filter-equal",),
}
PACKAGES = ("torch", "transformers", "numpy", "pillow")
POOLS = ("solved", "learnable", "unsolved", "unseen")
ACCURACY = "eval/with_tool/accuracy"


def train(args: argparse.Namespace, extra: Sequence[str], arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the curves of one run: tokens sampled so far, groups that taught something, pools, held-out accuracy."""
    name = f"{arm}-{seed}"
    flags = ["--env", args.env, "--seed", str(seed), "--steps", str(args.steps), "--train-size", str(args.train_size)]
    flags += ["--eval-every", str(args.eval_every), "--eval-size", str(args.eval_size), "--tools", "on"]
    places = ["--record", "0", "--out", str(folder), "--name", name, "--tracker", ""]
    command = [sys.executable, "-m", "trainer.run", *flags, *places, *ARMS[arm], *extra]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / name / "summary.json").read_text())
    return {
        "arm": arm,
        "seed": seed,
        "before": summary["accuracy_before"]["with_tool"],
        "tokens": [*accumulate(row["tokens_per_episode"] * row["episodes"] for row in rows)],
        "groups_used_frac": [row["groups_used_frac"] for row in rows],
        "accuracy": {int(row["step"]): row[ACCURACY] for row in rows if ACCURACY in row},
        "pools": {pool: [row.get(f"curriculum/{pool}") for row in rows] for pool in POOLS},
        "seconds": summary["seconds"],
    }


def accuracy_at(run: Mapping[str, Any], tokens: float) -> float:
    """Return the held-out accuracy of the last evaluation before a run had sampled more than so many tokens."""
    reached = [step for step in run["accuracy"] if run["tokens"][int(step) - 1] <= tokens]
    return run["accuracy"][max(reached, key=int)] if reached else run["before"]


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each arm: held-out accuracy at equal tokens and at the end, groups that taught something."""
    most = min(run["tokens"][-1] for run in runs)
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [run for run in runs if run["arm"] == arm]
        equal = [accuracy_at(run, most) for run in own]
        last = [run["accuracy"][max(run["accuracy"], key=int)] for run in own]
        used = mean(mean(run["groups_used_frac"][len(run["groups_used_frac"]) // 2 :]) for run in own)
        tokens = mean(run["tokens"][-1] for run in own)
        shown = ", ".join(f"{value:.3f}" for value in equal)
        rows.append([arm, shown, f"{mean(equal):.3f}", f"{mean(last):.3f}", f"{used:.2f}", f"{tokens:,.0f}"])
    title = f"held out at {most:,.0f} tokens, by seed"
    return markdown(("problems", title, "mean", "mean at the end", "groups used, second half", "tokens"), rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--env", default="geo3k")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--train-size", type=int, default=256)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--eval-size", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS / "curriculum.json")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    args, extra = parser.parse_known_args()
    wanted = [(arm, seed) for seed in args.seeds for arm in args.arms]
    one = partial(train, args, extra)
    print(table(train_all("benchmarks.curriculum", wanted, one, args.jobs, args.out, PACKAGES)))


if __name__ == "__main__":
    main()
