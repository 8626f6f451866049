"""The settings of each call, so that editors complete them and type checkers know their names.

Their values are checked when they are given.

Written by `python -m tests.keywords` from the configuration of the commands.
"""

from __future__ import annotations

from typing import Any, TypedDict


class EnvironmentKeywords(TypedDict, total=False):
    """Environment and problems."""

    seed: Any
    registry: Any
    max_new_tokens: Any
    max_turns: Any
    reset_timeout_s: Any
    step_timeout_s: Any
    isolation: Any
    tool_format: Any
    thinking: Any
    grader: Any
    reward: Any
    success: Any
    reward_max_val: Any
    reward_min_val: Any
    data: Any
    prompt_key: Any
    answer_key: Any
    image_keys: Any
    allow_outside_images: Any
    system_prompt: Any
    max_prompt_tokens: Any


class EnvKeywords(EnvironmentKeywords, total=False):
    """`tt.env`; those of its own are for classes and functions."""

    eval_data: Any
    train_size: Any
    eval_size: Any
    id: Any
    version: Any
    description: Any
    history: Any
    dataset: Any
    dataset_options: Any
    options: Any
    tools: Any
    tool_calls: Any
    on_tool_fault: Any
    workers: Any
    worker_resources: Any
    memory_limit_gib: Any
    retries: Any
    retry_backoff_s: Any
    compat: Any


class RunKeywords(EnvironmentKeywords, total=False):
    """What training shares with `tt.rollout` and `tt.evaluate`."""

    device: Any
    dtype: Any
    context_length: Any
    template_options: Any
    engine: Any
    engine_url: Any
    engine_api_key_file: Any
    num_servers: Any
    tensor_parallel: Any
    first_gpu: Any
    mem_fraction: Any
    engine_args: Any
    request_timeout_s: Any
    turn_wait_s: Any
    batch_wait_s: Any
    max_batch: Any
    max_concurrent: Any
    out: Any
    name: Any
    record: Any


class TrainKeywords(RunKeywords, total=False):
    """`tt.train` and `tt.TrainConfig`."""

    steps: Any
    doctor: Any
    eval_data: Any
    train_size: Any
    eval_size: Any
    model: Any
    sync: Any
    placement: Any
    probe_tolerance: Any
    backend: Any
    tp: Any
    pp: Any
    ep: Any
    etp: Any
    cp: Any
    sp: Any
    num_gpus: Any
    num_learners: Any
    ray_address: Any
    learner_timeout_s: Any
    problems_per_step: Any
    group_size: Any
    resample: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    eval_temperature: Any
    routing: Any
    sampler: Any
    group_filter: Any
    filter_equal: Any
    curriculum: Any
    curriculum_shares: Any
    curriculum_bounds: Any
    oversample: Any
    max_oversample: Any
    stop_early: Any
    max_rollout_s: Any
    max_staleness: Any
    keep_kv_cache: Any
    max_invalid_frac: Any
    max_lost_steps: Any
    rollout_only: Any
    replay_rollouts: Any
    lr: Any
    schedule: Any
    warmup_steps: Any
    beta1: Any
    beta2: Any
    weight_decay: Any
    max_grad_norm: Any
    minibatches: Any
    epochs: Any
    max_tokens_per_microbatch: Any
    recompute: Any
    reshard: Any
    offload: Any
    compile: Any
    freeze_vision: Any
    lora_rank: Any
    lora_alpha: Any
    lora_targets: Any
    advantage: Any
    discount: Any
    scale_by_std: Any
    policy_loss: Any
    clip_low: Any
    clip_high: Any
    dual_clip: Any
    aggregation: Any
    loss_constant: Any
    kl_coef: Any
    kl_estimator: Any
    entropy_coef: Any
    correction: Any
    correction_cap: Any
    correction_low: Any
    correction_high: Any
    mask_truncated: Any
    eval_every: Any
    tools: Any
    best_by: Any
    stop_at_accuracy: Any
    patience: Any
    save_every: Any
    keep_checkpoints: Any
    resume: Any
    tracker: Any
    callback: Any
    project: Any
    record_routes: Any


class PlayKeywords(RunKeywords, total=False):
    """What `tt.rollout` and `tt.evaluate` share."""

    split: Any
    problem_seed: Any
    ks: Any
    tag: Any
    confidence: Any
    bootstrap: Any
    endpoint: Any
    endpoint_key_file: Any
    endpoint_cache: Any
    save_demonstrations: Any


class RolloutKeywords(PlayKeywords, total=False):
    """`tt.rollout`."""

    tools: Any


class EvaluateKeywords(PlayKeywords, total=False):
    """`tt.evaluate`."""

    size: Any
    samples: Any
    eval_temperature: Any


class ViewKeywords(TypedDict, total=False):
    """`tt.view`."""

    id: Any
    phase: Any
    way: Any
    step: Any
    end_reason: Any
    min_reward: Any
    max_reward: Any


class ReplayKeywords(ViewKeywords, total=False):
    """`tt.replay`."""

    registry: Any
    model: Any
    max_concurrent: Any
    limit: Any
    max_turns: Any


class ForkKeywords(TypedDict, total=False):
    """`tt.fork`."""

    temperature: Any
    seed: Any
    device: Any
    max_turns: Any
    max_new_tokens: Any
    context_length: Any
