"""slime's command-line flags, those of Megatron and SGLang that it passes on included."""

from __future__ import annotations

import json
from pathlib import Path

from envs.config.files import parse_yaml
from envs.errors import UserError
from trainer.translate.dialect import (
    BACKENDS,
    EPOCHS,
    EVALUATION,
    MICRO_BATCH,
    OWN_REWARD,
    RESUME,
    SECRET,
    SHARED_MEMORY,
    Dialect,
    Given,
    NoCounterpart,
    Result,
    SameHere,
    Value,
    eval_every,
    flag,
    group,
    is_true,
    lost,
    megatron,
    neutral,
    number,
    same,
    server_argument,
    used,
    whole,
    words,
)
from trainer.translate.reading import text_of_file


def _gpus(value: Value, given: Given) -> Result:
    count = whole(number(given, "actor_num_gpus_per_node") * number(given, "actor_num_nodes"))
    if not isinstance(count, str) or not is_true(given.get("colocate")) or "rollout_num_gpus" in given:
        return count
    return {"num_gpus": count, **_number_of("num_servers", float(count) / number(given, "rollout_num_gpus_per_engine"))}


def _number_of(field: str, value: float) -> dict[str, Value]:
    count = whole(value)
    return {field: count} if isinstance(count, str) else {}


def _servers(value: Value, given: Given) -> Result:
    return whole(number(given, "rollout_num_gpus") / number(given, "rollout_num_gpus_per_engine"))


def _minibatches(value: Value, given: Given) -> Result:
    return whole(number(given, "rollout_batch_size") * number(given, "n_samples_per_prompt") / float(str(value)))


def _oversample(value: Value, given: Given) -> Result:
    share = max(1.0, float(str(value)) / number(given, "rollout_batch_size"))
    return {"oversample": f"{share:g}", "max_oversample": f"{max(3.0, share):g}"}


def _clip_low(value: Value, given: Given) -> Result:
    return {"clip_low": value, "clip_high": given.get("eps_clip_high", value)}


def _kl(value: Value, given: Given) -> Result:
    return value if is_true(given.get("use_kl_loss")) else {"kl_coef": "0"}


def _images(value: Value, given: Given) -> Result:
    try:
        columns = json.loads(str(value))
        return columns["image"] if len(columns) == 1 else NoCounterpart("only pictures are read here")
    except (json.JSONDecodeError, KeyError, TypeError):
        return NoCounterpart('is no {"image": COLUMN}')


def _rows(value: Value, given: Given) -> Result:
    """Convert `path@[0:64]`, which takes the first rows."""
    path, _, part = str(value).partition("@[")
    first, _, last = part.removesuffix("]").partition(":")
    if not part:
        return value
    if first not in ("", "0") or not last.isdigit():
        return NoCounterpart("only the first rows can be chosen here, with --train-size")
    return {"data": path, "train_size": last}


def _held_out(value: Value, given: Given) -> Result:
    """Convert the pairs of name and path."""
    return value[1] if isinstance(value, list) and len(value) == 2 else NoCounterpart("give one file to --eval-data")


def _generate(value: Value, given: Given) -> Result:
    if "geo3k_vlm_multi_turn" in str(value):
        return "geo3k"
    return NoCounterpart("register its environment with `compat: slime` and name it with --env")


def _custom_config(value: Value, given: Given) -> Result:
    try:
        found = parse_yaml(text_of_file(Path(str(value))), str(value))
        return {"max_turns": str(found["max_turns"])}
    except (KeyError, TypeError, UserError):
        return NoCounterpart("could not be read: its max_turns is --max-turns here, its environment --env")


def _checkpoint(value: Value, given: Given) -> Result:
    if value == given.get("hf_checkpoint"):
        return SameHere("the model itself")
    return RESUME(value, given)


def _warmup(value: Value, given: Given) -> Result:
    return {"warmup_steps": f"{float(str(value)) * number(given, 'num_rollout'):.0f}"}


def _server_memory(value: Value, given: Given) -> Result:
    return SHARED_MEMORY if is_true(given.get("colocate")) else value


PARTIAL = {"max_staleness": "1", "stop_early": "true"}

SLIME = Dialect(
    "slime",
    defaults={
        "actor_num_gpus_per_node": "8",
        "actor_num_nodes": "1",
        "adam_beta2": "0.999",
        "advantage_estimator": "grpo",
        "calculate_per_token_loss": "false",
        "eps_clip": "0.2",
        "input_key": "input",
        "lr": "1e-6",
        "lr_decay_style": "linear",
        "n_samples_per_prompt": "1",
        "rollout_max_prompt_len": "4096",
        "rollout_num_gpus_per_engine": "1",
        "rollout_seed": "42",
        "use_tis": "false",
        "weight_decay": "0.01",
    },
    always={"env": "geo3k_single", "engine": "sglang", "dtype": "bfloat16", "warmup_steps": "0"},
    conversions={
        "actor_num_gpus_per_node": _gpus,
        "actor_num_nodes": used,
        "rollout_num_gpus": _servers,
        "advantage_estimator": words(
            {
                "grpo": "grpo",
                "gspo": {"advantage": "grpo", "policy_loss": "gspo"},
                "reinforce_plus_plus_baseline": "reinforce++",
            }
        ),
        "calculate_per_token_loss": flag("token-mean", "seq-mean-token-mean"),
        "disable_grpo_std_normalization": flag("false", "true"),
        "dynamic_sampling_filter_path": lambda value, given: (
            "true" if "nonzero_std" in str(value) else NoCounterpart("only groups of equal rewards can be replaced")
        ),
        "over_sampling_batch_size": _oversample,
        "partial_rollout": flag(PARTIAL, {}),
        "global_batch_size": _minibatches,
        "num_epoch": EPOCHS,
        "n_samples_per_prompt": group,
        "micro_batch_size": MICRO_BATCH,
        "eps_clip": _clip_low,
        "eps_clip_high": used,
        "use_kl_loss": used,
        "kl_loss_coef": _kl,
        "kl_loss_type": words({"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}),
        "kl_coef": neutral("0", "no KL in the reward", "KL is a term of the loss here: --kl-coef"),
        "use_tis": flag("tis", "none"),
        "update_weight_transport": words({"nccl": {"sync": "auto"}, "disk": "disk"}),
        "lr_decay_style": words({"constant": "constant", "cosine": "cosine"}),
        "lr_warmup_fraction": _warmup,
        "optimizer": neutral("adam", "AdamW", "the only optimizer is AdamW"),
        "optimizer_cpu_offload": flag("optimizer", {}),
        "recompute_granularity": words({"full": "1", "selective": SameHere("attention keeps no scores")}),
        "recompute_*": same("a recomputed block is one layer"),
        "rm_type": words({"math": "math", "dapo": "math", "deepscaler": "math"}),
        "custom_rm_path": OWN_REWARD,
        "rollout_function_path": lost("episodes are played by the agent loop; supervised training is trainer.sft"),
        "loss_type": neutral("policy_loss", "the default", "supervised training is python -m trainer.sft"),
        "prompt_data": _rows,
        "multimodal_keys": _images,
        "tool_key": neutral("tools", "the column is read", "rename the column to tools"),
        "metadata_key": neutral("metadata", "the column is read", "rename the column to metadata"),
        "eval_prompt_data": _held_out,
        "eval_interval": eval_every,
        "eval_*": EVALUATION,
        "n_samples_per_eval_prompt": EVALUATION,
        "skip_eval_before_train": EVALUATION,
        "custom_generate_function_path": _generate,
        "custom_config_path": _custom_config,
        "load": _checkpoint,
        "ref_load": _checkpoint,
        "load_debug_rollout_data": lost("python -m agents.replay reads slime's dumps"),
        "save_debug_rollout_data": same("every episode is recorded"),
        "rollout_external_engine_addrs": lambda value, given: {
            "engine_url": [f"http://{each}" for each in (value if isinstance(value, list) else [value])]
        },
        "rollout_top_p": neutral("1", "the whole distribution is sampled", "the whole distribution is sampled here"),
        "rollout_top_k": neutral("-1", "the whole distribution is sampled", "the whole distribution is sampled here"),
        "colocate": same("servers share the learners' GPUs where there are no others"),
        "apply_chat_template": same("prompts always go through the chat template"),
        "rollout_shuffle": same("problems are shuffled in every epoch"),
        "use_dynamic_batch_size": same("streams are packed up to a number of tokens"),
        "balance_data": same("ranks get equal shares of tokens"),
        "train_backend": BACKENDS,
        **megatron("", "train_backend"),
        "attention_dropout": neutral("0", "no dropout", "no dropout here"),
        "hidden_dropout": neutral("0", "no dropout", "no dropout here"),
        "accumulate_allreduce_grads_in_fp32": same("gradients are float32"),
        "attention_softmax_in_fp32": same("attention sums in float32"),
        "attention_backend": lost("the learner's attention is torch's varlen attention"),
        "megatron_to_hf_mode": same("weights keep the names of Hugging Face"),
        "rotary_base": same("read from the checkpoint"),
        "*_parallel*": lost("--tp, --pp, --ep, --etp, --cp and --sp are all that Megatron's ranks share here"),
        "use_wandb": flag({"tracker": ["wandb"]}, {}),
        "use_tensorboard": flag({"tracker": ["tensorboard"]}, {}),
        "wandb_key": SECRET,
        "wandb_*": lost("a run's name is --name"),
        "disable_wandb_random_suffix": same("the run's name is used as it is"),
        "sglang_mem_fraction_static": _server_memory,
        "sglang_attention_backend": server_argument("attention-backend"),
        "sglang_mm_attention_backend": server_argument("mm-attention-backend"),
        "sglang_ep_size": server_argument("ep-size"),
        "sglang_max_running_requests": server_argument("max-running-requests"),
        "sglang_cuda_graph_*": lost("only concerns speed: our servers capture the sizes that the run needs"),
        "sglang_speculative_*": lost("speculative decoding was not tried here"),
        "sglang_router*": lost("the client itself spreads episodes over servers"),
        "sglang_server_concurrency": lost("--max-concurrent bounds the episodes in progress"),
        "sglang_*": lost("give it to the servers with --engine-args"),
    },
    is_flags=True,
)
