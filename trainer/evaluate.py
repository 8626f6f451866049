"""Evaluate a policy: `python -m trainer.evaluate --env geo3k --model starter --samples 4 --eval-temperature 1`.

In: an environment, problems, a model. Out: figures with intervals on the console and in `evaluation.json`, one line a
problem in `results.jsonl`, and every episode, recorded.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from envs.cli import exit_code, parse
from envs.layers import Layers
from trainer.config import EnvConfig, ModelConfig, PromptsConfig, RunConfig, Section, ServersConfig

#: What the command reads besides flags; variables of a training run's settings do not stop it.
LAYERS = Layers(ready=Path(__file__).parent / "configs" / "evaluate", shared=RunConfig)


class ProblemsConfig(PromptsConfig):
    """Which problems."""

    split: str = Field(default="", description="split; empty: train of --data, heldout of the environment's own")
    size: int | None = Field(
        default=None, ge=1, description="how many problems; empty: all of --data, 256 of the environment's own"
    )
    problem_seed: int = Field(
        default=0, ge=0, description="draw of the environment's own problems; 0: those that training is measured on"
    )


class EvaluatedModelConfig(ModelConfig):
    """Which model, and where."""

    model: str = Field(
        default="starter",
        description="model folder, run folder or hub id; 'starter': the small model in the package",
    )
    device: str = Field(default="cpu", description="torch device of the embedded engine")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="what the network computes in")


class WritersConfig(ServersConfig):
    """What writes the model's turns."""

    engine: Literal["auto", "hf", "sglang"] = Field(
        default="auto", description="hf: embedded, in this process; sglang: servers; auto: sglang with --engine-url"
    )
    first_gpu: int | None = Field(default=None, ge=0, description="first GPU of the started servers; empty: GPU 0")


class FiguresConfig(Section):
    """How problems are played, and what is made of it."""

    samples: int = Field(default=1, ge=1, description="episodes of each problem")
    eval_temperature: float = Field(
        default=0.0, ge=0, validate_default=True, description="sampling temperature; 0 takes the likeliest token"
    )
    tools: Literal["both", "on", "off"] = Field(
        default="both",
        description="on: over all turns, with tools; off: one turn without them; both: one after the other",
    )
    seed: int = Field(default=0, ge=0, description="seed of sampling, and of the resamples of intervals")
    ks: tuple[int, ...] = Field(
        default=(), description="k of pass@k, at most --samples; empty: 1, 2, 4, 8 and so on, and --samples"
    )
    tag: tuple[str, ...] = Field(default=("family", "level"), description="metadata key to show accuracy by")
    confidence: float = Field(default=0.95, gt=0, lt=1, description="how often an interval is to hold the truth")
    bootstrap: int = Field(default=10_000, ge=100, description="resamples behind an interval, where one needs them")
    max_batch: int = Field(default=64, ge=1, description="episodes that the embedded engine runs at once")
    max_concurrent: int = Field(
        default=1024, ge=1, description="episodes in progress and problems in memory at once; others wait their turn"
    )
    out: Path = Field(default=Path("runs"), description="folder for the folder of results")
    name: str = Field(default="", description="name of the folder of results; empty: environment and time")
    record: float = Field(default=1.0, ge=0, le=1, description="share of the problems whose episodes are recorded")

    @field_validator("eval_temperature")
    @classmethod
    def _makes_samples_differ(cls, value: float, info: ValidationInfo) -> float:
        samples = info.data.get("samples", 1)
        if samples > 1 and value == 0:
            raise ValueError(f"must be above 0 with --samples {samples}, which would all be the same")
        return value

    @field_validator("ks")
    @classmethod
    def _has_enough_samples(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        samples = info.data.get("samples", 1)
        if wrong := [k for k in value if not 1 <= k <= samples]:
            raise ValueError(f"must be from 1 to --samples {samples}, which {wrong[0]} is not")
        return tuple(sorted(set(value)))

    @property
    def all_ks(self) -> tuple[int, ...]:
        """The k of pass@k.

        >>> FiguresConfig(samples=6, eval_temperature=1).all_ks
        (1, 2, 4, 6)
        """
        return self.ks or tuple(sorted({self.samples, *(2**n for n in range(self.samples.bit_length()))}))


class EvaluateConfig(Section):
    """An evaluation."""

    env: EnvConfig = EnvConfig()
    data: ProblemsConfig = ProblemsConfig()
    model: EvaluatedModelConfig = EvaluatedModelConfig()
    engine: WritersConfig = WritersConfig()
    figures: FiguresConfig = FiguresConfig()


def run(argv: Sequence[str] | None) -> int:
    """Parse, check, play, report."""
    description = "Measure how good a policy is in an environment."
    config = parse(EvaluateConfig, argv, "python -m trainer.evaluate", description, LAYERS)
    # Imported late, so that --help and a mistyped flag answer at once.
    from rich.console import Console

    from agents.engines.sglang.servers import EngineDown
    from agents.heap import settle_heap
    from trainer.display import Display
    from trainer.evaluator import Evaluator, prepare
    from trainer.report import print_report
    from trainer.run import quiet_libraries

    quiet_libraries()
    console = Console(highlight=False)
    console.print("loading model and problems ...")
    parts = prepare(config)
    if parts.num_overlong:
        console.print(
            f"left out {parts.num_overlong} of {parts.num_overlong + len(parts.samples)} problems whose prompt is over "
            f"{config.data.max_prompt_tokens} tokens"
        )
    settle_heap()
    code = 0
    with Display(console) as display:
        evaluator = Evaluator(parts, display)
        try:
            asyncio.run(evaluator.run())
        except EngineDown as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
    print_report(console, evaluator.report)
    console.print(f"{evaluator.report.seconds:.0f} s; everything is in {parts.folder}", soft_wrap=True)
    return 130 if evaluator.report.is_interrupted else code


def main() -> int:
    """Run the command line."""
    return exit_code(lambda: run(None))


if __name__ == "__main__":
    sys.exit(main())
