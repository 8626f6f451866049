"""The reference run over several seeds: `python -m benchmarks.demo --seeds 0 1 2`.

Runs the default command once per seed, each in a process of its own, prints a table and writes
`benchmarks/results/demo.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result

COMMAND = ["-m", "trainer.run", "--env", "geo3k", "--max-turns", "3"]
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pillow")


def run_seed(seed: int, extra: list[str]) -> dict[str, Any]:
    """Run one seed and return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, *COMMAND, *extra, "--seed", str(seed), "--out", folder, "--name", "run"]
        subprocess.run(argv, cwd=ROOT, check=True)
        return json.loads((Path(folder) / "run" / "summary.json").read_text())


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table, one row a seed and their mean."""
    rows = []

    def cells(key: str, chosen: list[dict[str, Any]]) -> tuple[float, float]:
        return mean(r["accuracy_before"][key] for r in chosen), mean(r["accuracy_after"][key] for r in chosen)

    for name, chosen in [*((str(r["seed"]), [r]) for r in runs), ("mean", runs)]:
        row = [name]
        for key in ("with_tool", "without_tool"):
            before, after = cells(key, chosen)
            row.append(f"{before:.3f} -> {after:.3f} ({after - before:+.3f})")
        turns = [
            mean(r[f"evaluation_{when}"]["with_tool"]["mean_turns"] for r in chosen) for when in ("before", "after")
        ]
        row.append(f"{turns[0]:.2f} -> {turns[1]:.2f}")
        row.append(f"{mean(r['seconds'] for r in chosen):.0f}")
        row.append(f"{max(r['peak_memory_gib'] for r in chosen):.2f}")
        row.append(f"{max(r['max_rollout_train_kl'] for r in chosen):.1e}")
        rows.append(row)
    return markdown(("seed", "with tool", "without tool", "turns", "seconds", "peak GiB", "largest KL"), rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "demo.json")
    args, extra = parser.parse_known_args()
    at = commit()
    runs = [run_seed(seed, extra) for seed in args.seeds]
    command = " ".join(["python", *COMMAND, *extra, "--seed", "SEED"])
    write_result(args.out, command, {"runs": runs}, at, PACKAGES)
    print(table(runs))


if __name__ == "__main__":
    main()
