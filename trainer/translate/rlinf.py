"""RLinf's YAML."""

from __future__ import annotations

import re

from trainer.translate.dialect import (
    BACKENDS,
    EPOCHS,
    EVALUATION,
    MICRO_BATCH,
    RESUME,
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
    megatron,
    neutral,
    number,
    one,
    same,
    same_memory,
    server_argument,
    trackers,
    used,
    whole,
    words,
)


def _gpus(value: Value, given: Given) -> Result:
    """Convert a range of GPUs; `all` depends on the cluster."""
    bounds = re.fullmatch(r"(\d+)-(\d+)", str(value))
    if not bounds:
        return NoCounterpart("how many GPUs there are is not said: give --num-gpus N --num-servers N")
    count = int(bounds[2]) - int(bounds[1]) + 1
    servers = whole(count / number(given, "rollout.tensor_parallel_size"))
    return {"num_gpus": str(count), **({"num_servers": servers} if isinstance(servers, str) else {})}


def _clip(value: Value, given: Given) -> Result:
    """Convert the bound that holds where its side is not given."""
    names = {"clip_low": "algorithm.clip_ratio_low", "clip_high": "algorithm.clip_ratio_high"}
    return {field: value for field, name in names.items() if name not in given}


def _correction(value: Value, given: Given) -> Result:
    if not is_true(value):
        return {"correction": "none"}
    return {"correction": "tis", "correction_cap": given.get("algorithm.importance_sampling_clip", "2.0")}


def _steps(value: Value, given: Given) -> Result:
    return value if float(str(value)) > 0 else {}


def _epochs(value: Value, given: Given) -> Result:
    return {} if float(str(given.get("runner.max_steps", "-1"))) > 0 else EPOCHS(value, given)


def _file(value: Value, given: Given) -> Result:
    path = one(value, given)
    return NoCounterpart("a path to be filled in: give --data") if str(path).startswith("/path/to") else path


def _held_out(value: Value, given: Given) -> Result:
    path = one(value, given)
    return NoCounterpart("a path to be filled in") if str(path).startswith("/path/to") else {"eval_data": str(path)}


def _images(value: Value, given: Given) -> Result:
    columns = value if isinstance(value, list) else [value]
    return columns[0] if len(columns) == 1 else NoCounterpart("one column holds all pictures of a row here")


def _model(value: Value, given: Given) -> Result:
    return NoCounterpart("a path to be filled in: give --model") if str(value).startswith("/path/to") else value


RLINF = Dialect(
    "RLinf",
    defaults={
        "algorithm.importance_sampling_fix": "false",
        "rollout.tensor_parallel_size": "1",
    },
    always={"env": "geo3k_single", "engine": "sglang", "warmup_steps": "0"},
    conversions={
        "*.group_name": same("only a name"),
        "cluster.component_placement*": _gpus,
        "cluster.num_nodes": used,
        "runner.max_steps": _steps,
        "runner.max_epochs": _epochs,
        "runner.val_check_interval": eval_every,
        "runner.resume_dir": RESUME,
        "runner.logger.logger_backends": trackers,
        "runner.logger.log_path": used,
        "runner.experiment_name": lambda value, given: {"name": value},
        "runner.enable_dynamic_batch_size": same("streams are packed up to a number of tokens"),
        "runner.task_type": neutral("reasoning", "episodes with a reward at their end", "no counterpart"),
        "algorithm.importance_sampling_fix": _correction,
        "algorithm.importance_sampling_clip": used,
        "algorithm.ratio_clip_eps": _clip,
        "algorithm.kl_penalty_type": words(
            {"low_var_kl": "k3", "k3": "k3", "k2": "k2", "mse": "k2", "k1": "k1", "kl": "k1"}
        ),
        "algorithm.loss_agg_func": words(
            {
                "token-mean": "token-mean",
                "seq-mean-token-mean": "seq-mean-token-mean",
                "seq-mean-token-sum": "seq-mean-token-sum",
            }
        ),
        "algorithm.adv_type": words({"grpo": "grpo"}),
        "algorithm.loss_type": neutral("actor", "the policy's loss", "only the policy has a loss here"),
        "algorithm.normalize_advantages": neutral(
            "false", "off there and here", "--advantage reinforce++ divides by the step's deviation"
        ),
        "algorithm.early_stop_imp_ratio": lost("a step is never cut short; the ratio is clipped"),
        "algorithm.use_valid_token_scale": neutral(
            "false", "off there and here", "--aggregation says how tokens are weighted"
        ),
        "algorithm.recompute_logprobs": same("the learner computes log-probs with its own weights"),
        "algorithm.shuffle_rollout": lost("the order within a step does not change the update"),
        "algorithm.calculate_entropy": same("the entropy is a metric of every step"),
        "algorithm.*batch_size*": MICRO_BATCH,
        "algorithm.sampling_params.do_sample": neutral("true", "tokens are sampled", "--temperature is above 0"),
        "algorithm.sampling_params.top_k": neutral(
            "1000000 -1", "the whole distribution is sampled", "the whole distribution is sampled here"
        ),
        "algorithm.sampling_params.top_p": neutral(
            "1", "the whole distribution is sampled", "the whole distribution is sampled here"
        ),
        "algorithm.sampling_params.repetition_penalty": neutral("1", "none there and here", "no penalty here"),
        "algorithm.sampling_params.min_new_tokens": neutral("0 1", "a turn has a token", "no least length here"),
        "rollout.model.model_path": _model,
        "actor.model.model_path": _model,
        "rollout.model.model_type": same("read from the checkpoint"),
        "actor.model.model_type": same("read from the checkpoint"),
        "rollout.model.precision": words({"bf16": {"dtype": "bfloat16"}, "fp32": {"dtype": "float32"}}),
        "rollout.rollout_backend": words({"sglang": "sglang", "vllm": "sglang"}),
        "rollout.gpu_memory_utilization": same_memory,
        "rollout.sglang.attention_backend": server_argument("attention-backend"),
        "rollout.max_running_requests": server_argument("max-running-requests"),
        "rollout.validate_weight*": same("a probe compares the weights after every push"),
        "rollout.return_logprobs": same("every sampled token has its log-prob"),
        "rollout.vllm.*": lost("the servers are SGLang's"),
        "rollout.*": lost("give it to the servers with --engine-args, if SGLang has it"),
        "data.type": used,
        "data.dataset_name": neutral(
            "base", "rows of problem, answer, images", "name columns with --prompt-key and so on"
        ),
        "data.train_data_paths": _file,
        "data.val_data_paths": _held_out,
        "data.image_keys": _images,
        "data.system_prompt": lambda value, given: {"system_prompt": value},
        "data.use_chat_template": same("prompts always go through the chat template"),
        "data.shuffle": same("problems are shuffled in every epoch"),
        "data.filter_prompt_by_length": flag(
            SameHere("longer prompts are left out and counted"), NoCounterpart("longer prompts are left out")
        ),
        "data.seed": lost("one --seed serves data, model and sampling"),
        "data.val*": EVALUATION,
        "data.*": lost("rows are checked before step 0 and decoded when they are used"),
        "actor.training_backend": BACKENDS,
        **megatron("actor.model.", "actor.training_backend"),
        "actor.model.recompute_granularity": words({"full": "1", "selective": SameHere("attention keeps no scores")}),
        "actor.enable_offload": flag("optimizer", {}),
        "actor.fsdp_config.gradient_checkpointing": flag("1", "0"),
        "actor.fsdp_config.reshard_after_forward": flag("always", "never"),
        "actor.fsdp_config.strategy": neutral("fsdp fsdp2", "FSDP2", "--backend fsdp is FSDP2"),
        "actor.fsdp_config.mixed_precision.param_dtype": words(
            {"bf16": {"dtype": "bfloat16"}, "fp32": {"dtype": "float32"}}
        ),
        "actor.fsdp_config.*": lost("FSDP2 is configured by --reshard, --offload and --recompute alone"),
        "actor.model.precision": neutral("fp32", "weights are kept in float32", "weights are kept in float32 here"),
        "actor.model.is_lora": neutral("false", "off there and here", "--lora-rank"),
        "actor.model.sharding_strategy": same("weights are sharded over all ranks"),
        "actor.model.*": lost("read from the checkpoint, or of other backends"),
        "actor.tokenizer.*": same("read from the checkpoint"),
        "actor.optim.optimizer": neutral("adam adamw", "AdamW", "the only optimizer is AdamW"),
        "actor.optim.bf16": used,
        "actor.optim.fp16": neutral("false", "off there and here", "bfloat16 and float32 are the number formats here"),
        "actor.optim.lr_scheduler": words({"constant": "constant", "cosine": "cosine"}),
        "actor.optim.*": lost("AdamW has no such setting here"),
        "actor.lr_sched.lr_decay_style": words(
            {"constant": {"schedule": "constant"}, "cosine": {"schedule": "cosine"}}
        ),
        "actor.lr_sched.*": lost("the learner of FSDP does not read it there; --warmup-steps is ours"),
        "actor.global_batch_size": same("group_size x rollout_batch_size / n_minibatches episodes an update"),
        "actor.micro_batch_size": MICRO_BATCH,
        "actor.*": lost("it concerns RLinf's other backends"),
        "reward.reward_type": words({"math": {"grader": "math"}}),
        "reward.reward_max_val": lambda value, given: {"reward_max_val": value},
        "reward.reward_min_val": lambda value, given: {"reward_min_val": value},
        "reward.use_reward_model": neutral("false", "the environment grades", "the reward is the environment's"),
        "reward.reward_scale": neutral("1", "none there and here", "--reward-max-val"),
        "reward.tokenizer.*": same("rewards are graded as text"),
        "critic.*": neutral("false", "there is no critic", "no algorithm here has a critic"),
        "hydra.*": used,
        "defaults": used,
    },
)
