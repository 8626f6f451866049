"""Settings of the rollout: which engine generates, and how episodes are sampled."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from agents.engines.own import ENGINE, EngineName, find_engine
from envs.config.plugins import Plugin
from envs.config.settings import NO_FLAG, Section
from envs.errors import UserError

#: Holds the API key of the servers. It is no setting: a key must not stand in config.yaml.
API_KEY_VARIABLE = "TRUETURN_ENGINE_API_KEY"
SAMPLER = Plugin("a sampler", ("samples", "seed", "epoch"))
#: The values of `--engine` with which servers may be started.
# An engine of the user's own, or the embedded one, has no servers to place.
STARTED = ("auto", "sglang")
GROUP_FILTER = Plugin("a group filter", ("group",))


Placement = Literal["auto", "colocate", "split"]
#: Shares of a GPU's memory for the started servers on it: of their own GPUs, and of those that a learner is on.
# The rest holds CUDA's context, NCCL's buffers, and what a server allocates beside weights and cache.
OWN_GPU = 0.8
SHARED_GPU = 0.4


class ServersConfig(Section):
    """Inference engine: embedded in this process, or servers."""

    engine: EngineName | Annotated[str, ENGINE] = Field(
        default="auto",
        description="hf: embedded, in this process; sglang: servers; auto: sglang with --engine-url or "
        "--num-gpus, and with --device cuda where it is installed",
    )
    engine_url: tuple[str, ...] = Field(
        default=(),
        description="running SGLang server, such as http://gpu1:30000; empty: start servers on this host or, with "
        "--ray-address, on any node of the cluster",
    )
    engine_api_key_file: Path | None = Field(
        default=None,
        description="file with the API key of the servers; empty: the variable TRUETURN_ENGINE_API_KEY, or without it "
        "a random key for started servers and none for running ones",
    )
    num_servers: int = Field(default=1, ge=1, description="SGLang servers to start, on GPUs of their own")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs of one started server")
    first_gpu: int | None = Field(
        default=None,
        ge=0,
        description="first GPU of the started servers; empty: the one after the learners' GPUs, or GPU 0",
    )
    mem_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description=f"share of a GPU's memory for the started servers on it; empty: {OWN_GPU:g}, or {SHARED_GPU:g} "
        "where a learner is on their GPUs",
    )
    engine_args: str = Field(
        default="",
        description="arguments of sglang.launch_server in place of those chosen for the GPU and the run: "
        '--engine-args="--attention-backend triton"',
    )
    # Longer than any turn; a server that hangs is given up after it.
    request_timeout_s: float = Field(
        json_schema_extra=NO_FLAG, default=600.0, gt=0, description="longest wait in seconds for one turn of a server"
    )
    # A prefill stops all decoding of its server, so a few turns are read together.
    turn_wait_s: float = Field(
        json_schema_extra=NO_FLAG,
        default=0.2,
        ge=0,
        description="started servers: longest wait in seconds of a turn for others while its server writes for many, "
        "which all stand still whenever it begins to read; 0: none",
    )
    # A batch that waits for every episode repeats with the seed, but a busy environment could hold it for ever.
    batch_wait_s: float = Field(
        json_schema_extra=NO_FLAG,
        default=10.0,
        gt=0,
        description="embedded engine: longest wait in seconds of a batch for busy environments; a seed repeats a run "
        "to the bit as long as no environment takes longer",
    )

    def choice(self, device: str, num_gpus: int = 0) -> tuple[str, str]:
        """Return the engine to use, "hf", "sglang" or a user's, and why; `num_gpus` is the number of learner GPUs."""
        # Whoever names an engine gets it, or an error, and never another one.
        if self.engine != "auto":
            return self.engine, "--engine"
        if self.engine_url:
            return "sglang", "--engine-url"
        if num_gpus:
            return "sglang", "--num-gpus"
        # SGLang needs a GPU; find_spec loads nothing.
        if not device.startswith("cuda"):
            return "hf", f"the device is {device}"
        if importlib.util.find_spec("sglang") is None:
            return "hf", "SGLang, which is faster on a GPU, is not installed"
        return "sglang", f"it is installed, and the device is {device}"

    def check(self, chosen: str) -> None:
        """Raise `UserError` if the chosen engine cannot run here."""
        if chosen != "sglang":
            if self.engine_url:
                raise UserError("--engine-url", "is for --engine sglang", chosen, "leave one of the two out")
            find_engine(chosen)
        elif not self.engine_url and importlib.util.find_spec("sglang") is None:
            fix = (
                "pip install 'trueturn[sglang]', give the --engine-url of a server that runs elsewhere, or --engine hf"
            )
            raise UserError("--engine", "needs the package sglang to start a server", "sglang", fix)

    def memory_share(self, beside_learner: bool) -> float:
        """Return the share of a GPU's memory for the servers on it."""
        return self.mem_fraction or (SHARED_GPU if beside_learner else OWN_GPU)


class EngineConfig(ServersConfig):
    """Inference engine and weight synchronization."""

    sync: Literal["auto", "adapter", "disk", "ipc", "nccl"] = Field(
        default="auto",
        description="how new weights reach SGLang servers; adapter: that of --lora-rank alone; ipc: on one host; nccl: "
        "to GPUs of any host; auto: adapter if the servers take it, else ipc from a GPU of this host, else nccl from "
        "one, else disk",
    )
    placement: Placement = Field(
        default="auto",
        description="GPUs of started servers; split: GPUs of their own; colocate: those of the learner, whose memory "
        "they free while it trains; auto: split where there are enough GPUs, else they share them, each with its part "
        "of the memory",
    )
    # bfloat16 alone makes small gaps; a weight that did not arrive makes large ones.
    probe_tolerance: float = Field(
        json_schema_extra=NO_FLAG,
        default=0.2,
        gt=0,
        description="largest mean log-prob gap in nats between engine and learner on a fixed stream; a larger one "
        "stops the run at its start",
    )

    @field_validator("placement")
    @classmethod
    def _has_servers(cls, value: str, info: ValidationInfo) -> str:
        if value != "auto" and (info.data.get("engine_url") or info.data.get("engine", "auto") not in STARTED):
            raise ValueError("is for servers that the run starts: give --engine sglang, without --engine-url")
        if value == "colocate" and info.data.get("first_gpu"):
            raise ValueError("cannot be given together with --first-gpu: servers are on the learner's GPUs")
        # NCCL refuses two processes of one group on the same GPU.
        if value == "colocate" and info.data.get("sync") == "nccl":
            raise ValueError("cannot be given together with --sync nccl, which needs servers on GPUs of their own")
        return value


Share = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1)]


class RolloutConfig(Section):
    """Sampling of episodes."""

    problems_per_step: int = Field(default=8, ge=1, description="problems per training step")
    # An advantage compares the episodes of a group, so one alone teaches nothing.
    group_size: int = Field(default=8, ge=2, description="episodes per problem (G of GRPO)")
    # Broken episodes count as data, not as rewards of 0: a group may be left with too few.
    resample: int = Field(
        json_schema_extra=NO_FLAG,
        default=1,
        ge=0,
        description="how often to play a group again that has fewer than two valid episodes",
    )
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature, the same in engine and trainer")
    # What a token was drawn from is kept and trained on, and servers report only the most likely ids.
    top_k: int = Field(
        default=0,
        ge=0,
        le=256,
        description="draw tokens of training from this many most likely ones, whose log-probs are then trained on; 0: "
        "from all",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="of the --top-k tokens, draw from the most likely ones that have this probability together",
    )
    min_p: float = Field(
        json_schema_extra=NO_FLAG,
        default=0.0,
        ge=0,
        lt=1,
        description="of the --top-k tokens, draw from those with this share of the most likely one's probability",
    )
    eval_temperature: float = Field(
        default=0.0, ge=0, description="temperature of evaluation; 0: always the most likely token"
    )
    # A token that takes other experts in the trainer has another log-prob there.
    routing: Literal["replay", "free"] = Field(
        default="replay",
        description="experts of a mixture's tokens in the trainer; replay: those that the engine chose, where it says "
        "which; free: the trainer chooses again",
    )
    # Bounds the key-value cache, which holds a row for each episode of the batch.
    max_batch: int = Field(
        json_schema_extra=NO_FLAG, default=64, ge=1, description="episodes that the embedded engine runs at once"
    )
    max_concurrent: int = Field(default=1024, ge=1, description="episodes in progress at once; others wait their turn")
    sampler: Annotated[str, SAMPLER] = Field(
        default="",
        description="module:NAME or file.py:NAME of a function that orders the problems of an epoch; empty: a seeded "
        "shuffle of all",
    )
    group_filter: Annotated[str, GROUP_FILTER] = Field(
        default="",
        description="module:NAME or file.py:NAME of a function that says whether to train on a group; others are "
        "replaced as with --filter-equal; empty: all count",
    )
    filter_equal: bool = Field(
        default=False, description="replace groups whose rewards are all equal with groups of other problems"
    )
    curriculum: bool = Field(
        default=False,
        description="choose problems by the share of right episodes in the last group that played them",
    )
    curriculum_shares: tuple[Share, Share, Share] = Field(
        json_schema_extra=NO_FLAG,
        default=(0.1, 0.8, 0.1),
        description="shares of a step's problems that are solved, learnable and unsolved so far; problems that nobody "
        "has played are learnable",
    )
    curriculum_bounds: tuple[Rate, Rate] = Field(
        json_schema_extra=NO_FLAG,
        default=(0.0, 1.0),
        description="shares of right episodes up to which a problem is unsolved, and from which it is solved",
    )
    oversample: float = Field(
        default=1.0,
        ge=1,
        description="start this many times the step's problems and use the first groups that count",
    )
    max_oversample: float = Field(
        json_schema_extra=NO_FLAG,
        default=3.0,
        ge=1,
        validate_default=True,
        description="upper limit, as a multiple of the step's problems, when searching for groups whose rewards differ",
    )
    # Short episodes end first, so what is left out is not a random part.
    stop_early: bool = Field(
        json_schema_extra=NO_FLAG,
        default=False,
        description="end a rollout once enough groups are complete; this prefers problems with short episodes",
    )
    max_rollout_s: float = Field(
        json_schema_extra=NO_FLAG,
        default=0.0,
        ge=0,
        description="seconds after which a step's rollout ends and its complete groups are trained on; 0: no limit",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="most versions that the weights of a token may be old when a step trains on it; above 0, episodes "
        "go on while the learner trains; 0: every step plays its own episodes first",
    )
    # Trades an exact log-prob of one version for the time of reading every stream again.
    keep_kv_cache: bool = Field(
        default=False,
        description="episodes that new weights come to go on from what the older weights have read, in place of "
        "reading their streams again: faster, but a token's log-prob is then of more than one version; with "
        "--max-staleness above 0",
    )
    # A few streams may be cut by a dying server; more of them are a fault that training would hide.
    max_invalid_frac: float = Field(
        json_schema_extra=NO_FLAG,
        default=0.01,
        ge=0,
        le=1,
        description="largest share of a step's episodes with an invalid token stream; more of them stop the run",
    )

    max_lost_steps: int = Field(
        json_schema_extra=NO_FLAG,
        default=3,
        ge=1,
        description="steps in a row in which no episode could be scored, or no gradient was finite, that end the run "
        "with code 1",
    )

    def max_sessions(self, num_evaluated: int = 0) -> int:
        """Return the most episodes that run at once, in a step or in an evaluation of so many.

        >>> RolloutConfig(problems_per_step=8, group_size=8, oversample=1.5).max_sessions()
        96
        """
        # Ahead of the learner are the groups of `max_staleness` steps, besides those of the step that plays.
        num_groups = self.max_staleness * self.problems_per_step + math.ceil(self.problems_per_step * self.oversample)
        trained, evaluated = (min(self.max_concurrent, n) for n in (num_groups * self.group_size, num_evaluated))
        # An evaluation runs beside episodes that go on; without staleness none do.
        if self.max_staleness:
            return trained + evaluated
        return max(trained, evaluated)

    @field_validator("top_k")
    @classmethod
    def _leaves_a_choice(cls, value: int) -> int:
        if value == 1:
            raise ValueError("must be 0 or at least 2: of one token nothing is drawn, so nothing is learnt")
        return value

    @field_validator("top_p", "min_p")
    @classmethod
    def _cuts_what_is_known(cls, value: float, info: ValidationInfo) -> float:
        # Of --top-p 1 cuts nothing, of min_p 0.
        if value not in (0.0, 1.0) and not info.data.get("top_k", 1):
            raise ValueError("needs --top-k, at most 256: what a token was drawn from is trained on; give --top-k 256")
        # SGLang's sampling backends disagree about which of the two comes first.
        if info.field_name == "min_p" and value and info.data.get("top_p", 1.0) < 1:
            raise ValueError("cannot be given together with --top-p: give one of them")
        return value

    @field_validator("curriculum")
    @classmethod
    def _has_no_other_order(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("sampler"):
            raise ValueError("cannot be given together with --sampler: both choose the problems")
        return value

    @field_validator("curriculum_shares", "curriculum_bounds")
    @classmethod
    def _makes_pools(cls, value: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if info.field_name == "curriculum_shares" and not value[1]:
            raise ValueError("must have a share of learnable problems: nothing else begins unplayed")
        if info.field_name == "curriculum_bounds" and value[0] >= value[1]:
            raise ValueError("must be two shares, the first below the second")
        return value

    @field_validator("max_oversample")
    @classmethod
    def _reaches_oversample(cls, value: float, info: ValidationInfo) -> float:
        least = info.data.get("oversample", 1.0)
        if value < least:
            raise ValueError(f"must be at least --oversample {least:g}")
        return value

    @field_validator("keep_kv_cache")
    @classmethod
    def _has_episodes_at_a_push(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not info.data.get("max_staleness"):
            raise ValueError("needs --max-staleness above 0: without it no episode runs when new weights come")
        return value
