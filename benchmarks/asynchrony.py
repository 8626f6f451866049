"""Asynchronous training against synchronous: `python -m benchmarks.asynchrony --staleness 0 1 4 --seeds 3 --steps 60`.

Every run is the public command in a process of its own, so that only `--max-staleness` differs: with 0, each side waits
for the other. Measured from the end of step `--skip` on: samples and tokens a second, who waited, the seconds of a
weight push, and KL by the age of tokens; and the reward over time. Prints two tables and writes
`benchmarks/results/asynchrony.json`, which has every step.

- On a CPU (the default) the embedded engine shares the cores with the learner, so there is little to gain: what is seen
  is what older tokens cost.
- On GPUs `--run-args "--num-gpus 1 --num-servers 1 --first-gpu 1 --dtype bfloat16"` starts SGLang on another GPU;
  `--model 2b` is the shape of 2 B parameters, taught as in `benchmarks.sglang_rollout`.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import RESULTS, commit, markdown, write_result
from benchmarks.training_run import log_of, train
from trainer.callbacks import Callback

PACKAGES = ("torch", "transformers", "numpy")
ENDED = "benchmark/ended_s"
#: Moments at which rewards are compared, as shares of the shortest run's time.
SHARES = (0.25, 0.5, 0.75, 1.0)
WINDOW = 8
#: How the metrics begin that are written for every step.
KEPT = ("reward", "entropy", "grad_norm", "idle/", "staleness/mean", "rollout_train_kl", "num_tokens", "groups_trained")

Row = Mapping[str, float]


class Clock(Callback):
    """Adds the time at which a step ended to its metrics."""

    def on_step_end(self, step: int, row: Row) -> Mapping[str, float]:
        """Return the seconds of the system's clock."""
        return {ENDED: time.time()}


@dataclass(frozen=True)
class Run:
    """One training run: its steps after the first ones, and when each ended, in seconds since those."""

    staleness: int
    seed: int
    rows: Sequence[Row]
    num_samples: int

    @property
    def times_s(self) -> list[float]:
        """When each step ended, since the end of the first."""
        return [row[ENDED] - self.rows[0][ENDED] for row in self.rows]

    def reward_at(self, at_s: float) -> float:
        """Return the mean reward of the last steps that had ended by then."""
        ended = [row["reward"] for row, time_s in zip(self.rows, self.times_s, strict=True) if time_s <= at_s]
        return mean(ended[-WINDOW:])

    def mean_of(self, name: str) -> float:
        """Return the mean of a metric over the steps that have it, the first one left out."""
        return mean([row[name] for row in self.rows[1:] if name in row] or [float("nan")])


def measured(folder: Path, staleness: int, seed: int, options: argparse.Namespace, model: str) -> Run:
    """Run the command and read its metrics."""
    flags = ["--model", model, "--max-staleness", str(staleness)]
    flags += ["--seed", str(seed), "--steps", str(options.steps), "--callback", f"{Path(__file__).resolve()}:Clock"]
    flags += shlex.split(options.run_args)
    rows = train(folder, *flags)[options.skip :]
    samples = sum(row["groups_trained"] for row in rows[1:]) * options.group_size
    return Run(staleness, seed, rows, int(samples))


def figures_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return the means over runs of one staleness."""
    kl = sorted({name for run in runs for row in run.rows for name in row if name.startswith("rollout_train_kl/stal")})
    names = (
        "idle/learner_time_frac",
        "idle/servers_time_frac",
        "sync_s",
        "rollout_s",
        "train_s",
        "staleness/mean",
        "reward",
    )
    per_step = [*names, "rollout_train_kl", *kl]
    return {
        "samples_per_s": mean(run.num_samples / run.times_s[-1] for run in runs),
        "tokens_per_s": mean(sum(row["num_tokens"] for row in run.rows[1:]) / run.times_s[-1] for run in runs),
        "step_s": mean(run.times_s[-1] / (len(run.rows) - 1) for run in runs),
        **{name: mean(run.mean_of(name) for run in runs) for name in per_step},
        "groups_aborted": mean(sum(row["groups_aborted"] for row in run.rows) for run in runs),
    }


def rewards_over_time(runs: Sequence[Run]) -> tuple[list[float], dict[int, list[float]]]:
    """Return moments, and by staleness the mean reward of the runs at each."""
    shortest_s = min(run.times_s[-1] for run in runs)
    moments = [share * shortest_s for share in SHARES]
    by_staleness = {run.staleness: [other for other in runs if other.staleness == run.staleness] for run in runs}
    return moments, {s: [mean(run.reward_at(at) for run in own) for at in moments] for s, own in by_staleness.items()}


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """Print the tables; return the figures."""
    by_staleness = {
        s: figures_of([r for r in runs if r.staleness == s]) for s in dict.fromkeys(r.staleness for r in runs)
    }
    first = next(iter(by_staleness.values()))["samples_per_s"]
    shown = ("samples_per_s", "tokens_per_s", "step_s", "idle/learner_time_frac", "idle/servers_time_frac", "sync_s")
    shown += ("staleness/mean", "rollout_train_kl", "groups_aborted")
    lines = [
        [s, f"{f['samples_per_s'] / first:.2f}", *(f"{f[name]:.3g}" for name in shown)] for s, f in by_staleness.items()
    ]
    moments, rewards = rewards_over_time(runs)
    print("reward over time, mean of the last steps by then\n")
    print(
        markdown(
            ("staleness", *(f"{at:.0f} s" for at in moments)),
            [[s, *(f"{r:.3f}" for r in found)] for s, found in rewards.items()],
        )
    )
    print("\nthroughput\n")
    print(markdown(("staleness", "times", *shown), lines), flush=True)
    each = [
        {"staleness": r.staleness, "seed": r.seed, "times_s": r.times_s, "rows": [_kept(row) for row in r.rows]}
        for r in runs
    ]
    return {"by_staleness": by_staleness, "moments_s": moments, "rewards": rewards, "runs": each}


def _kept(row: Row) -> dict[str, float]:
    return {name: round(value, 9) for name, value in row.items() if name.startswith(KEPT)}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--staleness", type=int, nargs="+", default=(0, 1, 4))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--skip", type=int, default=1, help="first steps to leave out: a compilation, a queue that fills"
    )
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--model", default="starter", help="starter, 2b (taught here), or a folder")
    parser.add_argument("--lesson-steps", type=int, default=300)
    parser.add_argument("--run-args", default="", help="more flags of trainer.run; with --num-gpus SGLang is started")
    parser.add_argument("--out", type=Path, default=RESULTS / "asynchrony.json")
    options = parser.parse_args()
    options.run_args = f"--group-size {options.group_size} {options.run_args}"
    at, runs = commit(), list[Run]()
    with tempfile.TemporaryDirectory(prefix="trueturn-") as work:
        model = model_at(options, Path(work))
        for seed in range(options.seeds):
            for staleness in options.staleness:
                folder = Path(work) / f"staleness-{staleness}-seed-{seed}"
                try:
                    runs.append(measured(folder, staleness, seed, options, model))
                except subprocess.CalledProcessError:  # the others are still worth having
                    print(log_of(folder).read_text()[-3000:], flush=True)
                    continue
                run = runs[-1]
                speed = run.num_samples / run.times_s[-1]
                print(f"staleness {staleness} seed {seed}: {run.times_s[-1]:.1f} s, {speed:.2f} samples/s", flush=True)
        command = f"python -m benchmarks.asynchrony {shlex.join(sys.argv[1:])}"
        write_result(options.out, command, report(runs), at, PACKAGES)


def model_at(options: argparse.Namespace, work: Path) -> str:
    """Return the folder of the model to train, written first where it is the shape of 2 B parameters."""
    if options.model != "2b":
        from agents.model import STARTER_PATH

        return str(STARTER_PATH) if options.model == "starter" else options.model
    from benchmarks.sglang_rollout import make_checkpoint

    make_checkpoint("2b", work / "checkpoint", options.lesson_steps, 0, "cuda")
    return str(work / "checkpoint")


if __name__ == "__main__":
    main()
