"""Everything a run can be told, one tree of frozen models: every field is a flag, its description the help.

The defaults are the reference run: `geo3k` with the bundled starter model and bundled problems, on a CPU, in minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from envs.errors import UserError
from envs.grading import GraderName
from envs.problems import RowsConfig
from envs.registry import get_spec
from envs.spec import EnvSpec

AdvantageName = Literal["grpo", "rloo", "reinforce++"]
PolicyLossName = Literal["ppo", "gspo", "likelihood"]
AggregationName = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
KLEstimatorName = Literal["k1", "k2", "k3"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
CorrectionName = Literal["none", "tis", "icepop", "mis"]


class Section(BaseModel):
    """Base of every section: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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


class PromptsConfig(RowsConfig):
    """What prompts are made of, and how long they may be."""

    system_prompt: str = Field(default="", description="system prompt; empty: the environment's")
    allow_outside_images: bool = Field(default=False, description="allow image paths outside the data file's folder")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="longer prompts are left out and counted, never cut")


class DataConfig(PromptsConfig):
    """Which problems."""

    eval_data: str = Field(
        default="", description="held-out problems, as --data; empty: the environment's own, when --data is empty"
    )
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
    device: str = Field(default="cpu", description="torch device of the learner and the embedded engine")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="what the networks compute in; the learner keeps its weights in float32"
    )
    context_length: int = Field(default=4096, ge=2, description="longest stream in tokens, prompt included")
    template_options: str = Field(
        default="", description='what the chat template is told, a JSON object such as {"enable_thinking": false}'
    )


class ServersConfig(Section):
    """What writes the model's turns: this process, or servers."""

    engine: Literal["auto", "hf", "sglang"] = Field(
        default="auto",
        description="hf: embedded, in this process; sglang: servers; auto: sglang with --engine-url or --num-gpus",
    )
    engine_url: tuple[str, ...] = Field(
        default=(), description="SGLang servers to use, such as http://gpu1:30000; empty: some are started here"
    )
    num_servers: int = Field(default=1, ge=1, description="SGLang servers to start")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs of one started server")
    first_gpu: int | None = Field(
        default=None,
        ge=0,
        description="first GPU of the started servers; empty: the one after the learners', GPU 0 if there is none",
    )
    mem_fraction: float = Field(default=0.4, gt=0, lt=1, description="share of a GPU's memory for a started server")
    engine_args: str = Field(
        default="", description='more arguments of sglang.launch_server: --engine-args="--attention-backend triton"'
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="longest wait for one turn of a server")
    batch_wait_s: float = Field(
        default=10.0,
        gt=0,
        description="embedded engine: longest wait of a batch for episodes whose environment is busy; as long as none "
        "takes longer, a seed repeats a run to the bit",
    )

    def chosen(self, num_gpus: int = 0) -> Literal["hf", "sglang"]:
        """Return which engine writes; `num_gpus` are those of learner processes."""
        if self.engine == "auto":
            return "sglang" if self.engine_url or num_gpus else "hf"
        return self.engine


class EngineConfig(ServersConfig):
    """What writes the model's turns, and how it gets new weights."""

    sync: Literal["auto", "disk", "ipc"] = Field(
        default="auto", description="how new weights reach servers; auto: ipc from a GPU of this host, else disk"
    )
    probe_tolerance: float = Field(
        default=0.2,
        gt=0,
        description="largest mean gap in nats between engine and learner on a fixed stream, before a run is refused",
    )


class ClusterConfig(Section):
    """How many processes train, and where. Without any of this, the trainer is one process and Ray is not needed."""

    num_gpus: int = Field(
        default=0, ge=0, description="learner processes, one GPU each, through Ray; 0: train in this process"
    )
    num_learners: int = Field(
        default=0, ge=0, description="learner processes on CPUs, through Ray; 0: train in this process"
    )
    ray_address: str = Field(
        default="", description="Ray cluster to use: auto, or HOST:PORT of its head; empty: one is started on this host"
    )
    learner_timeout_s: float = Field(
        default=600.0, gt=0, description="longest wait of one learner process for the others, and for them to start"
    )

    @field_validator("num_learners")
    @classmethod
    def _is_one_kind(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("num_gpus"):
            raise ValueError("cannot be given together with --num-gpus, which has a learner process on each GPU")
        return value

    @field_validator("ray_address")
    @classmethod
    def _has_a_use(cls, value: str, info: ValidationInfo) -> str:
        if value and not (info.data.get("num_gpus") or info.data.get("num_learners")):
            raise ValueError("needs --num-gpus or --num-learners, or nothing would run on the cluster")
        return value

    @property
    def num_ranks(self) -> int:
        """Learner processes; 0: training happens in the process of the command."""
        return self.num_gpus or self.num_learners


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
    max_concurrent: int = Field(default=1024, ge=1, description="episodes in progress at once; others wait their turn")
    filter_equal: bool = Field(
        default=False, description="play further problems in place of groups whose rewards are all equal"
    )
    oversample: float = Field(
        default=1.0, ge=1, description="begin this many times the step's problems; the first ones that count are used"
    )
    max_oversample: float = Field(
        default=3.0,
        ge=1,
        validate_default=True,
        description="play at most this many times the step's problems to find groups whose rewards differ",
    )
    stop_early: bool = Field(
        default=False,
        description="end a rollout once enough groups are complete; prefers problems whose episodes are short",
    )
    max_rollout_s: float = Field(
        default=0.0,
        ge=0,
        description="end a step's rollout after so many seconds and train on what is complete; 0: never",
    )
    max_rollout_tokens: int = Field(
        default=0, ge=0, description="end a step's rollout after so many sampled tokens, likewise; 0: never"
    )
    partial: bool = Field(
        default=False,
        description="pause what a rollout's end cuts off, and finish it in a later step with newer weights",
    )
    max_staleness: int = Field(
        default=1, ge=0, description="abort a paused group that was begun more than so many versions of the weights ago"
    )
    max_invalid_frac: float = Field(
        default=0.01, ge=0, le=1, description="stop the run when more of a step's episodes break the token stream"
    )

    @field_validator("max_oversample")
    @classmethod
    def _reaches_oversample(cls, value: float, info: ValidationInfo) -> float:
        least = info.data.get("oversample", 1.0)
        if value < least:
            raise ValueError(f"must be at least --oversample {least:g}")
        return value

    @field_validator("partial")
    @classmethod
    def _something_ends_early(cls, value: bool, info: ValidationInfo) -> bool:
        ends = ("stop_early", "max_rollout_s", "max_rollout_tokens")
        if value and not any(info.data.get(name) for name in ends):
            raise ValueError("needs --stop-early, --max-rollout-s or --max-rollout-tokens, or nothing is ever cut off")
        return value


class SidesConfig(Section):
    """Which sides of a step are done: its episodes are played, then learnt from; or only one of the two."""

    rollout_only: bool = Field(
        default=False,
        description="play and record the episodes of every step with the weights as they are; nothing is trained, "
        "evaluated or kept of the model",
    )
    replay_rollouts: Path | None = Field(
        default=None,
        description="run folder whose recorded episodes are trained on, step by step; nothing is played, and its "
        "settings hold where no others are given",
    )

    @field_validator("replay_rollouts")
    @classmethod
    def _leaves_a_side(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value and info.data.get("rollout_only"):
            raise ValueError("cannot be given together with --rollout-only: nothing would be left to do")
        return value


class AdamWConfig(Section):
    """The optimizer."""

    lr: float = Field(default=5e-5, gt=0, description="learning rate")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="learning rate over all steps, times the warm-up"
    )
    warmup_steps: int = Field(default=2, ge=0, description="steps of linear warm-up")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's first moment decay")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's second moment decay")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(
        default=1.0, gt=0, allow_inf_nan=True, description="gradients are scaled down to this norm; inf: never"
    )


class OptimConfig(AdamWConfig):
    """The optimizer, and how often it is used in a step."""

    minibatches: int = Field(
        default=1, ge=1, description="updates per pass over a step's groups, each on an equal part of them"
    )
    epochs: int = Field(default=1, ge=1, description="passes over a step's groups")


class LearnerConfig(Section):
    """How the training network lies in memory, and what of it is trained. None of it changes the gradient."""

    max_tokens_per_microbatch: int = Field(
        default=4096, ge=1, description="tokens packed into one forward and backward; a longer stream stands alone"
    )
    recompute: float = Field(
        default=0.0, ge=0, le=1, description="share of the blocks whose activations are made again for the gradient"
    )
    reshard: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="give up gathered weights: always, between every forward and backward; never, only after an "
        "update, whose gradients ranks then add up once (fastest, most memory); auto: always with several ranks",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none",
        description="what lies in the CPU's memory: optimizer state between steps, or weights and optimizer always",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="compile blocks and loss kernels with torch.compile; auto: on a GPU"
    )
    freeze_vision: bool = Field(default=False, description="leave the vision tower's weights as they are")
    lora_rank: int = Field(default=0, ge=0, description="train low-rank adapters of this rank alone; 0: all weights")
    lora_alpha: float = Field(default=32.0, gt=0, description="adapters are scaled by this over their rank")
    lora_targets: tuple[str, ...] = Field(
        default=(), description="endings of the names of adapted linear layers; empty: all of the decoder's"
    )

    @field_validator("lora_alpha", "lora_targets")
    @classmethod
    def _has_adapters(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[str(info.field_name)].default
        if value != default and not info.data.get("lora_rank"):
            raise ValueError("needs --lora-rank, or nothing reads it")
        return value


class AlgorithmConfig(Section):
    """The algorithm: advantages, policy loss, aggregation, regularisers and the correction of rollout log-probs."""

    advantage: AdvantageName = Field(
        default="grpo",
        description="rewards to advantages: less the group's mean (grpo), the others' mean (rloo), or the group's mean "
        "and over the step's standard deviation (reinforce++)",
    )
    scale_by_std: bool = Field(
        default=True, description="with --advantage grpo: divide by the group's standard deviation; Dr. GRPO does not"
    )
    policy_loss: PolicyLossName = Field(
        default="ppo",
        description="clipped ratio of each token (ppo) or of the whole sequence (gspo), or the log-prob itself, "
        "nothing clipped (likelihood: REINFORCE)",
    )
    clip_low: float = Field(default=0.2, ge=0, lt=1, description="lower clip of the ratio: 1 - clip_low")
    clip_high: float = Field(default=0.28, ge=0, description="upper clip of the ratio: 1 + clip_high")
    dual_clip: float = Field(
        default=0.0,
        ge=0,
        description="bound a bad token's loss at this many times its advantage; above 1, such as 3; 0: no bound",
    )
    aggregation: AggregationName = Field(
        default="token-mean", description="how the losses of a step's tokens become one number"
    )
    loss_constant: int = Field(
        default=0,
        ge=0,
        description="tokens that --aggregation constant divides every sequence's sum by; 0: --max-new-tokens",
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference network in the loss")
    kl_estimator: KLEstimatorName = Field(
        default="k3", description="estimate of that KL; k1 and k3 are unbiased in value, k2 in gradient"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus in the loss")
    correction: CorrectionName = Field(
        default="tis",
        description="weight by trainer over engine probability: clamped per token (tis), or 0 out of bounds per token "
        "(icepop) or sequence (mis)",
    )
    correction_cap: float = Field(default=2.0, gt=0, description="largest weight of --correction tis")
    correction_low: float = Field(default=0.5, ge=0, description="least ratio that icepop and mis keep")
    correction_high: float = Field(
        default=5.0,
        gt=0,
        validate_default=True,
        description="largest ratio that icepop and mis keep",
    )
    mask_truncated: bool = Field(
        default=False,
        description="leave episodes that a limit cut off (turns, tokens, context) out of the loss, not the statistics",
    )

    @field_validator("dual_clip")
    @classmethod
    def _is_off_or_above_one(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("must be above 1, or 0 for none")
        return value

    @field_validator("loss_constant")
    @classmethod
    def _is_read(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("aggregation") != "constant":
            raise ValueError("needs --aggregation constant, or nothing reads it")
        return value

    @field_validator("correction_high")
    @classmethod
    def _is_above_low(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("correction_low", 0.0)
        if value <= low:
            raise ValueError(f"must be above --correction-low {low:g}")
        return value


class CheckpointConfig(Section):
    """What is kept to go on from after a stop, and what a run goes on from."""

    save_every: int = Field(default=10, ge=0, description="steps between checkpoints; 0: none is written")
    keep_checkpoints: int = Field(default=2, ge=1, description="how many checkpoints are kept: the newest ones")
    resume: Path | None = Field(
        default=None, description="run folder to go on with, from its newest whole checkpoint; its settings hold"
    )


class FolderConfig(Section):
    """Where files and numbers go."""

    out: Path = Field(default=Path("runs"), description="folder for run folders")
    name: str = Field(default="", description="name of the run folder; empty: environment, time and seed")
    tracker: tuple[TrackerName, ...] = Field(
        default=("tensorboard",), description="where the numbers of each step go besides metrics.jsonl; empty: nowhere"
    )
    project: str = Field(default="trueturn", min_length=1, description="project of the run at wandb and trackio")


class LogConfig(FolderConfig):
    """What is kept of a run."""

    record: float = Field(
        default=1.0, ge=0, le=1, description="share of the problems whose episodes are recorded, with all of a group"
    )


class RunConfig(Section):
    """A training run."""

    steps: int = Field(default=50, ge=0, description="training steps")
    seed: int = Field(default=0, ge=0, description="seed of problems, sampling and order")
    doctor: Literal["stop", "warn", "off"] = Field(
        default="stop",
        description="quick checks before step 0: stop the run at a fault, only warn of it, or make none; "
        "python -m trainer.doctor with the same flags makes all",
    )
    env: EnvConfig = EnvConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    rollout: RolloutConfig = RolloutConfig()
    sides: SidesConfig = SidesConfig()
    optim: OptimConfig = OptimConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def plays(self) -> bool:
        """Whether episodes are played, which takes an engine and environments."""
        return self.sides.replay_rollouts is None

    @property
    def trains(self) -> bool:
        """Whether weights change."""
        return not self.sides.rollout_only


class LearnerPlan(Protocol):
    """What is read to start a learner: a `RunConfig` is one."""

    @property
    def steps(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> ModelConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def optim(self) -> OptimConfig: ...
    @property
    def learner(self) -> LearnerConfig: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
