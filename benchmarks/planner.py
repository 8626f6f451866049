"""The planner's forecasts beside what was measured: `python -m benchmarks.planner`; `--write` updates
`benchmarks/results/planner.json`.

Whole runs are those of `asynchrony_2b.json`, learner steps those of `learner_2b.json` and `scaling_2b.json`, memory
that of `learner_2b.json` and `scaling_backends.json`. Recordings are not kept, so a run is described by its means.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.report import RESULTS, commit, markdown, write_result
from trainer.config.learner import LearnerConfig
from trainer.planning.hardware import Hardware
from trainer.planning.memory import GIB, MetaNetworks, Plan, empty_network, estimate
from trainer.planning.shape import ModelShape
from trainer.planning.speed import PlannedLayout, Speed
from trainer.planning.workload import Schedule, Workload

COLUMNS = ("run", "figure", "predicted", "measured", "error")
#: Turns of 240 words: 1.7 a run, of which 68 % end at 512 tokens, so the longest of 128 episodes has about 512.
LONG = Workload(
    prompt_tokens=250, image_tokens=110, turns=1.7, turn_tokens=206, observation_tokens=30, tool_s=0.0, spread=0.16
)
#: Variant of `asynchrony_2b.json` with long episodes, machine, staleness, whether the cache is kept and GPUs are
#: shared, seconds of a new image (0.013 while images were encoded by CUDA graphs), learners, as many as servers.
RUNS = (
    ("h100-split-0", "h100", 0, False, False, 0.035, 1),
    ("h100-split-1", "h100", 1, False, False, 0.035, 1),
    ("h100-one-gpu", "h100", 0, False, True, 0.035, 1),
    ("h200-split-0", "h200", 0, False, False, 0.035, 1),
    ("h200-split-2", "h200", 2, False, False, 0.035, 1),
    ("h200-split-2-keep", "h200", 2, True, False, 0.035, 1),
    ("h200-split-4", "h200", 4, False, False, 0.035, 1),
    ("h200-split-4-keep", "h200", 4, True, False, 0.035, 1),
    ("graphs-split-0", "h100", 0, False, False, 0.013, 1),
    ("graphs-split-2-keep", "h100", 2, True, False, 0.013, 1),
    ("split22-0", "h100", 0, False, False, 0.035, 2),
    ("split22-2-keep", "h100", 2, True, False, 0.035, 2),
)
#: Of the learner's benchmarks: prompts of 260 tokens, 110 of an image, responses of 644 with 5 % tool output.
GEO3K = Workload(prompt_tokens=150, image_tokens=110, turns=2, turn_tokens=306, observation_tokens=32)
#: Run, machine, problems of 8, learner, tokens a second.
LEARNER = (
    ("H100, 1 rank, constants from it", "h100", 8, Plan(1, 16384, reshard="never"), 44_790),
    ("H100, 1 rank, all recomputed", "h100", 8, Plan(1, 32768, recompute=1.0), 37_259),
    ("H200, 1 rank, 16 problems, constants from it", "h200", 16, Plan(1, 16384, reshard="never"), 49_036),
    ("H200, 2 ranks, 16 problems, constants from it", "h200", 16, Plan(2, 16384, reshard="never"), 89_152),
    ("H200, 1 rank, 32 problems", "h200", 32, Plan(1, 16384, reshard="never"), 48_038),
    ("H200, 2 ranks, 32 problems", "h200", 32, Plan(2, 16384, reshard="never"), 92_572),
    ("H200, 4 ranks, 32 problems", "h200", 32, Plan(4, 16384, reshard="never"), 171_932),
    ("H200, 4 ranks, 32 problems, reshard always", "h200", 32, Plan(4, 16384, reshard="always"), 150_700),
)
#: Run, model, rank of adapters, plan, peak in GiB. The 2B steps have 18 samples with an image in a micro-batch.
MEMORY = (
    ("2b, 1 rank, compiled, constant from it", "2b", 0, Plan(1, 16384, 7920, is_compiled=True), 55.96),
    ("2b, 2 ranks, compiled, constant from it", "2b", 0, Plan(2, 16384, 7920, is_compiled=True), 44.97),
    ("2b, 1 rank, compiled, earlier", "2b", 0, Plan(1, 16384, 7920, is_compiled=True), 71.43),
    ("2b, 32,768 tokens, all recomputed", "2b", 0, Plan(1, 32768, 3520, 1.0, is_compiled=True), 42.87),
    ("8b, LoRA, all recomputed", "8b", 32, Plan(1, 8192, 8192, 1.0, "always", frozen_bytes=2), 29.69),
)


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


def whole_runs(shape: ModelShape) -> Iterator[Compared]:
    """Predict the recorded runs, which have 16 problems of 8 episodes a step for each learner."""
    measured = json.loads((RESULTS / "asynchrony_2b.json").read_text(encoding="utf-8"))["by_variant"]
    for name, machine, staleness, keeps, shares, image_s, learners in RUNS:
        found = measured[name]
        tokens = found["tokens_per_s"] / found["samples_per_s"]  # of an episode
        workload = LONG.model_copy(update={"turn_tokens": tokens / LONG.turns})
        hardware = Hardware.read(machine).model_copy(update={"image_s": image_s})
        schedule = Schedule(problems_per_step=16 * learners, max_staleness=staleness, keep_kv_cache=keeps)
        placement = "colocate" if shares else "split"
        layout = PlannedLayout(placement, Plan(learners, tokens=16384), learners, 1, cache_tokens=1e6)
        forecast = Speed(shape, hardware, workload, schedule).forecast(layout)
        yield Compared(f"2B, {name}", "training, s", forecast.train_s, found["train_s"])
        yield Compared(f"2B, {name}", "samples/s", forecast.samples_per_s, found["samples_per_s"])


def learner_steps(shape: ModelShape) -> Iterator[Compared]:
    """Predict recorded steps of a learner without a run around it."""
    for name, machine, problems, learner, measured in LEARNER:
        hardware = Hardware.read(machine).model_copy(update={"update_s": 0.0})
        seconds = Speed(shape, hardware, GEO3K, Schedule(problems_per_step=problems)).train_s(learner)
        yield Compared(name, "learner tokens/s", problems * 8 * GEO3K.stream / seconds, measured)


def peaks() -> Iterator[Compared]:
    """Predict the memory of recorded steps."""
    for name, model, rank, plan, measured in MEMORY:
        network = MetaNetworks(empty_network(model)).trained(LearnerConfig(lora_rank=rank))
        yield Compared(name, "peak, GiB", estimate(network, plan).total / GIB, measured)


def main() -> None:
    """Parse, predict, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="update benchmarks/results/planner.json")
    args = parser.parse_args()
    shape = ModelShape.of(empty_network("2b"))
    rows = [each.row() for each in (*whole_runs(shape), *learner_steps(shape), *peaks())]
    print(markdown(COLUMNS, rows))
    if args.write:
        compared = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        command = "python -m benchmarks.planner --write"
        write_result(RESULTS / "planner.json", command, {"compared": compared}, commit(), ("torch",))


if __name__ == "__main__":
    main()
