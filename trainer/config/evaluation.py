"""All settings of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from agents.endpoints.settings import EndpointConfig
from agents.engines.own import ENGINE, EngineName
from envs.config.settings import Section
from envs.config.sources import Sources
from trainer.config.inputs import NUM_HELD_OUT, EnvConfig, ModelConfig, PromptsConfig, Tools
from trainer.config.other_trainers import no_counterpart, other_names
from trainer.config.rollout import API_KEY_VARIABLE, ServersConfig
from trainer.config.run import RunConfig
from trainer.config.sources import RECIPES

#: What the command reads besides flags. It ignores the variables of a training run's settings.
SOURCES = Sources(
    ready=RECIPES / "evaluate",
    shared=RunConfig,
    other_names=other_names,
    no_counterpart=no_counterpart,
    secrets=(API_KEY_VARIABLE,),
)


class EvaluatedProblemsConfig(PromptsConfig):
    """Problems to evaluate on."""

    split: str = Field(default="", description="split; empty: train of --data, heldout of the environment's own")
    size: int | None = Field(
        default=None,
        ge=1,
        description=f"number of problems; empty: all of --data, or {NUM_HELD_OUT} of the environment's own",
    )
    # Seed 0 is that of the held-out problems of training, so that figures can be compared.
    problem_seed: int = Field(
        default=0, ge=0, description="seed of the environment's own problems; 0: the held-out problems of training"
    )


class EvaluatedModelConfig(ModelConfig):
    """Model, device and number format."""

    model: str = Field(
        default="starter",
        description="model folder, run folder or hub id; 'starter': the small model in the package",
    )
    device: str = Field(default="cpu", description="torch device of the embedded engine")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of computation")


class EvaluatedEngineConfig(ServersConfig):
    """Inference engine."""

    engine: EngineName | Annotated[str, ENGINE] = Field(
        default="auto",
        description="hf: embedded, in this process; sglang: servers; auto: sglang with --engine-url, and "
        "with --device cuda where it is installed",
    )
    first_gpu: int | None = Field(default=None, ge=0, description="first GPU of the started servers; empty: GPU 0")


class MeasurementConfig(Section):
    """Sampling, intervals and results."""

    samples: int = Field(default=1, ge=1, description="episodes per problem")
    eval_temperature: float = Field(
        default=0.0, ge=0, validate_default=True, description="sampling temperature; 0: always the most likely token"
    )
    tools: Tools = "both"
    seed: int = Field(default=0, ge=0, description="seed of sampling, and of the bootstrap")
    # pass@k has an unbiased estimate only for k up to the number of samples.
    ks: tuple[int, ...] = Field(
        default=(), description="k of pass@k, at most --samples; empty: 1, 2, 4, 8 and so on, and --samples"
    )
    tag: tuple[str, ...] = Field(default=("family", "level"), description="metadata key by which to group the accuracy")
    confidence: float = Field(default=0.95, gt=0, lt=1, description="confidence level of the intervals")
    # Shares have intervals in closed form; means and differences need resamples.
    bootstrap: int = Field(default=10_000, ge=100, description="resamples of an interval that needs the bootstrap")
    max_batch: int = Field(default=64, ge=1, description="episodes that the embedded engine runs at once")
    max_concurrent: int = Field(
        default=1024, ge=1, description="episodes in progress and problems in memory at once; others wait their turn"
    )
    out: Path = Field(default=Path("runs"), description="folder of the result folders")
    name: str = Field(default="", description="name of the result folder; empty: environment and time")
    record: float = Field(default=1.0, ge=0, le=1, description="share of the problems whose episodes are recorded")

    @field_validator("eval_temperature")
    @classmethod
    def _makes_samples_differ(cls, value: float, info: ValidationInfo) -> float:
        samples = info.data.get("samples", 1)
        # Greedy samples are copies, so their interval would be too narrow by far.
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

        >>> MeasurementConfig(samples=6, eval_temperature=1).all_ks
        (1, 2, 4, 6)
        """
        # Doubling shows the curve; the last is pass@n of all samples.
        return self.ks or tuple(sorted({self.samples, *(2**n for n in range(self.samples.bit_length()))}))


class EvaluateConfig(Section):
    """An evaluation."""

    env: EnvConfig = EnvConfig()
    data: EvaluatedProblemsConfig = EvaluatedProblemsConfig()
    model: EvaluatedModelConfig = EvaluatedModelConfig()
    engine: EvaluatedEngineConfig = EvaluatedEngineConfig()
    measurement: MeasurementConfig = MeasurementConfig()
    endpoints: EndpointConfig = EndpointConfig()
