"""The tools of the benchmark of a training step: timing, failures, fresh processes, MFU and tables.

Rows are dictionaries of figures by name, which become a table's lines and a JSON file.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.flops import TRAINING_FACTOR, forward_flops
from benchmarks.learner_peers import score_all
from benchmarks.learner_workload import GEO3K, TINY, make_samples, plain_network, real_tokens, to_bfloat16
from benchmarks.report import markdown
from trainer.types import TrainingSample

#: What NVIDIA's data sheet promises of an H100 or H200 (SXM) in dense bfloat16.
NOMINAL = 989e12
GEMMS = ((8192, 8192, 8192), (16384, 8192, 16384))
#: What a line of a fresh process begins with that holds its row.
RESULT = "RESULT "
Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What all parts share; `gemm_rate` is in operations per second."""

    args: argparse.Namespace
    config: Any
    work: Path
    gemm_rate: float

    @property
    def device(self) -> str:
        return self.args.device

    def samples(self, shared: bool = True) -> list[TrainingSample]:
        """Return the step's samples. Their rollout log-probs come from Transformers' forward pass of the same weights,
        so that ratios are 1 but for rounding; they are made once and kept in a file, which other processes read."""
        made = make_samples(self.config, TINY if self.args.model == "tiny" else GEO3K, shared=shared)
        path = self.work / f"logprobs-{shared}.npy"
        if not path.exists():
            network = plain_network(self.config, self.device)
            if self.on_gpu:
                to_bfloat16(network)
            np.save(path, np.concatenate(score_all(network, made, self.device, 16384)))
            del network
            release()
        bounds = np.cumsum([len(s.ids_T) for s in made])[:-1]
        return [replace(s, logprobs_T=part) for s, part in zip(made, np.split(np.load(path), bounds), strict=True)]

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def figures(self, seconds: float, samples: Sequence[TrainingSample], factor: int = TRAINING_FACTOR) -> Row:
        """Return throughput and MFU of a step over samples."""
        needed, whole = (forward_flops(self.config, samples, shared) for shared in (True, False))
        row: Row = {"seconds": seconds, "real_tokens_per_s": real_tokens(samples) / seconds}
        for name, flops in (("needed", needed), ("whole", whole)):
            rate = factor * flops.total / seconds
            row |= {f"mfu_{name}": rate / self.gemm_rate, f"mfu_{name}_nominal": rate / NOMINAL}
        return row


def wait(device: str) -> None:
    """Wait until the device has done all it was asked."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def release() -> None:
    """Hand memory back that nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(step: Callable[[], Any], device: str, warmups: int, repeats: int) -> tuple[Row, Any]:
    """Return seconds of repeated calls and peak memory, and what the very first call returned."""
    taken: list[float] = []
    first = None
    for number in range(warmups + repeats):
        wait(device)
        started = time.perf_counter()
        result = step()
        wait(device)
        taken.append(time.perf_counter() - started)
        first = result if number == 0 else first
    kept = taken[warmups:]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else 0.0
    return {"seconds": statistics.median(kept), "all_seconds": taken, "peak_gib": peak}, first


def attempt(name: str, measure: Callable[[], Row]) -> Row:
    """Measure, or say why not: the other rows are still worth having."""
    print(f"   {name} ...", flush=True)
    release()
    started = time.perf_counter()
    row: Row = {"name": name}
    try:
        row |= measure()
    except Exception as error:
        memory = isinstance(error, torch.OutOfMemoryError)
        row["failed"] = "out of memory" if memory else f"{type(error).__name__}: {str(error)[:300]}"
        if not memory:
            traceback.print_exc()
    release()
    return {**row, "spent_s": time.perf_counter() - started}


def gemm_rates(device: str) -> list[Row]:
    """Return the rate of large bfloat16 matrix products of random numbers: the best of three rounds of ten."""
    rows = []
    for m, k, n in GEMMS if device.startswith("cuda") else ((256, 256, 256),):
        left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        right = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        taken = []
        for _ in range(4):
            wait(device)
            started = time.perf_counter()
            for _ in range(10):
                torch.mm(left, right)
            wait(device)
            taken.append((time.perf_counter() - started) / 10)
        rows.append({"name": f"{m} x {k} x {n}", "tflops": 2 * m * k * n / min(taken[1:]) / 1e12})
    return rows


def in_fresh_process(bench: Bench, child: str) -> Row:
    """Measure one row of `trl` or `memory` in a process of its own; raises RuntimeError where it fails."""
    options = ["--model", bench.args.model, "--device", bench.device, "--trl-repeats", str(bench.args.trl_repeats)]
    hidden = ["--child", child, "--work", str(bench.work), "--gemm-rate", str(bench.gemm_rate)]
    command = [sys.executable, "-m", "benchmarks.learner", *options, *hidden]
    done = subprocess.run(command, capture_output=True, text=True, timeout=bench.args.child_timeout)
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            row = json.loads(line.removeprefix(RESULT))
            if row.get("failed", "out of memory") != "out of memory":
                print(done.stderr[-3000:], flush=True)
            return row
    raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-1500:]}")


def show(part: str, rows: Sequence[Row]) -> None:
    """Print the rows of a part as a table."""
    left_out = {"all_seconds", "breakdown", "ours_all", "plain_all", "mfu_needed_nominal", "mfu_whole_nominal"}
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in left_out))
    cells = [[_short(row.get(name, "")) for name in columns] for row in rows]
    print(f"\n{part}\n{markdown(columns, cells)}\n", flush=True)


def _short(value: object) -> object:
    return (
        f"{value:.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else value
    )
