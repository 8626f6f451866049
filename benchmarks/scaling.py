"""One training step on 1, 2, 4 learner processes: seconds, and the share of what that many would ideally give.

`python -m benchmarks.scaling --model 2b --gpus 1 2 4` starts each group of Ray actors as `--num-gpus` of the trainer
does, has all of them take the same step of 32 problems with 8 samples (geo3k-like, one picture each), and writes
`scaling_MODEL.json`. `--cpu` runs it on processes of a CPU, which shows that it works and nothing else. Weights are
fresh.
"""

from __future__ import annotations

import argparse
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
from benchmarks.learner_tools import NOMINAL
from benchmarks.learner_workload import GEO3K, MODELS, TINY, make_samples, real_tokens, shape_config
from benchmarks.report import RESULTS, commit, markdown, write_result
from trainer.config.inputs import ModelConfig
from trainer.config.learner import ClusterConfig, LearnerConfig
from trainer.config.run import RunConfig
from trainer.learner.ray_group import LearnerGroup
from trainer.types import TrainingSample


def measure(folder: Path, num_ranks: int, samples: list[TrainingSample], args: argparse.Namespace) -> dict[str, Any]:
    """Return the median seconds of a step on so many processes, and what must not depend on their number."""
    run = RunConfig(
        model=ModelConfig(model=str(folder), dtype="float32" if args.cpu else "bfloat16"),
        learner=LearnerConfig(
            max_tokens_per_microbatch=args.max_tokens, reshard=args.reshard, compile="off" if args.cpu else "on"
        ),
        cluster=ClusterConfig(num_learners=num_ranks) if args.cpu else ClusterConfig(num_gpus=num_ranks),
    )
    started = time.perf_counter()
    group = LearnerGroup(run, folder, SamplingParams())
    try:
        ready_s = time.perf_counter() - started
        first = group.step([samples])
        first_s = time.perf_counter() - started - ready_s
        seconds = []
        for _ in range(args.repeats):
            began = time.perf_counter()
            group.step([samples])
            seconds.append(time.perf_counter() - began)
    finally:
        group.close()
    return {
        "processes": num_ranks,
        "seconds": statistics.median(seconds),
        "all_seconds": [round(s, 3) for s in seconds],
        "ready_s": round(ready_s, 1),
        "first_s": round(first_s, 1),
        "loss": first.loss,
        "grad_norm": first.grad_norm,
    }


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="2b")
    parser.add_argument("--gpus", nargs="+", type=int, default=(1, 2, 4), help="processes of each row")
    parser.add_argument("--cpu", action="store_true", help="processes on the CPU")
    parser.add_argument("--problems", type=int, default=32, help="problems of the step, 8 samples each")
    parser.add_argument("--max-tokens", type=int, default=16384, help="packed tokens of a micro-batch")
    parser.add_argument("--reshard", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps, after one that is not")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    at, config = commit(), shape_config(args.model)
    likely = np.float32(-np.log(config.text_config.vocab_size))
    sizes = TINY if args.model == "tiny" else replace(GEO3K, problems=args.problems)
    samples = [replace(s, logprobs_T=np.full_like(s.logprobs_T, likely)) for s in make_samples(config, sizes)]
    needed = TRAINING_FACTOR * forward_flops(config, samples, True).total
    rows: list[dict[str, Any]] = []
    gpu = "" if args.cpu else torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory(prefix="trueturn-") as work:
        folder = Path(work) / "model"
        fresh_model(config, "cpu" if args.cpu else "cuda").save(folder)
        if not args.cpu:
            torch.cuda.empty_cache()
        for number in args.gpus:
            row = measure(folder, number, samples, args)
            row["real_tokens_per_s"] = real_tokens(samples) / row["seconds"]
            row["mfu_needed_nominal"] = needed / row["seconds"] / number / NOMINAL
            rows.append(row)
            row["of_linear"] = rows[0]["seconds"] * rows[0]["processes"] / (row["seconds"] * number)
            figures = {"gpu": gpu, "samples": len(samples), "real_tokens": real_tokens(samples), "rows": rows}
            args.out.mkdir(parents=True, exist_ok=True)
            command = f"python -m benchmarks.scaling {shlex.join(sys.argv[1:])}"
            write_result(
                args.out / f"scaling_{args.model}.json", command, figures, at, ("torch", "ray", "transformers")
            )
            columns = ("processes", "seconds", "real_tokens_per_s", "of_linear", "loss", "grad_norm", "first_s")
            print(markdown(columns, [[f"{r[c]:.4g}" for c in columns] for r in rows]), flush=True)


if __name__ == "__main__":
    main()
