"""Whole runs that differ in a few flags, their curves on each other.

The starter plays the bundled problems; each run is the public command in a process of its own. Prints reward, entropy,
norm of the gradient and KL over the steps with their spread over the seeds, and the largest distance from the first
variant in any step of the same seed; writes a JSON file and an image of the curves. A variant is a name and its flags:

- both backends: `python -m benchmarks.curves --variant fsdp --variant "megatron --backend megatron --pp 2"`, and
  `--run-args "--num-learners 2"` without GPUs, where Megatron runs through `tests.megatron_run`, or
  `--run-args "--engine sglang --num-gpus 2 --dtype bfloat16"` on GPUs
- tokens of older weights: `python -m benchmarks.curves --variant "tis --correction tis" --variant "none --correction
  none" --run-args "--max-staleness 4"`
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import RESULTS, commit, markdown, write_result
from benchmarks.training_run import log_of, train

PACKAGES = ("torch", "transformers", "numpy")
METRICS = ("reward", "entropy", "grad_norm", "rollout_train_kl")
#: Rows of the table for each variant, and steps that the drawn curves average.
PARTS, WINDOW = 4, 5

#: By variant: the metrics of each seed's run, (seeds, steps) by name.
Curves = Mapping[str, Mapping[str, NDArray[np.float64]]]


def metrics_of(folder: Path, variant: Sequence[str], seed: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the metrics of each step of a run."""
    flags = ["--env", "geo3k", "--max-turns", "3", "--doctor", "off", *shlex.split(options.run_args), *variant]
    flags += ["--seed", str(seed)]
    needs_stand_ins = any("megatron" in flag for flag in flags) and not torch.cuda.is_available()
    return train(folder, options.steps, *flags, module="tests.megatron_run" if needs_stand_ins else "trainer.run")


def curves_of(runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> Curves:
    """Return the metrics of all runs as arrays."""
    return {
        variant: {name: np.array([[row[name] for row in rows] for rows in seeds]) for name in METRICS}
        for variant, seeds in runs.items()
    }


def distances(curves: Curves) -> dict[str, dict[str, float]]:
    """Return the largest distance from the first variant in any step of the same seed, by variant and metric."""
    first, *others = curves
    return {
        other: {name: float(np.abs(curves[first][name] - curves[other][name]).max()) for name in METRICS}
        for other in others
    }


def table(curves: Curves) -> str:
    """Return the means over a part of the steps, and their spread (standard deviation) over the seeds."""
    lines = []
    for variant, metrics in curves.items():
        parts = {name: np.array_split(values, PARTS, axis=1) for name, values in metrics.items()}
        first = 1
        for number in range(PARTS):
            size = parts["reward"][number].shape[1]
            means = {name: parts[name][number].mean(axis=1) for name in METRICS}
            cells = [f"{mean.mean():.3g} ± {mean.std(ddof=len(mean) > 1):.2g}" for mean in means.values()]
            lines.append([variant, f"{first}-{first + size - 1}", *cells])
            first += size
    return markdown(("variant", "steps", *METRICS), lines)


def draw(curves: Curves, path: Path) -> None:
    """Draw mean and spread of reward and entropy over the steps, all variants on each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    window = np.ones(WINDOW) / WINDOW
    for axes, name in zip(figure.subplots(1, 2), ("reward", "entropy"), strict=True):
        for number, (variant, metrics) in enumerate(curves.items()):
            smooth = np.array([np.convolve(run, window, "valid") for run in metrics[name]])
            steps, mean, spread = np.arange(WINDOW, WINDOW + smooth.shape[1]), smooth.mean(0), smooth.std(0)
            axes.fill_between(steps, mean - spread, mean + spread, color=f"C{number}", alpha=0.15, lw=0)
            axes.plot(steps, mean, "--" if number % 2 else "-", color=f"C{number}", label=variant)
        axes.set(xlabel="step", ylabel=f"{name}, mean of {WINDOW} steps")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def write(options: argparse.Namespace, runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], at: str) -> None:
    """Print and write what the seeds so far show."""
    curves = curves_of(runs)
    far = distances(curves)
    print(table(curves))
    for variant, found in far.items():
        print(f"{variant}, largest distance in a step:", ", ".join(f"{n} {v:.3g}" for n, v in found.items()))
    every = {variant: {n: v.tolist() for n, v in metrics.items()} for variant, metrics in curves.items()}
    command = f"python -m benchmarks.curves {shlex.join(sys.argv[1:])}"
    write_result(options.out, command, {"largest_distance": far, "curves": every}, at, PACKAGES)
    draw(curves, options.out.with_suffix(".png"))


def main() -> None:
    """Run every variant with each seed; print and write after each seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--variant", action="append", required=True, help="its name and its flags, in one argument")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the machine")
    parser.add_argument("--run-args", default="", help="more flags of trainer.run, for all variants")
    parser.add_argument("--work", type=Path, help="folder that keeps the runs, and may have some already")
    parser.add_argument("--out", type=Path, default=RESULTS / "curves.json", help="the picture lies beside it")
    options = parser.parse_args()
    at = commit()
    variants = {name: flags for name, *flags in map(shlex.split, options.variant)}
    runs: dict[str, list[list[dict[str, float]]]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory(prefix="trueturn-") as temporary, ThreadPoolExecutor(options.at_once) as pool:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        waiting = {
            (seed, variant): pool.submit(metrics_of, work / f"{variant}-{seed}", flags, seed, options)
            for seed in range(options.seeds)
            for variant, flags in variants.items()
        }
        for (seed, variant), run in waiting.items():
            try:
                runs[variant].append(run.result())
            except subprocess.CalledProcessError:
                pool.shutdown(cancel_futures=True)
                sys.exit(log_of(work / f"{variant}-{seed}").read_text()[-3000:])
            rewards = [row["reward"] for row in runs[variant][-1]]
            print(f"{variant} seed {seed}: reward {rewards[0]:.3f} -> {rewards[-1]:.3f}", flush=True)
            if len({len(seeds) for seeds in runs.values()}) == 1:
                write(options, runs, at)  # what is measured stays, whatever ends the next seed


if __name__ == "__main__":
    main()
