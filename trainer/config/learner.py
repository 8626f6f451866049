"""Settings of the learner: processes, optimizer, memory and which weights are trained."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, Protocol

from pydantic import Field, ValidationInfo, field_validator

from envs.config.settings import NO_FLAG, Section
from envs.errors import UserError
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.inputs import ModelConfig, check_device

Backend = Literal["fsdp", "megatron"]
Offload = Literal["none", "optimizer", "all"]
Reshard = Literal["auto", "always", "never"]


class LayoutConfig(Section):
    """Backend of the learner, and how its ranks share one network."""

    backend: Backend = Field(
        default="fsdp",
        description="what trains. fsdp: FSDP2, which shards weights; megatron: Megatron-Core, whose ranks also share "
        "the computation, as --tp to --sp say",
    )
    tp: int = Field(default=1, ge=1, description="learner ranks that share each matrix (tensor parallel)")
    pp: int = Field(default=1, ge=1, description="learner ranks that share the layers (pipeline parallel)")
    ep: int = Field(default=1, ge=1, description="learner ranks that share the experts of a mixture (expert parallel)")
    etp: int = Field(default=1, ge=1, description="learner ranks that share each expert (expert tensor parallel)")
    cp: int = Field(default=1, ge=1, description="learner ranks that share each stream (context parallel)")
    sp: bool = Field(
        default=False, description="share the tokens between the matrices among the --tp ranks (sequence parallel)"
    )

    @field_validator("tp", "pp", "ep", "etp", "cp", "sp")
    @classmethod
    def _has_a_reader(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[str(info.field_name)].default
        if value != default and info.data.get("backend") == "fsdp":
            raise ValueError("needs --backend megatron, or nothing reads it")
        return value

    @field_validator("sp")
    @classmethod
    def _has_tensor_ranks(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("tp") == 1:
            raise ValueError("needs --tp of at least 2, whose ranks share the tokens")
        return value


class ClusterConfig(LayoutConfig):
    """Learner processes and their backend. By default training runs in the process of the command, without Ray."""

    num_gpus: int = Field(
        default=0, ge=0, description="learner processes, one GPU each, through Ray; 0: train in this process"
    )
    num_learners: int = Field(
        default=0, ge=0, description="learner processes on CPUs, through Ray; 0: train in this process"
    )
    ray_address: str = Field(
        default="", description="Ray cluster: auto, or HOST:PORT of its head; empty: start one on this host"
    )
    # A rank that died leaves the others in a collective, which nothing else ends.
    learner_timeout_s: float = Field(
        json_schema_extra=NO_FLAG,
        default=600.0,
        gt=0,
        description="longest wait in seconds of a learner process for the others, and for them to start",
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
        """The number of learner processes; 0: training runs in the process of the command."""
        # One of the two is 0: `_is_one_kind`.
        return self.num_gpus or self.num_learners

    def check(self, device: str) -> None:
        """Raise `UserError` if no learner can run here on a device of this kind: no such device, no Ray, few GPUs."""
        if not self.num_ranks:
            check_device(device)
            return
        # Late: the configuration is read before anything takes seconds to load.
        import torch

        self.check_ray()
        # Ranks on CPUs meet over gloo, and have no GPU to compute on.
        if self.num_learners and device.split(":")[0] != "cpu":
            raise UserError("--device", "must be cpu with --num-learners", device, "give --num-gpus instead")
        unset = ModelConfig.model_fields["device"].default  # which config.yaml holds as well
        if self.num_gpus and device != unset and device.split(":")[0] != "cuda":
            raise UserError("--device", "must be cuda with --num-gpus", device, "leave it out, or give --num-learners")
        # GPUs of other hosts are counted by the cluster, when it is reserved.
        here = torch.cuda.device_count()
        if self.num_gpus > here and not self.ray_address:
            fix = "give --num-learners for CPUs"
            if here:
                fix = f"give {here} or less, or the --ray-address of a cluster"
            raise UserError("--num-gpus", f"must be at most the {here} GPUs of this host", self.num_gpus, fix)

    def check_ray(self) -> None:
        """Raise `UserError` if Ray is not installed."""
        if importlib.util.find_spec("ray") is None:
            if self.num_gpus:
                flag = "--num-gpus"
            else:
                flag = "--num-learners"
            raise UserError(flag, "needs the package ray", self.num_ranks, "pip install 'trueturn[cluster]'")


class AdamWConfig(Section):
    """Optimizer."""

    lr: float = Field(default=5e-5, gt=0, description="learning rate")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="learning rate over all steps, multiplied by the warm-up"
    )
    warmup_steps: int = Field(default=2, ge=0, description="steps of linear warm-up")
    beta1: float = Field(json_schema_extra=NO_FLAG, default=0.9, ge=0, lt=1, description="AdamW's first moment decay")
    # A shorter memory than AdamW's own default: the gradients of a changing policy age fast.
    beta2: float = Field(json_schema_extra=NO_FLAG, default=0.95, ge=0, lt=1, description="AdamW's second moment decay")
    weight_decay: float = Field(json_schema_extra=NO_FLAG, default=0.0, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(
        json_schema_extra=NO_FLAG,
        default=1.0,
        gt=0,
        allow_inf_nan=True,
        description="gradients are scaled down to this norm; inf: never",
    )


class OptimConfig(AdamWConfig):
    """Optimizer and updates per step."""

    # More than one makes the later ones off-policy, which the clipped ratio is for.
    minibatches: int = Field(
        default=1, ge=1, description="optimizer updates per pass over a step's groups, each on an equal part of them"
    )
    epochs: int = Field(default=1, ge=1, description="passes over a step's groups")


#: Estimates of memory take this share of a micro-batch's tokens to be images.
IMAGE_SHARE = 0.25


class LearnerConfig(Section):
    """Memory use of the learner, and the weights to train. The memory settings do not change the gradient."""

    # A stream is never cut: cut attention would change its log-probs.
    max_tokens_per_microbatch: int = Field(
        default=4096,
        ge=1,
        description="tokens packed into one forward and backward pass; a longer stream is a micro-batch of its own",
    )
    # A share and not a switch: memory is often short by a few blocks only.
    recompute: float = Field(
        default=0.0, ge=0, le=1, description="share of the blocks whose activations are recomputed in the backward pass"
    )
    reshard: Reshard = Field(
        default="auto",
        description="when to free gathered weights. always: after each forward and backward pass; never: only after an "
        "update, with one gradient reduction for it (fastest, most memory); auto: always with several ranks",
    )
    # AdamW's two moments are two thirds of what stays between steps.
    offload: Offload = Field(
        default="none",
        description="what to keep in CPU memory. optimizer: its state, between steps; all: weights and optimizer, "
        "always",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="compile blocks and loss kernels with torch.compile; auto: on a GPU, for networks "
        "of 500 M parameters and more",
    )
    freeze_vision: bool = Field(default=False, description="do not train the vision tower")
    lora_rank: int = Field(
        default=0, ge=0, description="train only low-rank adapters of this rank; 0: train all weights"
    )
    # The scale is alpha / rank, so a change of rank alone keeps the step size.
    lora_alpha: float = Field(default=32.0, gt=0, description="scale of the adapters, divided by their rank")
    lora_targets: tuple[str, ...] = Field(
        default=(), description="ending of the names of the linear layers to adapt; empty: all of the decoder"
    )

    @field_validator("lora_alpha", "lora_targets")
    @classmethod
    def _has_adapters(cls, value: Any, info: ValidationInfo) -> Any:
        default = cls.model_fields[str(info.field_name)].default
        if value != default and not info.data.get("lora_rank"):
            raise ValueError("needs --lora-rank, or nothing reads it")
        return value


class LearnerPlan(Protocol):
    """The settings that start a learner. A `RunConfig` is one."""

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
