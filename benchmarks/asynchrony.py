"""Asynchronous training against synchronous, and placements against each other, as whole runs.

`python -m benchmarks.asynchrony --seeds 3 --steps 60`: every run is the public command in a process of its own, so that
only the flags of its variant differ; with `--max-staleness 0`, each side waits for the other. Measured from the end of
step `--skip` to that of the last one but `--tail`: samples and tokens a second, who waited, the seconds of a weight
push, and KL by the age of tokens; and the reward over time. After each run it prints two tables and writes
`benchmarks/results/asynchrony.json`, which has every step. With staleness, the first steps train on what was begun
together, and during the last ones nothing begins: leave out as many at both ends as a token may be old, and more.

- On a CPU (the default) the embedded engine shares the cores with the learner, so there is little to gain: what is seen
  is what older tokens cost.
- On GPUs `--run-args "--num-gpus 1 --num-servers 1 --first-gpu 1 --dtype bfloat16"` starts SGLang on another GPU;
  `--model 2b --thoughts 300` is the shape of 2 B parameters, taught to write turns of about 300 tokens and rewarded for
  short ones, so that every group has something to learn.
- Placements: `--variant "split --num-gpus 1 --first-gpu 1"`, `--variant "shared --num-gpus 2 --placement colocate"`.
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
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import fmean, mean
from typing import Any

from agents.types import Trajectory
from benchmarks.report import RESULTS, commit, markdown, write_result
from benchmarks.training_run import log_of, train
from trainer.callbacks import Callback

VARIANTS = tuple(f"staleness-{number} --max-staleness {number}" for number in (0, 1, 4))
PACKAGES = ("torch", "transformers", "numpy")
ENDED = "benchmark/ended_s"
#: Moments at which rewards are compared, as shares of the shortest run's time.
SHARES = (0.25, 0.5, 0.75, 1.0)
WINDOW = 8
SHOWN = (
    "samples_per_s",
    "tokens_per_s",
    "step_s",
    "rollout_s",
    "train_s",
    "idle/learner_time_frac",
    "idle/servers_time_frac",
    "sync_s",
    "staleness/mean",
    "rollout_train_kl",
    "groups_aborted",
)
#: How the metrics begin that are written for every step.
KEPT = ("reward", "entropy", "grad_norm", "idle/", "staleness/mean", "rollout_train_kl", "num_tokens", "groups_trained")
KEPT += ("rollout_s", "train_s", "sync_s")

Row = Mapping[str, float]


class Clock(Callback):
    """Adds the time at which a step ended to its metrics."""

    def on_step_end(self, step: int, row: Row) -> Mapping[str, float]:
        """Return the seconds of the system's clock."""
        return {ENDED: time.time()}


def shortness(trajectory: Trajectory) -> float:
    """Return a reward that hardly two episodes share: 1 for no tokens, 0.5 for a thousand."""
    return 1000 / (1000 + trajectory.num_model_tokens)


@dataclass(frozen=True)
class Run:
    """One training run: its steps after the first ones, and when each ended, in seconds since those."""

    variant: str
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
        """Return the mean of a metric over the steps that have it, the first one left out; a share of time by time."""
        found = [
            (row[name], row[ENDED] - before[ENDED] if name.endswith("time_frac") else 1.0)
            for before, row in pairwise(self.rows)
            if name in row
        ]
        return fmean(*zip(*found, strict=True)) if found else nan


def measured(folder: Path, variant: str, seed: int, options: argparse.Namespace, model: str) -> Run:
    """Run the command with the flags of a variant and read its metrics."""
    own = Path(__file__).resolve()
    name, *flags = shlex.split(variant)
    flags = [*shlex.split(options.run_args), "--group-size", str(options.group_size), *flags, "--model", model]
    flags += ["--seed", str(seed), "--callback", f"{own}:Clock"]
    flags += ["--reward", f"{own}:shortness"] if options.thoughts else []
    rows = train(folder, options.steps, *flags)[options.skip : options.steps - options.tail]
    samples = sum(row["groups_trained"] for row in rows[1:]) * options.group_size
    return Run(name, seed, rows, int(samples))


def figures_of(runs: Sequence[Run]) -> dict[str, float]:
    """Return the means over the runs of one variant."""
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


def by_variant(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs of each variant, in the order of their first ones."""
    return {name: [run for run in runs if run.variant == name] for name in dict.fromkeys(run.variant for run in runs)}


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """Print the tables; return the figures."""
    figures = {name: figures_of(own) for name, own in by_variant(runs).items()}
    shortest_s = min(run.times_s[-1] for run in runs)
    moments = [share * shortest_s for share in SHARES]
    rewards = {
        name: [mean(run.reward_at(at) for run in own) for at in moments] for name, own in by_variant(runs).items()
    }
    print("reward over time, mean of the last steps by then\n")
    lines = [[name, *(f"{reward:.3f}" for reward in found)] for name, found in rewards.items()]
    print(markdown(("variant", *(f"{at:.0f} s" for at in moments)), lines))
    first = next(iter(figures.values()))["samples_per_s"]
    lines = [
        [n, f"{f['samples_per_s'] / first:.2f}", *(f"{f[name]:.3g}" for name in SHOWN)] for n, f in figures.items()
    ]
    print("\nthroughput\n")
    print(markdown(("variant", "times", *SHOWN), lines), flush=True)
    each = [
        {"variant": r.variant, "seed": r.seed, "times_s": r.times_s, "rows": [_kept(row) for row in r.rows]}
        for r in runs
    ]
    return {"by_variant": figures, "moments_s": moments, "rewards": rewards, "runs": each}


def _kept(row: Row) -> dict[str, float]:
    return {name: round(value, 9) for name, value in row.items() if name.startswith(KEPT)}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--variant", action="append", help="its name and its flags, in one argument")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=1, help="first steps to leave out: compilation, a queue that fills")
    parser.add_argument("--tail", type=int, default=0, help="last steps to leave out: nothing begins any more")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--model", default="starter", help="starter, 2b (taught here), or a folder")
    parser.add_argument("--thoughts", type=int, default=0, help="tokens before the call or answer of a taught turn")
    parser.add_argument("--lesson-steps", type=int, default=300)
    parser.add_argument("--run-args", default="", help="more flags of trainer.run; with --num-gpus SGLang is started")
    parser.add_argument("--work", type=Path, help="folder that keeps the runs, and may have some already")
    parser.add_argument("--out", type=Path, default=RESULTS / "asynchrony.json")
    options = parser.parse_args()
    at, runs = commit(), list[Run]()
    command = f"python -m benchmarks.asynchrony {shlex.join(sys.argv[1:])}"
    with tempfile.TemporaryDirectory(prefix="trueturn-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        model = model_at(options, work)
        for seed in range(options.seeds):
            for variant in options.variant or VARIANTS:
                folder = work / f"{variant.split()[0]}-seed-{seed}"
                try:
                    runs.append(measured(folder, variant, seed, options, model))
                except subprocess.CalledProcessError:  # the others are still worth having
                    print(log_of(folder).read_text()[-3000:], flush=True)
                    continue
                run = runs[-1]
                speed = run.num_samples / run.times_s[-1]
                print(f"{run.variant} seed {seed}: {run.times_s[-1]:.1f} s, {speed:.2f} samples/s", flush=True)
                write_result(options.out, command, report(runs), at, PACKAGES)


def model_at(options: argparse.Namespace, work: Path) -> str:
    """Return the folder of the model to train, taught first where it is the shape of 2 B parameters."""
    if options.model != "2b":
        from agents.model import STARTER_PATH

        return str(STARTER_PATH) if options.model == "starter" else options.model
    from benchmarks.sglang_rollout import make_checkpoint

    make_checkpoint("2b", work / "checkpoint", options.lesson_steps, 0, "cuda", options.thoughts)
    return str(work / "checkpoint")


if __name__ == "__main__":
    main()
