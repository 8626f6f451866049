"""Whole runs with both backends on each other: `python -m benchmarks.backend_runs --seeds 3 --steps 40`.

Each run is the public command in a process of its own, on the starter, and only the backend differs. Prints reward,
entropy and norm of the gradient over the steps with their spread over the seeds, and the largest distance between both
backends in any step of the same seed; writes `benchmarks/results/backend_runs.json` and a picture of the curves.

- On CPUs (the default) Megatron runs through `tests.megatron_run`, with the embedded engine.
- On GPUs, with SGLang: `--device cuda --run-args "--engine sglang --num-gpus 2 --dtype bfloat16"`.

`--megatron "--backend megatron --cp 2"` chooses the layout; `--run-args "--max-staleness 4 --correction none"` shows
what stale tokens do to both.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import RESULTS, commit, markdown, write_result
from benchmarks.training_run import log_of, train

PACKAGES = ("torch", "transformers", "numpy")
METRICS = ("reward", "entropy", "grad_norm", "rollout_train_kl")
#: Rows of the table, and steps that the drawn curves average.
PARTS, WINDOW = 4, 5

#: By backend: the metrics of each seed's run, (seeds, steps) by name.
Curves = Mapping[str, Mapping[str, NDArray[np.float64]]]


def metrics_of(folder: Path, backend: Sequence[str], seed: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the metrics of each step of a run."""
    on_cpu = options.device == "cpu"
    flags = ["--env", "geo3k", "--max-turns", "3", *(["--num-learners", "2"] * on_cpu), "--doctor", "off"]
    flags += ["--seed", str(seed), "--steps", str(options.steps), *shlex.split(options.run_args), *backend]
    return train(folder, *flags, module="tests.megatron_run" if on_cpu and "megatron" in backend else "trainer.run")


def curves_of(runs: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> Curves:
    """Return the metrics of all runs as arrays."""
    return {
        backend: {name: np.array([[row[name] for row in rows] for rows in seeds]) for name in METRICS}
        for backend, seeds in runs.items()
    }


def distances(curves: Curves) -> dict[str, float]:
    """Return the largest distance between both backends in any step of the same seed, by metric."""
    one, other = curves.values()
    return {name: float(np.abs(one[name] - other[name]).max()) for name in METRICS}


def table(curves: Curves) -> str:
    """Return the means over a part of the steps, and their spread (standard deviation) over the seeds."""
    lines = []
    for backend, metrics in curves.items():
        parts = {name: np.array_split(values, PARTS, axis=1) for name, values in metrics.items()}
        first = 1
        for number in range(PARTS):
            size = parts["reward"][number].shape[1]
            means = {name: parts[name][number].mean(axis=1) for name in METRICS}
            cells = [f"{mean.mean():.3g} ± {mean.std(ddof=len(mean) > 1):.2g}" for mean in means.values()]
            lines.append([backend, f"{first}-{first + size - 1}", *cells])
            first += size
    return markdown(("backend", "steps", *METRICS), lines)


def draw(curves: Curves, path: Path) -> None:
    """Draw mean and spread of reward and entropy over the steps, both backends on each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    window = np.ones(WINDOW) / WINDOW
    for axes, name in zip(figure.subplots(1, 2), ("reward", "entropy"), strict=True):
        for (backend, metrics), (color, style) in zip(curves.items(), (("C0", "-"), ("C1", "--")), strict=True):
            smooth = np.array([np.convolve(run, window, "valid") for run in metrics[name]])
            steps, mean, spread = np.arange(WINDOW, WINDOW + smooth.shape[1]), smooth.mean(0), smooth.std(0)
            axes.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.15, lw=0)
            axes.plot(steps, mean, style, color=color, label=backend)
        axes.set(xlabel="step", ylabel=f"{name}, mean of {WINDOW} steps")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--megatron", default="--backend megatron --pp 2", help="flags of the second backend")
    parser.add_argument("--run-args", default="", help="more flags of trainer.run, for both")
    parser.add_argument("--out", type=Path, default=RESULTS / "backend_runs.json")
    options = parser.parse_args()
    at = commit()
    backends: dict[str, list[str]] = {"fsdp": [], "megatron": shlex.split(options.megatron)}
    runs: dict[str, list[list[dict[str, float]]]] = {backend: [] for backend in backends}
    with tempfile.TemporaryDirectory(prefix="trueturn-") as work:
        for seed in range(options.seeds):
            for backend, flags in backends.items():
                folder = Path(work) / f"{backend}-{seed}"
                try:
                    runs[backend].append(metrics_of(folder, flags, seed, options))
                except subprocess.CalledProcessError:
                    sys.exit(log_of(folder).read_text()[-3000:])
                rewards = [row["reward"] for row in runs[backend][-1]]
                print(f"{backend} seed {seed}: reward {rewards[0]:.3f} -> {rewards[-1]:.3f}", flush=True)
    curves = curves_of(runs)
    far = distances(curves)
    print(table(curves))
    print("largest distance in a step of the same seed:", ", ".join(f"{n} {v:.3g}" for n, v in far.items()))
    every: dict[str, Any] = {b: {n: v.tolist() for n, v in metrics.items()} for b, metrics in curves.items()}
    command = f"python -m benchmarks.backend_runs {shlex.join(sys.argv[1:])}".strip()
    write_result(options.out, command, {"largest_distance": far, "curves": every}, at, PACKAGES)
    draw(curves, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
