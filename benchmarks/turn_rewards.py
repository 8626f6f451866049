"""What credit by turn is worth on `coins`: `python -m benchmarks.turn_rewards --seeds 0 1 2`.

Trains the bundled model with one advantage for all turns of an episode, and with one for each turn, on the same
problems. Prints a table and writes the curves to `benchmarks/results/turn_rewards.json` after each run. Every other
flag goes to `trainer.run`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import RESULTS, ROOT, markdown, train_all

ADVANTAGES = ("grpo", "rloo", "turn", "gigpo")
PACKAGES = ("torch", "transformers", "numpy", "pillow")
#: Steps whose mean reward a row of the table shows.
WINDOW = 5


def train(args: argparse.Namespace, extra: Sequence[str], advantage: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the rewards of one run: of each step, and on held-out problems before and after."""
    name = f"{advantage}-{seed}"
    flags = ["--env", "coins", "--advantage", advantage, "--seed", str(seed), "--steps", str(args.steps)]
    places = ["--eval-size", str(args.eval_size), "--record", "0", "--out", str(folder), "--name", name]
    command = [sys.executable, "-m", "trainer.run", *flags, *places, "--tracker", "", *extra]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / name / "summary.json").read_text())
    return {
        "advantage": advantage,
        "seed": seed,
        "reward": [row["reward"] for row in rows],
        "before": summary["evaluation_before"]["no_tools"]["mean_reward"],
        "after": summary["evaluation_after"]["no_tools"]["mean_reward"],
        "seconds": summary["seconds"],
    }


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each advantage: rewards in training and on held-out problems, the means of the seeds."""
    rows = []
    for advantage in dict.fromkeys(run["advantage"] for run in runs):
        own = [run for run in runs if run["advantage"] == advantage]
        steps = len(own[0]["reward"])
        middle = [mean(run["reward"][steps // 2 - WINDOW : steps // 2]) for run in own]
        last = [mean(run["reward"][-WINDOW:]) for run in own]
        after = ", ".join(f"{run['after']['value']:.3f}" for run in own)
        intervals = ", ".join(f"[{run['after']['low']:.3f}, {run['after']['high']:.3f}]" for run in own)
        rows.append([f"`{advantage}`", f"{mean(middle):.3f}", f"{mean(last):.3f}", after, intervals])
    columns = ("`--advantage`", "half way", "last steps", "held out, by seed", "95 % intervals")
    return markdown(columns, rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--advantages", nargs="+", default=ADVANTAGES)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-size", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "turn_rewards.json")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    args, extra = parser.parse_known_args()
    wanted = [(advantage, seed) for seed in args.seeds for advantage in args.advantages]
    one = partial(train, args, extra)
    print(table(train_all("benchmarks.turn_rewards", wanted, one, args.jobs, args.out, PACKAGES)))


if __name__ == "__main__":
    main()
