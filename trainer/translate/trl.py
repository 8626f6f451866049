"""The settings of TRL's GRPO trainer, as flags of `trl grpo` or keys of its YAML."""

from __future__ import annotations

import math

from trainer.translate.dialect import (
    EPOCHS,
    EVALUATION,
    RESUME,
    Conversion,
    Dialect,
    Given,
    NoCounterpart,
    Result,
    SameHere,
    Value,
    eval_every,
    flag,
    is_true,
    lost,
    neutral,
    number,
    same,
    same_memory,
    trackers,
    used,
    whole,
    words,
)


def _batch(value: Value, given: Given) -> Result:
    """Convert the batch of completions that a device takes, and what multiplies it."""
    accumulated = number(given, "gradient_accumulation_steps")
    generated = float(str(given.get("steps_per_generation", accumulated)))
    completions = float(str(value)) * number(given, "num_processes") * generated
    if "generation_batch_size" in given:
        completions = number(given, "generation_batch_size")
        generated = completions / (float(str(value)) * number(given, "num_processes"))
    problems = whole(completions / number(given, "num_generations"))
    updates = whole(generated / accumulated)
    if not isinstance(problems, str):
        return NoCounterpart(f"{completions:g} completions are no whole number of groups")
    return {"problems_per_step": problems, **({"minibatches": updates} if isinstance(updates, str) else {})}


def _processes(value: Value, given: Given) -> Result:
    # One process trains without Ray.
    return {"num_gpus": value} if number(given, "num_processes") > 1 else {}


def _clip_low(value: Value, given: Given) -> Result:
    return {"clip_low": value, "clip_high": given.get("epsilon_high", value)}


def _correction(value: Value, given: Given) -> Result:
    if not is_true(value) or not is_true(given.get("use_vllm")):
        return "none"
    high = str(given.get("vllm_importance_sampling_cap", given["vllm_importance_sampling_clip_max"]))
    low = str(given.get("vllm_importance_sampling_clip_min", "0"))
    bounds: dict[str, Value] = {"correction_low": low, "correction_high": high}
    modes: dict[str, Result] = {
        "token_truncate": {"correction": "tis", "correction_cap": high},
        "token_mask": {"correction": "icepop", **bounds},
        "sequence_mask": {"correction": "mis", **bounds},
    }
    return words(modes)(given["vllm_importance_sampling_mode"], given)


def _steps(value: Value, given: Given) -> Result:
    """Convert steps of the optimizer; a step here is a rollout with all its updates."""
    if float(str(value)) <= 0:
        return {}
    return f"{max(1, math.ceil(float(str(value)) / _updates(given)))}"


def _updates(given: Given) -> float:
    """Return the updates from one batch of completions."""
    accumulated = number(given, "gradient_accumulation_steps")
    return float(str(given.get("steps_per_generation", accumulated))) / accumulated * number(given, "num_iterations")


def _warmup(value: Value, given: Given) -> Result:
    if number(given, "max_steps") <= 0:
        return NoCounterpart("depends on the number of steps: give --warmup-steps")
    return {"warmup_steps": f"{float(str(value)) * number(given, 'max_steps') / _updates(given):.0f}"}


def _lora(value: Value, given: Given) -> Result:
    return {"lora_rank": given["lora_r"]} if is_true(value) else {}


def _lora_part(field: str) -> Conversion:
    """Convert a setting that only adapters read; all linear layers are the default here."""
    return lambda value, given: {field: value} if is_true(given["use_peft"]) and value != "all-linear" else {}


def _epochs(value: Value, given: Given) -> Result:
    return {} if float(str(given.get("max_steps", "-1"))) > 0 else EPOCHS(value, given)


def _rewards(value: Value, given: Given) -> Result:
    names = value if isinstance(value, list) else [value]
    if others := [name for name in names if name not in ("accuracy_reward", "math_reward")]:
        return NoCounterpart(f"write {', '.join(others)} for a finished episode: --reward my.py:NAME@WEIGHT")
    return {"grader": "math"}


GROUP: Result = "true"
VLLM = lost("vLLM is no engine here: start SGLang servers and give their URL with --engine-url")

TRL = Dialect(
    "TRL",
    defaults={
        "epsilon": "0.2",
        "gradient_accumulation_steps": "1",
        "learning_rate": "1e-6",
        "lora_r": "16",
        "loss_type": "dapo",
        "lr_scheduler_type": "linear",
        "max_completion_length": "512",
        "max_steps": "-1",
        "num_generations": "8",
        "num_iterations": "1",
        "num_processes": "1",
        "num_train_epochs": "3",
        "per_device_train_batch_size": "8",
        "seed": "42",
        "use_peft": "false",
        "use_vllm": "false",
        "vllm_importance_sampling_clip_max": "3.0",
        "vllm_importance_sampling_correction": "true",
        "vllm_importance_sampling_mode": "sequence_mask",
    },
    always={
        "env": "geo3k_single",
        "device": "cuda",
        "dtype": "bfloat16",
        "beta2": "0.999",
        "warmup_steps": "0",
        "prompt_key": "prompt",
        "answer_key": "solution",
    },
    conversions={
        "per_device_train_batch_size": _batch,
        "gradient_accumulation_steps": used,
        "steps_per_generation": used,
        "generation_batch_size": used,
        "num_processes": _processes,
        "epsilon": _clip_low,
        "epsilon_high": used,
        "max_steps": _steps,
        "num_train_epochs": _epochs,
        "bf16": flag("bfloat16", {}),
        "fp16": neutral("false", "off there and here", "bfloat16 and float32 are the number formats here"),
        "use_cpu": flag("cpu", {}),
        "gradient_checkpointing": flag("1", "0"),
        "torch_compile": flag("on", "auto"),
        "lr_scheduler_type": words({"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}),
        "warmup_ratio": _warmup,
        "optim": lambda value, given: (
            SameHere("AdamW") if "adamw" in str(value) else NoCounterpart("the only optimizer is AdamW")
        ),
        "loss_type": words(
            {
                "dapo": "token-mean",
                "bnpo": "token-mean",
                "grpo": "seq-mean-token-mean",
                "dr_grpo": "constant",
            }
        ),
        "importance_sampling_level": words({"token": "ppo", "sequence": "gspo"}),
        "scale_rewards": words({"group": GROUP, "true": GROUP, "none": "false", "false": "false"}),
        "delta": lambda value, given: value,
        "reward_funcs": _rewards,
        "reward_weights": lost("a reward function has its weight in --reward NAME@WEIGHT"),
        "use_vllm": flag("sglang", "hf"),
        "vllm_mode": words({"colocate": {}, "server": VLLM("server", {})}),
        "vllm_server_base_url": VLLM,
        "vllm_server_host": VLLM,
        "vllm_server_port": VLLM,
        "vllm_server_timeout": VLLM,
        "vllm_importance_sampling_correction": _correction,
        "vllm_importance_sampling_mode": used,
        "vllm_importance_sampling_cap": used,
        "vllm_importance_sampling_c*": used,
        "vllm_gpu_memory_utilization": same_memory,
        "vllm_enable_sleep_mode": lost("servers keep their memory while the learner trains"),
        "use_peft": _lora,
        "lora_r": used,
        "lora_alpha": _lora_part("lora_alpha"),
        "lora_target_modules": _lora_part("lora_targets"),
        "log_completions": same("every episode is recorded"),
        "report_to": trackers,
        "save_steps": _steps,
        "save_strategy": words({"steps": {}, "no": {"save_every": "0"}}),
        "resume_from_checkpoint": RESUME,
        "eval_steps": eval_every,
        "eval_*": EVALUATION,
        "do_eval": EVALUATION,
        "logging_*": same("metrics are written at every step"),
        "dataset_train_split": neutral("train", "the split that is read", "give a file of the split to --data"),
        "dataset_*": lost("give the file itself to --data"),
        "shuffle_dataset": same("problems are shuffled in every epoch"),
        "remove_unused_columns": same("other columns reach the environment as metadata"),
        "attn_implementation": same("the learner's attention is packed, without a package of its own"),
        "dtype": words({"bfloat16": "bfloat16", "auto": "bfloat16", "float32": "float32"}),
        "torch_dtype": words({"bfloat16": {"dtype": "bfloat16"}, "auto": {"dtype": "bfloat16"}}),
        "trust_remote_code": lost("no code of a checkpoint runs"),
        "top_p": neutral("1", "the whole distribution is sampled", "the whole distribution is sampled here"),
        "top_k": neutral("0 -1", "the whole distribution is sampled", "the whole distribution is sampled here"),
        "push_to_hub": neutral("false", "nothing is uploaded", "upload the model folder yourself"),
        "hub_*": lost("upload the model folder yourself"),
        "deepspeed": lost("the learner is FSDP2"),
        "fsdp*": lost("the learner is always FSDP2"),
        "config_file": lost("accelerate's file: only --num_processes is read"),
    },
)
