"""The settings of each call with their types, so that editors complete them and type checkers know them.

Written by `python -m tests.keywords` from the configuration of the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from envs.datasets.rows import Rows
from trueturn.settings import HasFolder

#: A file, a folder, or what has one, such as a run.
Place = str | Path | HasFolder
#: An object of yours, or where it stands: module:NAME.
Code = str | Callable[..., Any]


class EnvironmentKeywords(TypedDict, total=False):
    """Environment and problems."""

    seed: int
    registry: Place | Sequence[Place]
    max_new_tokens: int
    max_turns: int | None
    reset_timeout_s: float | None
    step_timeout_s: float | None
    isolation: Literal["inline", "thread", "process"] | None
    tool_format: Literal["auto", "hermes", "qwen_xml"] | None
    thinking: Literal["auto", "keep", "think", "thinking", "mistral"] | None
    grader: Literal["math", "geo3k_strict", "geo3k_tolerance"] | Code | None
    reward: Code | Sequence[Code]
    success: float | str | None
    reward_max_val: float | None
    reward_min_val: float | None
    data: Rows | str | Path
    prompt_key: str
    answer_key: str
    image_keys: str
    allow_outside_images: bool
    allow_remote_images: bool
    system_prompt: str
    max_prompt_tokens: int


class EnvKeywords(EnvironmentKeywords, total=False):
    """`tt.env`; those of its own are for classes and functions."""

    eval_data: Rows | str | Path
    train_size: int | None
    eval_size: int | None
    id: str
    version: str
    description: str
    dataset: Code | None
    dataset_options: Mapping[str, Any]
    options: Mapping[str, Any]
    tools: Literal["optional", "required"]
    tool_calls: Literal["last", "first", "sequential", "parallel", "single"]
    on_tool_fault: Literal["observe", "drop", "reward_min"]
    workers: Literal["local", "ray"]
    worker_resources: Mapping[str, float]
    memory_limit_gib: float
    retries: int
    retry_backoff_s: float
    compat: Literal["slime"] | None


class RunKeywords(EnvironmentKeywords, total=False):
    """What training shares with `tt.rollout` and `tt.evaluate`."""

    device: str
    dtype: Literal["float32", "bfloat16"]
    context_length: int
    template_options: str
    engine: Literal["auto", "hf", "sglang"] | Code
    engine_url: str | Sequence[str]
    engine_api_key_file: Place | None
    num_servers: int
    tensor_parallel: int
    first_gpu: int | None
    mem_fraction: float | None
    engine_args: str
    request_timeout_s: float
    turn_wait_s: float
    batch_wait_s: float
    max_batch: int
    max_concurrent: int
    out: Place
    name: str
    record: float


class TrainKeywords(RunKeywords, total=False):
    """`tt.train` and `tt.TrainConfig`."""

    steps: int
    doctor: Literal["stop", "warn", "off"]
    eval_data: Rows | str | Path
    train_size: int | None
    eval_size: int | None
    model: Place
    sync: Literal["auto", "adapter", "disk", "ipc", "nccl"]
    placement: Literal["auto", "colocate", "split"]
    probe_tolerance: float
    backend: Literal["fsdp", "megatron"]
    tp: int
    pp: int
    ep: int
    etp: int
    cp: int
    sp: bool
    pad_microbatches: bool
    num_gpus: int
    num_learners: int
    ray_address: str
    learner_timeout_s: float
    problems_per_step: int
    group_size: int
    resample: int
    temperature: float
    eval_temperature: float
    sampler: Code
    group_filter: Code
    filter_equal: bool
    oversample: float
    max_oversample: float
    stop_early: bool
    max_rollout_s: float
    max_rollout_tokens: int
    max_staleness: int
    keep_kv_cache: bool
    max_invalid_frac: float
    max_lost_steps: int
    rollout_only: bool
    replay_rollouts: Place | None
    lr: float
    schedule: Literal["constant", "cosine"]
    warmup_steps: int
    beta1: float
    beta2: float
    weight_decay: float
    max_grad_norm: float
    minibatches: int
    epochs: int
    max_tokens_per_microbatch: int
    recompute: float
    reshard: Literal["auto", "always", "never"]
    offload: Literal["none", "optimizer", "all"]
    compile: Literal["auto", "on", "off"]
    freeze_vision: bool
    lora_rank: int
    lora_alpha: float
    lora_targets: str | Sequence[str]
    advantage: Literal["grpo", "rloo", "reinforce++", "turn", "gigpo"] | Code
    discount: float
    scale_by_std: bool
    policy_loss: Literal["ppo", "gspo", "likelihood"] | Code
    clip_low: float
    clip_high: float
    dual_clip: float
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
    loss_constant: int
    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"]
    entropy_coef: float
    correction: Literal["none", "tis", "icepop", "mis"] | Code
    correction_cap: float
    correction_low: float
    correction_high: float
    mask_truncated: bool
    eval_every: int
    tools: Literal["both", "on", "off"]
    best_by: Literal["success", "reward"] | None
    stop_at_accuracy: float | None
    patience: int
    save_every: int
    keep_checkpoints: int
    resume: Place | None
    max_restarts: int
    tracker: (
        Literal["tensorboard", "wandb", "trackio"] | Code | Sequence[Literal["tensorboard", "wandb", "trackio"] | Code]
    )
    callback: Code | Sequence[Code]
    project: str


class PlayKeywords(RunKeywords, total=False):
    """What `tt.rollout` and `tt.evaluate` share."""

    split: str
    problem_seed: int
    ks: int | Sequence[int]
    tag: str | Sequence[str]
    confidence: float
    bootstrap: int
    endpoint: str
    endpoint_key_file: Place | None
    endpoint_cache: Place | None
    save_demonstrations: Place | None


class RolloutKeywords(PlayKeywords, total=False):
    """`tt.rollout`."""

    tools: Literal["both", "on", "off"]


class EvaluateKeywords(PlayKeywords, total=False):
    """`tt.evaluate`."""

    size: int | None
    samples: int
    eval_temperature: float


class ViewKeywords(TypedDict, total=False):
    """`tt.view`."""

    id: str | Sequence[str]
    phase: str | Sequence[str]
    way: str | Sequence[str]
    step: int | Sequence[int]
    end_reason: (
        Literal[
            "completed",
            "max_turns",
            "token_budget",
            "context_full",
            "tool_fault",
            "parse_error",
            "env_error",
            "env_timeout",
            "reward_error",
            "aborted",
            "invalid_stream",
        ]
        | Sequence[
            Literal[
                "completed",
                "max_turns",
                "token_budget",
                "context_full",
                "tool_fault",
                "parse_error",
                "env_error",
                "env_timeout",
                "reward_error",
                "aborted",
                "invalid_stream",
            ]
        ]
    )
    min_reward: float | None
    max_reward: float | None


class ReplayKeywords(ViewKeywords, total=False):
    """`tt.replay`."""

    registry: Place | Sequence[Place]
    model: Place
    turn: int | None
    rescore: Literal["math", "geo3k_strict", "geo3k_tolerance"] | Code | None
    max_concurrent: int
    limit: int
    max_turns: int | None


class ForkKeywords(TypedDict, total=False):
    """`tt.fork`."""

    temperature: float | None
    seed: int | None
    engine: Literal["hf"] | Code
    device: str
    max_turns: int | None
    max_new_tokens: int | None
    context_length: int | None
