"""Does reading begin sooner with a curriculum? `python -m benchmarks.curriculum --seeds 0 1 2`, a CPU, minutes.

The smallest network learns to read one digit of any size that is somewhere around the middle of a picture: at once, or
by the first rungs of the starter's ladder. Prints after how many lessons, all of them counted, it reads half of the
held-out digits, and writes `benchmarks/results/curriculum.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS, commit, markdown, write_result
from trainer.starter.recipes import LADDER, Numbers, Recipe, Stage
from trainer.starter.training import LOG, StarterRun

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pillow")
GOAL = 0.5


def recipe(rungs: tuple[Numbers, ...], num_lessons: int, batch_size: int, seed: int) -> Recipe:
    """Return a recipe that climbs the rungs; each ends once it is read, and the last one may use all lessons."""
    steps = num_lessons // batch_size
    stages = (
        Stage(steps, batch_size, 1e-3, 20, numbers=rung, numbers_frac=1.0, final_lr=1.0, until=GOAL if last else 0.7)
        for rung, last in ((rung, rung is rungs[-1]) for rung in rungs)
    )
    return Recipe("smoke", tuple(stages), seed=seed, corpus_size=300, num_probes=64)


def lessons_to_goal(rungs: tuple[Numbers, ...], num_lessons: int, batch_size: int, seed: int) -> dict[str, Any]:
    """Train until the last rung is read or the lessons are used up; return what was shown and read."""
    one = recipe(rungs, num_lessons, batch_size, seed)
    shown, reading, rows = 0, 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        StarterRun(one, Path(folder), torch.device("cpu")).train()
        for line in (Path(folder) / LOG).read_text().splitlines():
            row = json.loads(line)
            rows.append((row["stage"], row["step"] * batch_size, row["reading"]))
    for stage in range(1, len(rungs) + 1):
        of_stage = [row for row in rows if row[0] == stage]
        shown, reading = shown + of_stage[-1][1], of_stage[-1][2]
    return {"seed": seed, "rungs": len(rungs), "lessons": shown, "reading": reading, "rows": rows}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lessons", type=int, default=8_000, help="most lessons of each rung")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS / "curriculum.json")
    args = parser.parse_args()
    at = commit()
    ways = {"ladder": LADDER[:3], "at once": LADDER[2:3]}
    runs = []
    for seed in args.seeds:
        for way, rungs in ways.items():
            runs.append({"way": way, **lessons_to_goal(rungs, args.lessons, args.batch_size, seed)})
            command = f"python -m benchmarks.curriculum --lessons {args.lessons} --batch-size {args.batch_size}"
            write_result(args.out, command, {"goal": GOAL, "runs": runs}, at, PACKAGES)
    rows = [[r["way"], str(r["seed"]), f"{r['lessons']:,}", f"{r['reading']:.2f}"] for r in runs]
    print(markdown(("way", "seed", "lessons", "held-out digits read"), rows))


if __name__ == "__main__":
    main()
