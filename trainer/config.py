"""Everything a run can be told, one tree of frozen models: every field is a flag, its description the help.

The defaults are the reference run: `geo3k` with the bundled starter model and bundled problems, on a CPU, in minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envs.errors import UserError
from envs.grading import GraderName
from envs.problems import RowsConfig
from envs.registry import get_spec
from envs.spec import EnvSpec


class Section(BaseModel):
    """Base of every section: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EnvConfig(Section):
    """Which environment, and the limits of an episode. A setting that is left empty is the registry entry's."""

    env: str = Field(default="geo3k", description="environment id in the registry")
    registry: tuple[Path, ...] = Field(default=(), description="more registry files; later ones win")
    max_new_tokens: int = Field(
        default=256, ge=1, description="token budget of an episode after its prompt, tool output included"
    )
    max_turns: int | None = Field(default=None, ge=1, description="model turns an episode may take")
    reset_timeout_s: float | None = Field(default=None, gt=0, description="seconds to build and reset an environment")
    step_timeout_s: float | None = Field(default=None, gt=0, description="seconds for one step, and for the reward")
    isolation: Literal["inline", "thread", "process"] | None = Field(default=None, description="where environments run")
    tool_format: Literal["auto", "hermes", "qwen_xml"] | None = Field(
        default=None, description="how the model writes a tool call; auto: as its chat template teaches"
    )
    grader: GraderName | None = Field(default=None, description="how an answer is held against the label")
    reward_max_val: float | None = Field(default=None, description="reward of a right answer")
    reward_min_val: float | None = Field(default=None, description="reward of a wrong answer")

    def resolve(self) -> EnvSpec:
        """Return the registry entry with the settings given here in place of its own.

        Raises:
            UserError: there is no such entry, or a registry file is wrong.
        """
        spec = get_spec(self.env, *self.registry)
        shared = EnvSpec.model_fields.keys() & EnvConfig.model_fields.keys()
        given = {name: value for name in shared if (value := getattr(self, name)) is not None}
        try:
            return EnvSpec.model_validate({**spec.model_dump(), "origin": spec.origin, **given})
        except ValidationError as error:
            rule = error.errors()[0]["msg"]
            raise UserError(f"environment '{spec.id}'", rule, given, "change the flag or the entry") from error


class DataConfig(RowsConfig):
    """Which problems."""

    eval_data: str = Field(
        default="", description="held-out problems, as --data; empty: the environment's own, when --data is empty"
    )
    system_prompt: str = Field(default="", description="system prompt; empty: the environment's")
    allow_outside_images: bool = Field(default=False, description="allow image paths outside the data file's folder")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="longer prompts are left out and counted, never cut")
    train_size: int = Field(
        default=1024, ge=1, description="how many of the environment's own training problems to use"
    )
    eval_size: int = Field(
        default=256, ge=0, description="held-out problems before and after training; 0: no evaluation"
    )


class ModelConfig(Section):
    """Which model, and where."""

    model: str = Field(
        default="starter", description="model folder or hub id; 'starter': the small model in the package"
    )
    device: str = Field(default="cpu", description="torch device of engine and learner")
    context_length: int = Field(default=4096, ge=2, description="longest stream in tokens, prompt included")


class RolloutConfig(Section):
    """How episodes are sampled."""

    problems_per_step: int = Field(default=8, ge=1, description="problems per training step")
    group_size: int = Field(default=8, ge=2, description="episodes per problem (G of GRPO)")
    resample: int = Field(
        default=1, ge=0, description="how often a group with fewer than two valid episodes is played again"
    )
    temperature: float = Field(
        default=1.0, gt=0, description="sampling temperature, applied alike in engine and trainer"
    )
    eval_temperature: float = Field(
        default=0.0, ge=0, description="temperature of evaluation; 0 takes the likeliest token"
    )
    max_batch: int = Field(default=64, ge=1, description="episodes that the embedded engine runs at once")


class OptimConfig(Section):
    """The optimizer and the loss."""

    lr: float = Field(default=5e-5, gt=0, description="learning rate")
    schedule: Literal["constant", "cosine"] = Field(default="constant", description="learning rate after the warm-up")
    warmup_steps: int = Field(default=2, ge=0, description="steps of linear warm-up")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's first moment decay")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's second moment decay")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to this norm")
    clip_low: float = Field(default=0.2, ge=0, lt=1, description="lower clip of the ratio: 1 - clip_low")
    clip_high: float = Field(default=0.28, ge=0, description="upper clip of the ratio: 1 + clip_high")
    scale_by_std: bool = Field(default=True, description="divide advantages by the group's standard deviation")
    max_tokens_per_microbatch: int = Field(default=4096, ge=1, description="padded tokens per forward and backward")


class LogConfig(Section):
    """What is kept of a run."""

    out: Path = Field(default=Path("runs"), description="folder for run folders")
    name: str = Field(default="", description="name of the run folder; empty: environment, time and seed")
    tensorboard: bool = Field(default=True, description="write TensorBoard files")
    record: bool = Field(default=True, description="record every training episode with its images")


class RunConfig(Section):
    """A training run."""

    steps: int = Field(default=50, ge=0, description="training steps")
    seed: int = Field(default=0, ge=0, description="seed of problems, sampling and order")
    env: EnvConfig = EnvConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    optim: OptimConfig = OptimConfig()
    log: LogConfig = LogConfig()
