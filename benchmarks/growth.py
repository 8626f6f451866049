"""How cost grows with episodes, turns, images and context: `python -m benchmarks.growth`.

Each part of a step runs at sizes that double or quadruple. `slope` is the exponent in size over the upper half of them:
1 is linear. A part is `steep` where it is 0.15 above what it should be: 1, and for the learner's step that of the
operations that it needs. Seconds are of this process's CPU, of Chromium and a GPU by the clock; memory is what Python
and NumPy took beyond the start, for the learner the resident memory or the GPU's peak. Prints a table; writes
`benchmarks/results/growth.json` and an image of each axis into docs/.

`--axes context images --model 2b` on a GPU measures the learner alone, and needs no matplotlib. `--draw FILE` draws
the images of such a file again.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.growth_parts import PAGE, LearnerStep, Part, parts_of
from benchmarks.learner_workload import known_model
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result

AXES = {
    "episodes": (64, 256, 1024, 2048, 4096, 8192),
    "turns": (1, 2, 4, 8, 16, 32),
    "images": (1, 2, 4, 8, 16, 32, 64),
    "context": tuple(1024 * 2**power for power in range(8)),
}
#: Tokens of the longest stream that two cores train on in a minute.
CPU_CONTEXT = 16_384
#: Measurements are noisy: an exponent this far above what it should be is steep.
TOLERANCE = 0.15
REPEATS, ENOUGH_S = 3, 2.0
LEARNER = "learner's step"
Row = dict[str, Any]


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of values in sizes, over the upper half of the sizes and at least two of them.

    >>> round(slope([1, 2, 4, 8], [7, 5, 16, 64]), 3)
    2.0
    """
    first = max(0, min(len(sizes) // 2, len(sizes) - 2))
    # Nothing was measured, or there is nothing to fit.
    if min(values[first:]) <= 0 or len(sizes) < 2:
        return 0.0
    return float(np.polyfit(np.log(sizes[first:]), np.log(values[first:]), 1)[0])


def seconds_of(prepare: Part, clock: Callable[[], float]) -> float:
    """Return the least seconds of a few calls, by a clock."""
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < ENOUGH_S:
        call = prepare()
        gc.collect()
        started = clock()
        call()
        taken.append(clock() - started)
    return min(taken)


def device_clock() -> float:
    """Return the time at which the GPU has done all it was asked."""
    torch.cuda.synchronize()
    return time.perf_counter()


def traced_mb(call: Callable[[], object]) -> float:
    """Return the most memory that Python and NumPy held during a call, beyond the start."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def resident_mb(call: Callable[[], object]) -> float:
    """Return the most memory that the process held during a call, beyond the start; of Linux alone."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is held now
    before = _status_kb("VmRSS")
    call()
    return (_status_kb("VmHWM") - before) * 1024 / 1e6


def _status_kb(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def device_mb(call: Callable[[], object]) -> float:
    """Return the most memory that tensors took on the GPU during a call, weights and optimizer included."""
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() / 1e6


def measure_parts(axis: str, sizes: Sequence[int]) -> Iterator[Row]:
    """Yield the figures of every part but the learner at every size."""
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="trueturn-") as folder:
            for name, prepare in parts_of(axis, size, Path(folder)).items():
                row: Row = {"part": name, "size": size, "expected": 1.0}
                if name == PAGE:  # another process, which tells the seconds itself
                    row |= {"seconds": prepare()(), "mb": 0.0}
                else:
                    row |= {"seconds": seconds_of(prepare, time.process_time), "mb": traced_mb(prepare())}
                yield row


def measure_learner(step: LearnerStep, axis: str, sizes: Sequence[int]) -> list[Row]:
    """Return the figures of the learner's step at every size, up to the first that does not fit."""
    rows: list[Row] = []
    on_gpu = torch.cuda.is_available()
    step.part(axis, sizes[0])()()  # allocates the optimizer's state
    for size in sizes:
        prepare = step.part(axis, size)
        try:
            memory = (device_mb if on_gpu else resident_mb)(prepare())
            seconds = seconds_of(prepare, device_clock if on_gpu else time.process_time)
        except torch.OutOfMemoryError:
            print(f"{axis} {size}: out of memory", flush=True)
            break
        print(f"{axis} {size}: {seconds:.3g} s, {memory:.4g} MB", flush=True)
        rows.append({"part": LEARNER, "size": size, "seconds": seconds, "mb": memory})
    measured = [row["size"] for row in rows]
    if not rows:
        return []
    expected = slope(measured, [step.operations(axis, size) for size in measured])
    return [row | {"expected": expected} for row in rows]


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return each part's exponents."""
    result: list[Row] = []
    for name in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == name]
        sizes = [row["size"] for row in own]
        time_slope = slope(sizes, [row["seconds"] for row in own])
        expected = own[0]["expected"]
        result.append(
            {
                "part": name,
                "largest": sizes[-1],
                "seconds": own[-1]["seconds"],
                "mb": own[-1]["mb"],
                "slope": time_slope,
                "expected": expected,
                "memory_slope": slope(sizes, [row["mb"] for row in own]),
                "is_steep": time_slope > expected + TOLERANCE,
            }
        )
    return result


def table(axis: str, rows: Sequence[Row]) -> str:
    """Return the exponents of an axis as a Markdown table."""
    lines = []
    for row in summary(rows):
        slopes = [f"{row[name]:.2f}" for name in ("slope", "expected", "memory_slope")]
        verdict = "steep" if row["is_steep"] else ""
        lines.append((row["part"], row["largest"], f"{row['seconds']:.3g}", f"{row['mb']:.3g}", *slopes, verdict))
    columns = (axis, "most", "seconds there", "MB there", "slope", "expected", "slope of memory", "")
    return markdown(columns, lines)


def draw(axis: str, rows: Sequence[Row], path: Path) -> None:
    """Draw seconds and memory of every part over the sizes, with each part's exponent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for panel, value, exponent in zip(panels, ("seconds", "mb"), ("slope", "memory_slope"), strict=True):
        for found in summary(rows):
            own = [row for row in rows if row["part"] == found["part"] and row[value] > 0]
            label = f"{found['part']}: {found[exponent]:.2f}"
            if own:
                panel.loglog([row["size"] for row in own], [row[value] for row in own], "o-", ms=3, label=label)
        panel.set(xlabel=axis, ylabel={"seconds": "seconds", "mb": "MB"}[value])
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, title="slope of the upper half", title_fontsize=7)
    figure.savefig(path)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--model", type=known_model, default="tiny", help="shape of the learner's network")
    parser.add_argument("--most", type=int, default=2**17, help="largest size of any axis")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=ROOT / "docs", help="folder of the images")
    parser.add_argument("--draw", type=Path, help="draw the images of this result again, and measure nothing")
    args = parser.parse_args()
    suffix = "" if args.model == "tiny" else f"_{args.model}"
    if args.draw:
        for axis, rows in json.loads(args.draw.read_text())["axes"].items():
            draw(axis, rows, args.images / f"{args.draw.stem}_{axis}.png")
        return
    at, figures = commit(), dict[str, list[Row]]()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    step = LearnerStep(args.model, device) if {"context", "images"} & set(args.axes) else None
    hardware = torch.cuda.get_device_name() if on_gpu else ""
    for axis in args.axes:
        most = min(args.most, CPU_CONTEXT) if axis == "context" and not on_gpu else args.most
        sizes = [size for size in AXES[axis] if size <= most]
        rows = figures[axis] = []
        if axis != "context" and not on_gpu:
            rows += measure_parts(axis, sizes)
        if step and axis in ("context", "images"):
            rows += measure_learner(step, axis, sizes)
        print(table(axis, rows), flush=True)
        command = f"python -m benchmarks.growth {shlex.join(sys.argv[1:])}".strip()
        result = {"gpu": hardware, "axes": figures, "slopes": {name: summary(each) for name, each in figures.items()}}
        write_result(args.out / f"growth{suffix}.json", command, result, at, ("torch", "transformers", "numpy"))
        if find_spec("matplotlib"):
            draw(axis, rows, args.images / f"growth{suffix}_{axis}.png")


if __name__ == "__main__":
    main()
