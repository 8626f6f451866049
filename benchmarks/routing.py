"""Runs of a mixture on SGLang with free and with replayed routing, beside other networks. Needs a GPU.

`python -m benchmarks.taught --shape mixture` first, then

    python -m benchmarks.routing --models mixture=taught/mixture states=taught/states --out results

Trains each network on an environment whose tools answer with images, in bfloat16, several runs at once on a card, each
with a server of its own; a mixture with each `--routing`. Prints a table of the mean over seeds, and writes the metrics
of every step to `routing.json` even if runs fail or the time is up. On a CPU, with the embedded engine, to try it:

    python -m benchmarks.routing --models mixture=taught/mixture --device cpu --dtype float32 --steps 1 --seeds 0 \\
      --problems-per-step 2 --group-size 2 --out /tmp
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from agents.model.architectures import ModelFacts
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result
from benchmarks.training_run import log_of

ROUTINGS = ("free", "replay")
REGISTRY = ROOT / "benchmarks" / "routing.yaml"
PACKAGES = ("torch", "transformers")
#: The file of settings that have no flag.
SETTINGS = "routing.settings.yaml"
#: Of a step's metrics, by the column of the table.
COLUMNS = {
    "k3": "rollout_train_kl",
    "k3 if free": "routing/kl_free",
    "p99 gap": "logprob_gap_p99",
    "other experts": "routing/other_experts",
    "probe gap": "probe_gap",
    "rollout s": "rollout_s",
    "train s": "train_s",
}
#: And those that are of a turn or a layer each, by how their names begin.
SERIES = {"k3 by turn": "rollout_train_kl/turn_", "other experts by layer": "routing/other_experts/"}
#: Steps whose mean reward is the first, and the last, of a run.
ENDS = 3
#: Seconds between two starts: servers that start together take each other's memory.
APART_S = 2.5


@dataclass(frozen=True)
class Wanted:
    """One run: a network's name and folder, how its tokens are routed ("" for a dense one), a seed, and a GPU."""

    model: str
    folder: Path
    routing: str
    seed: int
    gpu: int

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return "-".join(filter(None, (self.model, self.routing, str(self.seed))))


def wanted_runs(args: argparse.Namespace) -> list[Wanted]:
    """Return the runs, those of a card one after the other."""
    runs = []
    for text in args.models:
        model, _, folder = text.partition("=")
        # A dense network has nothing to route.
        routings = args.routings if is_mixture(Path(folder)) else ("",)
        runs += [(model, Path(folder), routing, seed) for routing in routings for seed in args.seeds]
    return [Wanted(*run, gpu=number % args.gpus) for number, run in enumerate(runs)]


def is_mixture(folder: Path) -> bool:
    """Return whether a checkpoint has experts."""
    return "moe" in ModelFacts.load(folder).model_type


def command_of(run: Wanted, args: argparse.Namespace) -> list[str]:
    """Return the command of a run."""
    flags = {
        "env": "zoom_angles",
        "registry": REGISTRY,
        "model": run.folder,
        "device": args.device,
        "dtype": args.dtype,
        "engine": "sglang" if args.device == "cuda" else "hf",
        "steps": args.steps,
        "seed": run.seed,
        "problems-per-step": args.problems_per_step,
        "group-size": args.group_size,
        "max-new-tokens": 400,
        "lr": args.lr,
        "record": 0,
        "eval-size": 0,
        "save-every": 0,
        "tracker": "",
        # It would stop a run whose engine routes otherwise, which is what is measured.
        "doctor": "off",
        "out": args.out / "runs",
        "name": run.name,
    }
    if run.routing:
        flags["routing"] = run.routing
    if args.device == "cuda":
        flags |= {"mem-fraction": args.mem_fraction, "engine-args": args.engine_args}
    if run.model in args.more:
        flags["engine-args"] = f"{args.engine_args} {args.more[run.model]}"
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", "trainer.run", *words, f"--config={args.out / SETTINGS}"]


@contextlib.contextmanager
def started(run: Wanted, args: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run in a process group of its own, which is ended with the context."""
    folder = args.out / "runs" / run.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": str(run.gpu)} if args.device == "cuda" else dict(os.environ)
    with log_of(folder).open("w") as log:
        process = subprocess.Popen(
            command_of(run, args), env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started; it has some seconds for the step that it is in."""
    for number, wait_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def run_all(runs: Sequence[Wanted], args: argparse.Namespace) -> None:
    """Run them, `args.jobs` at once, until all have ended or the time is up; say which failed, and why."""
    began = time.monotonic()
    waiting = list(runs)
    with contextlib.ExitStack() as stack:
        running: dict[Wanted, subprocess.Popen[bytes]] = {}
        while (waiting or running) and time.monotonic() - began < args.limit_s:
            if waiting and len(running) < args.jobs:
                run = waiting.pop(0)
                running[run] = stack.enter_context(started(run, args))
            time.sleep(APART_S)
            for run in [run for run, process in running.items() if process.poll() is not None]:
                code = running.pop(run).returncode
                print(f"{time.monotonic() - began:.0f} s: {run.name} ended with {code}", flush=True)
                if code:
                    print("\n".join(log_of(args.out / "runs" / run.name).read_text().splitlines()[-12:]), flush=True)
        for run in (*running, *waiting):
            print(f"{run.name} is stopped: the time is up", flush=True)


def steps_of(run: Wanted, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the metrics of the steps that a run took."""
    path = args.out / "runs" / run.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(found: Mapping[Wanted, Sequence[Mapping[str, float]]]) -> str:
    """Return a row for each network and routing: means over seeds and steps, the first step left out.

    It has no weights of ours on the server yet, and what is compiled or captured in it takes time.
    """
    groups = defaultdict(list)
    for run, steps in found.items():
        if len(steps) > 1:
            groups[run.model, run.routing].append(steps)
    rows = []
    for (model, routing), runs in groups.items():
        later = [step for steps in runs for step in steps[1:]]
        values = [_mean(later, name) for name in COLUMNS.values()]
        values += [_series(later, start) for start in SERIES.values()]
        rewards = [f"{mean(s['reward'] for s in part):.2f}" for part in _ends(runs)]
        rows.append((model, routing or "-", len(runs), " to ".join(rewards), *values))
    return markdown(("network", "routing", "seeds", "reward", *COLUMNS, *SERIES), rows)


def _ends(runs: Sequence[Sequence[Mapping[str, float]]]) -> tuple[list[Mapping[str, float]], ...]:
    """Return the first steps of all runs, and the last."""
    return [s for steps in runs for s in steps[:ENDS]], [s for steps in runs for s in steps[-ENDS:]]


def _series(steps: Sequence[Mapping[str, float]], start: str) -> str:
    """Return the means of the metrics whose names begin so, by the number that they end with."""
    names = {name for step in steps for name in step if name.startswith(start)}
    ordered = sorted(names, key=lambda name: int(re.findall(r"\d+", name)[-1]))
    return ", ".join(_mean(steps, name) for name in ordered) or "-"


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> str:
    values = [step[name] for step in steps if name in step]
    return f"{mean(values):.2g}" if values else "-"


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=FOLDER", help="taught checkpoints")
    parser.add_argument("--routings", nargs="+", default=ROUTINGS, choices=ROUTINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--problems-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpus", type=int, default=1, help="cards; runs take turns on them")
    parser.add_argument("--jobs", type=int, default=6, help="runs at the same time")
    parser.add_argument("--limit-s", type=float, default=480.0, help="seconds after which runs are stopped")
    parser.add_argument("--mem-fraction", type=float, default=0.8, help="with bounded pools, of what others leave")
    parser.add_argument("--engine-args", default="--max-total-tokens 131072")
    parser.add_argument("--more-engine-args", nargs="*", default=[], metavar="NAME=ARGS", help="of one network")
    parser.add_argument(
        "--tolerance", type=float, default=2.0, help="`probe_tolerance`; free routing needs a large one"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.more = dict(text.split("=", 1) for text in args.more_engine_args)
    return args


def main() -> None:
    """Run the command line."""
    args = parse_args()
    at = commit()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = f"engine: {{probe_tolerance: {args.tolerance}}}\nlearner: {{max_tokens_per_microbatch: 16384}}\n"
    (args.out / SETTINGS).write_text(settings)
    runs = wanted_runs(args)
    try:
        run_all(runs, args)
    finally:
        found = {run: steps_of(run, args) for run in runs}
        figures: dict[str, Any] = {
            "runs_at_once": args.jobs,
            "runs": [
                {"model": run.model, "routing": run.routing, "seed": run.seed, "steps": steps}
                for run, steps in found.items()
            ],
        }
        command = f"python -m benchmarks.routing {shlex.join(sys.argv[1:])}"
        write_result(args.out / "routing.json", command, figures, at, PACKAGES)
        print(table(found))


if __name__ == "__main__":
    main()
