"""verl's Hydra settings."""

from __future__ import annotations

from trainer.translate.dialect import (
    BACKENDS,
    EPOCHS,
    EVALUATION,
    MICRO_BATCH,
    OWN_REWARD,
    RESUME,
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
    one,
    same,
    same_memory,
    trackers,
    used,
    whole,
    words,
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def _gpus(value: Value, given: Given) -> Result:
    count = number(given, "trainer.n_gpus_per_node") * number(given, "trainer.nnodes")
    found = {
        "num_gpus": whole(count),
        "num_servers": whole(count / number(given, f"{_ROLLOUT}.tensor_model_parallel_size")),
    }
    return {name: number for name, number in found.items() if isinstance(number, str)}


def _minibatches(value: Value, given: Given) -> Result:
    return whole(number(given, "data.train_batch_size") / float(str(value)))


def _kl(value: Value, given: Given) -> Result:
    return value if is_true(given.get(f"{_ACTOR}.use_kl_loss")) else {"kl_coef": "0"}


def _clip(value: Value, given: Given) -> Result:
    """Convert `clip_ratio`, which holds where neither bound is given."""
    names = {"clip_low": f"{_ACTOR}.clip_ratio_low", "clip_high": f"{_ACTOR}.clip_ratio_high"}
    return {field: value for field, name in names.items() if name not in given}


def _offload(value: Value, given: Given) -> Result:
    is_all = is_true(given.get(f"{_ACTOR}.fsdp_config.param_offload"))
    return {"offload": "optimizer"} if is_true(value) and not is_all else {}


def _warmup(value: Value, given: Given) -> Result:
    steps = float(str(given.get("trainer.total_training_steps", "0")))
    return {"warmup_steps": f"{float(str(value)) * steps:.0f}"} if float(str(value)) else {}


def _warmup_steps(value: Value, given: Given) -> Result:
    return value if float(str(value)) >= 0 else {}


def _tools(value: Value, given: Given) -> Result:
    if "geo3k" in str(value):
        return {"env": "geo3k"}
    return NoCounterpart("tools are methods of an environment: name yours with --env")


def _correction(value: Value, given: Given) -> Result:
    cap = str(given.get("algorithm.rollout_correction.rollout_is_threshold", "2.0"))
    return words({"token": {"correction": "tis", "correction_cap": cap}, "null": "none", "none": "none"})(value, given)


ONLY_FILE = lost("its values are not read from there: translate the file too")

VERL = Dialect(
    "verl",
    defaults={
        f"{_ACTOR}.clip_ratio": "0.2",
        f"{_ACTOR}.clip_ratio_c": "3.0",
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        f"{_ACTOR}.optim.lr": "1e-6",
        f"{_ACTOR}.optim.weight_decay": "0.01",
        f"{_ACTOR}.ppo_mini_batch_size": "256",
        f"{_ACTOR}.kl_loss_coef": "0.001",
        f"{_ROLLOUT}.tensor_model_parallel_size": "2",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "true",
        "data.max_prompt_length": "512",
        "data.max_response_length": "512",
        "data.prompt_key": "prompt",
        "data.train_batch_size": "1024",
        "trainer.n_gpus_per_node": "8",
        "trainer.nnodes": "1",
        "algorithm.rollout_correction.rollout_is": "null",
    },
    always={
        "env": "geo3k_single",
        "engine": "sglang",
        "dtype": "bfloat16",
        "beta2": "0.999",
        "warmup_steps": "0",
        "answer_key": "reward_model.ground_truth",
    },
    conversions={
        "trainer.n_gpus_per_node": _gpus,
        "trainer.nnodes": used,
        f"{_ROLLOUT}.tensor_model_parallel_size": lambda value, given: value,
        f"{_ACTOR}.ppo_mini_batch_size": _minibatches,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": MICRO_BATCH,
        f"{_ACTOR}.ppo_micro_batch_size": MICRO_BATCH,
        "*log_prob_micro_batch_size*": MICRO_BATCH,
        f"{_ACTOR}.use_dynamic_bsz": same("streams are packed up to a number of tokens"),
        f"{_ACTOR}.clip_ratio": _clip,
        f"{_ACTOR}.use_kl_loss": used,
        f"{_ACTOR}.kl_loss_coef": _kl,
        f"{_ACTOR}.kl_loss_type": words(
            {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
        ),
        f"{_ACTOR}.loss_agg_mode": words(
            {
                "token-mean": "token-mean",
                "seq-mean-token-sum": "seq-mean-token-sum",
                "seq-mean-token-mean": "seq-mean-token-mean",
                "seq-mean-token-sum-norm": "constant",
            }
        ),
        f"{_ACTOR}.policy_loss.loss_mode": words({"vanilla": "ppo", "gspo": "gspo"}),
        f"{_ACTOR}.optim.lr_warmup_steps": _warmup_steps,
        f"{_ACTOR}.optim.lr_warmup_steps_ratio": _warmup,
        f"{_ACTOR}.optim.warmup_style": words({"constant": "constant", "cosine": "cosine"}),
        f"{_ACTOR}.optim.lr_scheduler_type": words(
            {"constant": {"schedule": "constant"}, "cosine": {"schedule": "cosine"}}
        ),
        f"{_ACTOR}.fsdp_config.param_offload": flag("all", {}),
        f"{_ACTOR}.fsdp_config.optimizer_offload": _offload,
        f"{_ACTOR}.fsdp_config.reshard_after_forward": flag("always", "never"),
        f"{_ACTOR}.strategy": BACKENDS,
        **megatron(f"{_ACTOR}.megatron.", f"{_ACTOR}.strategy"),
        f"{_ACTOR}.use_torch_compile": flag({"compile": "auto"}, "off"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": flag("1", "0"),
        "actor_rollout_ref.model.use_remove_padding": same("streams are packed without padding"),
        "actor_rollout_ref.model.trust_remote_code": lost("no code of a checkpoint runs"),
        "actor_rollout_ref.model.target_modules": lambda value, given: {} if value == "all-linear" else value,
        "actor_rollout_ref.ref.*": lost("the reference is a frozen copy in the learner"),
        f"{_ROLLOUT}.name": words({"sglang": "sglang", "vllm": "sglang", "hf": "hf"}),
        f"{_ROLLOUT}.n": group,
        f"{_ROLLOUT}.mode": same("episodes run concurrently"),
        f"{_ROLLOUT}.gpu_memory_utilization": same_memory,
        f"{_ROLLOUT}.dtype": same("bfloat16 throughout"),
        f"{_ROLLOUT}.multi_turn.enable": used,
        f"{_ROLLOUT}.multi_turn.tool_config_path": _tools,
        f"{_ROLLOUT}.multi_turn.format": words({"hermes": "hermes", "qwen3_coder": "qwen_xml"}),
        f"{_ROLLOUT}.over_sample_rate": lambda value, given: f"{1 + float(str(value)):g}",
        f"{_ROLLOUT}.top_p": neutral(
            "1", "the whole distribution is sampled", "the whole distribution is sampled here"
        ),
        f"{_ROLLOUT}.top_k": neutral(
            "-1", "the whole distribution is sampled", "the whole distribution is sampled here"
        ),
        f"{_ROLLOUT}.*": lost("give it to the servers with --engine-args, if SGLang has it"),
        "algorithm.adv_estimator": words(
            {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus_baseline": "reinforce++"}
        ),
        "algorithm.use_kl_in_reward": neutral("false", "no KL in the reward", "KL is a term of the loss: --kl-coef"),
        "algorithm.kl_ctrl.*": lost("KL is a term of the loss here: --kl-coef"),
        "algorithm.rollout_correction.rollout_is": _correction,
        "algorithm.rollout_correction.rollout_is_threshold": used,
        "data.train_files": one,
        "data.val_files": one,
        "data.truncation": neutral("error", "nothing is cut", "prompts are never cut: longer ones are left out"),
        "data.filter_overlong_prompts": flag(
            SameHere("longer prompts are left out and counted"), NoCounterpart("longer prompts are left out")
        ),
        "data.return_raw_chat": same("messages stay messages"),
        "data.shuffle": neutral("true", "problems are shuffled in every epoch", "problems are always shuffled"),
        "data.val_batch_size": EVALUATION,
        "custom_reward_function.*": OWN_REWARD,
        "reward_model.*": lost("the reward is the environment's: Env.reward"),
        "critic.*": lost("no algorithm here has a critic"),
        "trainer.critic_warmup": neutral("0", "there is no critic", "no algorithm here has a critic"),
        "trainer.logger": trackers,
        "trainer.device": words({"cuda": {}, "cpu": "cpu"}),
        "trainer.save_freq": lambda value, given: "0" if float(str(value)) < 0 else value,
        "trainer.test_freq": eval_every,
        "trainer.val_*": EVALUATION,
        "trainer.total_epochs": EPOCHS,
        "trainer.resume_mode": RESUME,
        "trainer.resume_from_path": RESUME,
        "config_path": ONLY_FILE,
        "config_name": ONLY_FILE,
    },
)
