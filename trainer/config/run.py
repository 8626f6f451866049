"""All settings of a training run, as one tree of frozen models. Each field is a flag, and its description is the help.

The defaults are the reference run: `geo3k` with the bundled starter model and bundled problems, on a CPU, in minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from envs.config.plugins import Plugin
from envs.config.settings import NO_FLAG, Section
from envs.errors import UserError
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.inputs import DataConfig, EnvConfig, ModelConfig, Tools, check_device
from trainer.config.learner import ClusterConfig, LearnerConfig, OptimConfig
from trainer.config.rollout import EngineConfig, RolloutConfig

TrackerName = Literal["tensorboard", "wandb"]
TRACKER = Plugin("a tracker", ("run",))
CALLBACK = Plugin("a callback", ())


# Both stages apart make a step repeatable: play once, train many times on the same episodes.
class StagesConfig(Section):
    """Stages of a step to run: rollout, update, or both."""

    rollout_only: bool = Field(
        default=False,
        description="play and record the episodes of every step with fixed weights, without training, evaluation and "
        "checkpoints",
    )
    replay_rollouts: Path | None = Field(
        default=None,
        description="run folder whose recorded episodes to train on, step by step, without playing; its settings of "
        "learner and algorithm are the defaults",
    )

    @field_validator("replay_rollouts")
    @classmethod
    def _leaves_a_stage(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        # Each switches off one of the two stages.
        if value and info.data.get("rollout_only"):
            raise ValueError("cannot be given together with --rollout-only: nothing would be left to do")
        return value


class EvaluationConfig(Section):
    """Evaluations between the steps, and the end of a run by them."""

    eval_every: int = Field(
        default=0,
        ge=0,
        description="steps between evaluations on the held-out problems; 0: only before and after training",
    )
    tools: Tools = "both"
    best_by: Literal["success", "reward"] | None = Field(
        json_schema_extra=NO_FLAG,
        default=None,
        description="what best/ and --patience go by: success, the held-out accuracy, or reward, the held-out mean "
        "reward; empty: success where the environment says what that is, else reward",
    )
    stop_at_accuracy: float | None = Field(
        default=None, gt=0, le=1, description="end the run once the held-out accuracy is at least this; empty: never"
    )
    patience: int = Field(
        default=0,
        ge=0,
        description="end the run after this many evaluations without a new best, see best_by; 0: never",
    )

    @field_validator("best_by", "stop_at_accuracy", "patience")
    @classmethod
    def _is_measured(cls, value: float | str | None, info: ValidationInfo) -> float | str | None:
        # The figures that these settings read are measured by evaluations alone.
        if value and not info.data.get("eval_every"):
            raise ValueError("needs --eval-every: without it nothing is measured while the run trains")
        return value


class CheckpointConfig(Section):
    """Checkpoints, and the run to resume."""

    save_every: int = Field(default=10, ge=0, description="steps between checkpoints; 0: no checkpoints")
    keep_checkpoints: int = Field(
        json_schema_extra=NO_FLAG, default=2, ge=1, description="number of checkpoints to keep, the newest ones"
    )
    resume: Path | None = Field(
        default=None, description="run folder to resume from its newest complete checkpoint, with its settings"
    )


class RunDirConfig(Section):
    """Run folder and trackers."""

    out: Path = Field(default=Path("runs"), description="folder of the run folders")
    name: str = Field(default="", description="name of the run folder; empty: environment, time and seed")
    # metrics.jsonl is always written: it is what resumes, comparisons and the viewer read.
    tracker: tuple[TrackerName | Annotated[str, TRACKER], ...] = Field(
        default=("tensorboard",),
        description="where to send the metrics of each step besides metrics.jsonl; empty: nowhere",
    )
    callback: tuple[Annotated[str, CALLBACK], ...] = Field(
        default=(),
        description="trainer.callbacks.Callback of your own, whose methods are called as the run goes on: "
        "module:NAME or file.py:NAME",
    )
    project: str = Field(
        json_schema_extra=NO_FLAG,
        default="trueturn",
        min_length=1,
        description="project of the run at wandb",
    )


class LogConfig(RunDirConfig):
    """Run folder, trackers and recording."""

    # Hundreds of bytes a token, where all else takes seven.
    record_routes: bool = Field(
        json_schema_extra=NO_FLAG,
        default=False,
        description="record which experts of a mixture each token took; with --routing replay",
    )
    # Whole groups, because a part of one shows no advantage.
    record: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the problems whose episodes are recorded; a group is recorded as a whole",
    )


#: What `trainer.run --help` shows; `--help-all` shows every setting.
FIRST_SETTINGS = (
    *("steps", "seed", "env", "registry", "data", "prompt_key", "answer_key", "image_keys", "reward", "success"),
    *("max_turns", "max_new_tokens", "model", "device", "dtype", "engine", "num_gpus", "num_servers"),
    *("problems_per_step", "group_size", "temperature", "max_staleness", "lr", "lora_rank", "eval_every"),
    *("save_every", "resume", "out", "name", "tracker"),
)


class RunConfig(Section):
    """A training run."""

    steps: int = Field(default=50, ge=0, description="training steps")
    seed: int = Field(default=0, ge=0, description="seed of problems, sampling and order")
    # The quick checks take a second or two; a wrong template costs a night.
    doctor: Literal["stop", "warn", "off"] = Field(
        default="stop",
        description="quick checks before step 0: stop the run at a fault, only warn, or off; python -m trainer.doctor "
        "with the same flags makes all checks",
    )
    env: EnvConfig = EnvConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    rollout: RolloutConfig = RolloutConfig()
    stages: StagesConfig = StagesConfig()
    optim: OptimConfig = OptimConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def plays(self) -> bool:
        """Whether episodes are played. This needs an engine and environments."""
        return self.stages.replay_rollouts is None

    @property
    def engine_choice(self) -> tuple[str, str]:
        """The engine that plays, "hf", "sglang" or a user's, and why."""
        return self.engine.choice(self.model.device, self.cluster.num_gpus)

    @property
    def uses_servers(self) -> bool:
        """Whether SGLang generates the turns."""
        return self.plays and self.engine_choice[0] == "sglang"

    @property
    def starts_servers(self) -> bool:
        """Whether SGLang servers are started."""
        return self.engine_choice[0] == "sglang" and not self.engine.engine_url

    @property
    def trains(self) -> bool:
        """Whether weights are trained."""
        return not self.stages.rollout_only

    @property
    def reads_routes(self) -> bool:
        """Whether the learner or the recording takes the experts that a mixture's tokens took in the engine."""
        return self.rollout.routing == "replay" and (self.trains or self.log.record_routes)

    def check(self) -> None:
        """Raise `UserError` where sections do not fit together, or to this host."""
        # A group is never split: its advantages need all of its episodes.
        num_groups = self.rollout.problems_per_step
        if self.trains and self.optim.minibatches > num_groups:
            rule = f"must be at most the {num_groups} groups of a step, one for each of its problems"
            fix = "give less, or more --problems-per-step"
            raise UserError("--minibatches", rule, self.optim.minibatches, fix)
        # Its output layer is split over ranks, and does not take the ids that a token was drawn from.
        if self.rollout.top_k and self.cluster.backend == "megatron":
            fix = "leave --top-k, --top-p and min_p out, or --backend"
            raise UserError("--top-k", "must be 0 with --backend megatron", self.rollout.top_k, fix)
        if self.log.record_routes and self.rollout.routing != "replay":
            fix = "leave one of the two out"
            raise UserError("record_routes", "needs --routing replay", f"--routing {self.rollout.routing}", fix)
        if self.plays and self.rollout.keep_kv_cache:
            self._check_kv_cache()
        if self.plays:
            self.model.check_room(self.data.max_prompt_tokens)
            # The embedded engine then runs on a GPU of this process, beside the ranks.
            if self.engine_choice[0] != "sglang" and self.cluster.num_gpus:
                check_device("cuda")

    def _check_kv_cache(self) -> None:
        chosen = self.engine_choice[0]
        # An engine of the user's own has no way to say that it keeps a cache.
        if chosen not in ("hf", "sglang"):
            raise UserError("--keep-kv-cache", "is for --engine sglang or hf", chosen, "leave one of the two out")
        # Servers that free their memory lose the cache with it.
        if self.engine.placement == "colocate":
            rule = "needs servers that keep their memory while the learner trains"
            fix = "leave it out, or give --placement split"
            raise UserError("--keep-kv-cache", rule, "--placement colocate", fix)
