"""One training step under several layouts of learner processes: seconds, MFU, and the share of an ideal speed-up.

A layout is the flags of `trainer.run` that say it. Each starts its Ray actors as the trainer does, and takes the same
step of `--problems` problems with 8 samples (geo3k-like, one image each). Weights are fresh. Prints a table after
each layout and writes `scaling_MODEL.json`; a layout that fails is a row with its error.

    python -m benchmarks.scaling --layouts "--num-gpus 1" "--num-gpus 2"
    python -m benchmarks.scaling --layouts "--num-gpus 1 --compile on" "--num-gpus 2 --backend megatron --tp 2 --sp"

`--long` takes two streams of 131,072 tokens with 64 images each in place of the problems; `--layers` cuts the
network's layers, so that a large one's shape fits. `peak_gib` is what tensors took at most on any rank. `--profile`
takes each layout's step on one rank in this process, and writes where its time goes, by kernel and by Python function.
`--model tiny --layouts "--num-learners 2"` runs on a CPU, which shows that it works and nothing else.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import pstats
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.types import SamplingParams
from benchmarks.flops import TRAINING_FACTOR, forward_flops
from benchmarks.learner_ours import fresh_model
from benchmarks.learner_profile import breakdown, print_breakdown
from benchmarks.learner_tools import NOMINAL, timed
from benchmarks.learner_workload import GEO3K, LONG, MODELS, TINY, make_samples, real_tokens, shape_config
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.config.cli import parse
from trainer.config.run import RunConfig
from trainer.learner.build import build_learner
from trainer.learner.ray_group import LearnerGroup
from trainer.types import TrainingSample

COLUMNS = (
    "layout",
    "ranks",
    "seconds",
    "real_tokens_per_s",
    "mfu",
    "of_linear",
    "peak_gib",
    "loss",
    "grad_norm",
    "ready_s",
    "first_s",
)


def measure(folder: Path, run: RunConfig, samples: list[TrainingSample], repeats: int) -> dict[str, Any]:
    """Return the median seconds of a step under a layout, and what must not depend on it."""
    started = time.perf_counter()
    group = LearnerGroup(run, folder, SamplingParams())
    try:
        ready_s = time.perf_counter() - started
        first = group.step([samples])
        first_s = time.perf_counter() - started - ready_s
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            group.step([samples])
            seconds.append(time.perf_counter() - began)
    finally:
        group.close()
    return {
        "ranks": run.cluster.num_ranks,
        "seconds": statistics.median(seconds),
        "all_seconds": [round(s, 3) for s in seconds],
        "ready_s": round(ready_s, 1),
        "first_s": round(first_s, 1),
        "peak_gib": first.memory.get("learner_peak_gib", math.nan),
        "loss": first.loss,
        "grad_norm": first.grad_norm,
    }


def profiled(folder: Path, run: RunConfig, samples: list[TrainingSample], repeats: int) -> dict[str, Any]:
    """Return the median seconds of a step on one rank, by kind of kernel, and by Python function of this thread."""
    device, started = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    learner: Any = build_learner(run, folder, SamplingParams(), torch.device(device))
    ready_s = time.perf_counter() - started
    timing, first = timed(lambda: learner.step([samples]), device, 1, repeats)
    found = breakdown(lambda: learner.step([samples]), learner.model, device)
    print_breakdown(found, timing["seconds"])
    host = cProfile.Profile()
    host.runcall(learner.step, [samples])
    calls: Any = pstats.Stats(host).stats  # type: ignore[attr-defined]
    longest = sorted(calls.items(), key=lambda item: -item[1][2])[:40]
    functions = [[f"{Path(file).name}:{line} {name}", c[1], round(c[2], 4)] for (file, line, name), c in longest]
    print(markdown(("function", "calls", "seconds"), functions[:20]), flush=True)
    figures = {
        "ready_s": ready_s,
        "first_s": timing["all_seconds"][0],
        "loss": first.loss,
        "grad_norm": first.grad_norm,
    }
    return timing | figures | {"ranks": 1, "breakdown": found, "functions": functions}


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="2b")
    parser.add_argument("--layouts", nargs="+", default=[f"--num-gpus {n}" for n in (1, 2, 4)], help="flags of each")
    parser.add_argument("--run-args", default="--max-tokens-per-microbatch 16384", help="flags of all layouts")
    parser.add_argument("--problems", type=int, default=32, help="problems of the step, 8 samples each")
    parser.add_argument("--long", action="store_true", help="two streams of 131,072 tokens are the step")
    parser.add_argument("--layers", type=int, help="layers of the network, if not all of the shape's")
    parser.add_argument("--profile", action="store_true", help="say where the time goes, on one rank")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    at, config = commit(), shape_config(args.model)
    likely = np.float32(-np.log(config.text_config.vocab_size))
    if args.layers:
        config.text_config.num_hidden_layers = args.layers
    if args.model == "tiny":
        sizes = replace(LONG, text=128, shortest=768, mean=768, longest=768, grid=(1, 2, 2)) if args.long else TINY
    else:
        sizes = LONG if args.long else replace(GEO3K, problems=args.problems)
    samples = [replace(s, logprobs_T=np.full_like(s.logprobs_T, likely)) for s in make_samples(config, sizes)]
    needed = TRAINING_FACTOR * forward_flops(config, samples, True).total
    rows: list[dict[str, Any]] = []
    is_on_gpu = torch.cuda.is_available()
    gpu, dtype = (torch.cuda.get_device_name(), "bfloat16") if is_on_gpu else ("", "float32")
    with tempfile.TemporaryDirectory(prefix="trueturn-") as work:
        folder = Path(work) / "model"
        fresh_model(config, "cuda" if is_on_gpu else "cpu").save(folder)
        if is_on_gpu:
            torch.cuda.empty_cache()
        for layout in args.layouts:
            flags = ["--model", str(folder), "--dtype", dtype, *shlex.split(args.run_args), *shlex.split(layout)]
            run = parse(RunConfig, flags, "benchmarks.scaling", "")
            try:
                row = (profiled if args.profile else measure)(folder, run, samples, args.repeats)
            except Exception as error:  # the other layouts are still worth having
                rows.append({"layout": layout, "failed": f"{type(error).__name__}: {error}"[-2000:]})
                print(rows[-1], flush=True)
                continue
            row |= {"layout": layout, "real_tokens_per_s": real_tokens(samples) / row["seconds"]}
            row["mfu"] = needed / row["seconds"] / row["ranks"] / NOMINAL  # of the operations that one pass needs
            rows.append(row)
            done = [r for r in rows if "seconds" in r]
            row["of_linear"] = done[0]["seconds"] * done[0]["ranks"] / (row["seconds"] * row["ranks"])
            figures = {"gpu": gpu, "samples": len(samples), "real_tokens": real_tokens(samples), "rows": rows}
            args.out.mkdir(parents=True, exist_ok=True)
            command = f"python -m benchmarks.scaling {shlex.join(sys.argv[1:])}"
            name = f"scaling_{args.model}{'_long' * args.long}.json"
            write_result(args.out / name, command, figures, at, ("torch", "ray", "transformers"))
            shown = [[r[c] if c == "layout" else f"{r[c]:.4g}" for c in COLUMNS] for r in done]
            print(markdown(COLUMNS, shown), flush=True)


if __name__ == "__main__":
    main()
