"""The planner's forecasts beside what runs measured, and its curves for clusters that are not here.

`python -m benchmarks.planner --compare RUN_FOLDER... --hardware FILE` predicts each run from its own settings and
recorded episodes, and prints seconds predicted and measured. `--learner` does that for the learner figures of
`benchmarks/results/`; `--curves` prints samples a second on 8 to 1,024 GPUs. `--write` also writes
`benchmarks/results/planner.json`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from agents.recording.run_files import METRICS
from benchmarks.learner_workload import GEO3K, response_lengths
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.errors import UserError
from trainer.config.run import RunConfig
from trainer.preflight.memory_estimate import empty_network
from trainer.preflight.memory_terms import GIB, count_values
from trainer.preflight.planner.costs import Costs, LearnerCosts
from trainer.preflight.planner.hardware import Hardware
from trainer.preflight.planner.layout import Layout
from trainer.preflight.planner.search import Search
from trainer.preflight.planner.shape import ModelShape
from trainer.preflight.planner.simulation import Schedule, simulate
from trainer.preflight.planner.workload import EpisodeShape, GroupShape, Lengths, Recorded, TurnShape
from trainer.setup.model_source import resolve_model

COLUMNS = ("run", "figure", "predicted", "measured", "error")
CURVE_MODELS, CURVE_GPUS = ("2b", "8b", "30b-a3b", "235b-a22b"), (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Compared:
    """A predicted figure beside the measured one. `error` is relative: 0.1 is 10 % too much."""

    run: str
    figure: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How far the prediction is off."""
        return self.predicted / self.measured - 1

    def row(self) -> tuple[str, ...]:
        """Return the line of a table; an error above 15 % is a miss."""
        mark = " (miss)" if abs(self.error) > 0.15 else ""
        return self.run, self.figure, f"{self.predicted:.4g}", f"{self.measured:.4g}", f"{self.error:+.0%}{mark}"


def compare_run(folder: Path, hardware: Hardware) -> list[Compared]:
    """Predict a run from its folder: its settings, and the lengths and tool seconds of its recorded episodes."""
    config = RunConfig.model_validate(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    rows = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    network = empty_network(str(resolve_model(config.model.model)))
    shape = ModelShape.of(network.config, count_values(network.parameters()))
    costs = Costs(shape, hardware, 2 if config.model.dtype == "bfloat16" else 4)
    rollout = config.rollout
    embedded = not config.starts_servers and not config.engine.engine_url
    at_once = min(rollout.max_batch, rollout.max_concurrent) if embedded else rollout.max_concurrent
    schedule = Schedule(
        rollout.problems_per_step,
        rollout.group_size,
        rollout.max_staleness,
        at_once,
        len(rows),
        config.engine.turn_wait_s,
        rollout.keep_kv_cache,
    )
    forecast = simulate(
        costs, layout_of(config, costs, embedded), schedule, Recorded.read(folder).groups(rollout.group_size, 0)
    )
    first = max(1, forecast.warm_up)  # the first step compiles, allocates and fills caches
    steps, measured = forecast.steps[first:], rows[first:]
    if not measured:
        raise UserError(str(folder), "must have several steps", f"{len(rows)}", "the first ones are not compared")

    def both(figure: str, ours: Sequence[float], theirs: Sequence[float]) -> Compared:
        return Compared(folder.name, figure, median(ours), median(theirs))

    found = [both("training, s", [s.train_s for s in steps], [row["train_s"] for row in measured])]
    found.append(both("push, s", [s.sync_s for s in steps], [row["sync_s"] for row in measured]))
    if not schedule.max_staleness:
        found.insert(0, both("rollout, s", [s.waited_s for s in steps], [row["rollout_s"] for row in measured]))
    whole = [sum(row[name] for name in ("rollout_s", "train_s", "sync_s")) for row in measured]
    lasted = [s.ended - s.began for s in steps]
    found.append(both("step, s", lasted, whole))
    idle = {"learner": sum(s.waited_s for s in steps) / sum(lasted), "servers": 1 - forecast.busy["servers"]}
    for side, ours in idle.items():  # a push is no idleness of the learner
        name = f"idle/{side}_time_frac"
        if all(name in row for row in measured):
            waited = sum(row[name] * seconds for row, seconds in zip(measured, whole, strict=True))
            found.append(Compared(folder.name, f"idle {side}", ours, waited / sum(whole)))
    counted = sum(len(group.episodes) for step in steps for group in step.groups)
    rate = counted / sum(lasted)
    found.append(Compared(folder.name, "samples/s", rate, sum(row["episodes"] for row in measured) / sum(whole)))
    return found


def layout_of(config: RunConfig, costs: Costs, embedded: bool) -> Layout:
    """Return the layout that a run had."""
    cluster, engine, learner = config.cluster, config.engine, config.learner
    ranks = max(1, cluster.num_ranks)
    reshards = learner.reshard == "always" or (learner.reshard == "auto" and ranks > 1)
    shared = embedded or engine.placement == "colocate"
    per_gpu = engine.memory_share(shared) * costs.hardware.memory_gib * GIB
    weights = costs.value_bytes * costs.shape.parameters / engine.tensor_parallel
    cache = (per_gpu - weights) * min(engine.tensor_parallel, costs.shape.kv_heads)
    return Layout(
        placement="colocate" if shared else "split",
        learner=LearnerCosts(
            ranks,
            learner.max_tokens_per_microbatch,
            learner.recompute,
            reshards,
            learner.offload == "optimizer",
            config.optim.epochs,
        ),
        num_servers=0 if embedded else len(engine.engine_url) or engine.num_servers,
        tensor_parallel=engine.tensor_parallel,
        transport="memory" if embedded else "ipc" if engine.sync in ("auto", "adapter") else engine.sync,
        cache_tokens=float("inf") if embedded else cache / (costs.value_bytes * costs.shape.cache_values),
    )


def learner_figures() -> list[Compared]:
    """Predict recorded steps of a learner without a run around it: those that gave constants are named so."""
    network, found = empty_network("2b"), []
    shape = ModelShape.of(network.config, count_values(network.parameters()))
    for name, machine, problems, learner, taken, measured, shared in LEARNER:
        costs = Costs(shape, replace(Hardware.read(machine), update_s=0.0))
        groups = geo3k_groups(problems, shared)
        tokens = sum(group.stream_tokens for group in groups)
        seconds = costs.train_s(groups, learner)
        label = f"{name}{', constants from it' if taken else ''}"
        found.append(Compared(label, "learner tokens/s", tokens / seconds, measured))
    return found


#: Run, machine, problems of 8, learner, whether a constant was taken from it, tokens a second, shared prompts. From
#: learner_2b.json, scaling_2b.json, and two of `python -m benchmarks.scaling --problems 32` on four H200s.
LEARNER = (
    ("H100, 1 rank", "h100", 8, LearnerCosts(1), True, 44_790, True),
    ("H100, 1 rank, prompts all different", "h100", 8, LearnerCosts(1), False, 31_908, False),
    ("H100, 1 rank, all recomputed", "h100", 8, LearnerCosts(1, 32768, 1.0), False, 37_259, True),
    ("H200, 1 rank, 16 problems", "h200", 16, LearnerCosts(1), True, 49_036, True),
    ("H200, 2 ranks, 16 problems", "h200", 16, LearnerCosts(2), True, 89_152, True),
    ("H200, 1 rank, 32 problems", "h200", 32, LearnerCosts(1), False, 48_038, True),
    ("H200, 2 ranks, 32 problems", "h200", 32, LearnerCosts(2), False, 92_572, True),
    ("H200, 4 ranks, 32 problems", "h200", 32, LearnerCosts(4), False, 171_932, True),
    ("H200, 4 ranks, 32 problems, reshard always", "h200", 32, LearnerCosts(4, reshards=True), False, 150_700, True),
)


def geo3k_groups(problems: int, shared: bool) -> list[GroupShape]:
    """Return the groups of the learner's benchmarks: of a response a twentieth is tool output, between two turns. Not
    `shared`: each sample is a group of its own.
    """
    sizes = replace(GEO3K, problems=problems)
    images = sizes.grid[1] * sizes.grid[2] // 4
    made = []
    for length in response_lengths(sizes, np.random.default_rng(0)).tolist():
        answer = round(0.05 * length)
        turns = (TurnShape((length - answer) // 2, answer), TurnShape((length - answer + 1) // 2))
        made.append(EpisodeShape(sizes.text + images, turns))
    size = 8 if shared else 1
    return [GroupShape(tuple(made[first : first + size]), images) for first in range(0, len(made), size)]


def rollout_figures() -> list[Compared]:
    """Predict the recorded rollouts of one server of an H100: one step of 512 episodes.

    The picture path of then took 1 / 78.7 s a request (110 picture tokens) and 1 / 113.8 s (20), as "before" in
    `pictures_starter.json`.
    """
    found = []
    for model, images, request_s in (("2b", 110, 1 / 78.7), ("starter", 20, 1 / 113.8)):
        result = json.loads((RESULTS / f"sglang_{model}.json").read_text(encoding="utf-8"))
        network = empty_network(str(resolve_model(model)))
        shape = ModelShape.of(network.config, count_values(network.parameters()))
        hardware = replace(Hardware.read("h100"), request_s=request_s, picture_token_s=0.0, picture_s=0.0)
        costs = Costs(shape, hardware)
        for row in result["parity"]["rows"]:
            turns = row["turns"] / row["episodes"]
            drawn = Lengths(60, images, turns, round(row["model_tokens"] / row["turns"]), 30, 0.01)
            layout = Layout("colocate", LearnerCosts(), 1, 1, row["then_pushed_by"], 1e6)
            name = f"sglang_{model}, {row['env']}, weights {row['weights']}"
            forecast = simulate(costs, layout, Schedule(row["episodes"] // 8, steps=1), drawn.groups(8, 0))
            found.append(Compared(name, "rollout, s", forecast.steps[0].waited_s, row["seconds"]))
    return found


def curves(hardware: Hardware, models: Sequence[str], sizes: Sequence[int], staleness: int) -> list[dict[str, Any]]:
    """Return the fastest layout of each model on each number of GPUs: a problem of 8 episodes for every two GPUs, and
    at least 32.
    """
    rows = []
    for model in models:
        memory = Search.of(model, hardware, Lengths(), Schedule()).memory
        costs = Costs(memory.shape, hardware)
        for number in sizes:
            problems = max(32, number // 2)
            schedule = Schedule(problems, 8, staleness, 8 * problems * (staleness + 1), 2 + 2 * staleness)
            planned = Search(memory, costs, Lengths(), schedule).fastest(number)
            row: dict[str, Any] = {"model": model, "gpus": number, "layout": "does not fit"}
            if planned:
                layout, forecast = planned.layout, planned.forecast
                row |= {
                    "layout": layout.describe(),
                    "samples_per_s": round(forecast.samples_per_s, 2),
                    "tokens_per_s": round(forecast.tokens_per_s),
                    "step_s": round(forecast.step_s, 1),
                    "idle_learner": round(1 - forecast.busy["learner"], 2),
                    "idle_servers": round(1 - forecast.busy["servers"], 2),
                    "limit": forecast.limit,
                }
            rows.append(row)
            print(row, flush=True)
    return rows


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw samples a second over GPUs, a line for each model."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for model in dict.fromkeys(row["model"] for row in rows):
        points = [(row["gpus"], row["samples_per_s"]) for row in rows if row["model"] == model and "limit" in row]
        axes.plot(*zip(*points, strict=True), marker="o", label=model)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="samples/s, computed")
    axes.set_xscale("log", base=2)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse, predict, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--compare", nargs="*", type=Path, default=(), help="run folders with recorded episodes")
    parser.add_argument("--hardware", default="h200", help="bundled machine, or a file of trainer.plan --calibrate")
    parser.add_argument("--learner", action="store_true", help="the recorded figures of benchmarks/results/")
    parser.add_argument("--curves", action="store_true", help="8 to 1,024 GPUs")
    parser.add_argument("--models", nargs="+", default=CURVE_MODELS)
    parser.add_argument("--gpus", nargs="+", type=int, default=CURVE_GPUS)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="file for a picture of the curves")
    parser.add_argument("--write", action="store_true", help="update benchmarks/results/planner.json")
    args = parser.parse_args()
    at, hardware = commit(), Hardware.read(args.hardware)
    figures: dict[str, Any] = {}
    compared = [each for folder in args.compare for each in compare_run(folder, hardware)]
    if args.learner:
        compared += learner_figures() + rollout_figures()
    if compared:
        print(markdown(COLUMNS, [each.row() for each in compared]))
        figures["compared"] = [dict(zip(COLUMNS, each.row(), strict=True)) for each in compared]
    if args.curves:
        figures["curves"] = curves(hardware, args.models, args.gpus, args.staleness)
        print(markdown(tuple(figures["curves"][0]), [tuple(row.values()) for row in figures["curves"]]))
        if args.picture:
            draw(figures["curves"], args.picture)
    if args.write:
        path = RESULTS / "planner.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        kept = {name: before[name] for name in ("compared", "curves", "compared_before") if name in before}
        command = f"python -m benchmarks.planner {shlex.join(sys.argv[1:])}"
        write_result(path, command, {"machine": hardware.name, **kept, **figures}, at, ("torch", "simpy"))


if __name__ == "__main__":
    main()
