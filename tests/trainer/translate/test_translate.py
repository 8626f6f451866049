"""Claims about `python -m trainer.translate`: what it prints runs here, in our units, and it names what is left."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import subprocess
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.config.cli import exit_code, parse
from envs.config.settings import changed, leaves, values_of
from envs.errors import UserError
from tests.paths import ROOT
from trainer.config.learner import ClusterConfig, LayoutConfig
from trainer.config.other_trainers import other_trainers
from trainer.config.run import RunConfig
from trainer.config.sources import SOURCES
from trainer.translate.__main__ import run
from trainer.translate.conversion import FUNCTIONS, Note
from trainer.translate.reading import read_settings
from trainer.translate.translation import TRAINERS, Translation, translate

#: The flags of slime's geometry example with several turns.
SLIME = """train.py --hf-checkpoint Qwen/Qwen3-VL-2B-Instruct --actor-num-nodes 1 --actor-num-gpus-per-node 4
--rollout-num-gpus 4 --colocate --multimodal-keys '{"image": "images"}' --input-key problem --label-key answer
--prompt-data VeraIsHere/geo3k_imgurl_processed --rm-type math --rollout-shuffle --num-rollout 3000
--custom-generate-function-path examples.geo3k_vlm_multi_turn.rollout.generate --rollout-batch-size 64
--n-samples-per-prompt 8 --rollout-max-response-len 4096 --rollout-temperature 1 --global-batch-size 512
--advantage-estimator grpo --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef 0.00
--eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.98 --train-backend megatron --tensor-model-parallel-size 4 --sequence-parallel
--recompute-granularity full --use-dynamic-batch-size --max-tokens-per-gpu 4096 --sglang-mem-fraction-static 0.6"""

#: The settings of RLinf's geometry example, as YAML in its form.
RLINF = r"""
defaults: [../hybrid_engines/fsdp@actor.fsdp_config]
cluster: {num_nodes: 1, component_placement: {"actor,rollout,reward": 0-7}}
runner:
  max_epochs: 25
  max_steps: 800
  seq_length: 8192
  max_tokens_per_mbs: 8192
  save_interval: 100
  val_check_interval: 1
algorithm:
  importance_sampling_fix: True
  importance_sampling_clip: 2
  group_size: 8
  n_minibatches: 1
  loss_agg_func: seq-mean-token-mean
  kl_beta: 0.0
  kl_penalty_type: low_var_kl
  ratio_clip_eps: 0.2
  clip_ratio_c: null # 3.0
  clip_ratio_low: 0.2
  clip_ratio_high: 0.28
  adv_type: grpo
  early_stop_imp_ratio: 5.0
  sampling_params:
    temperature: 1
    top_k: 1000000
    max_new_tokens: ${subtract:${runner.seq_length}, ${data.max_prompt_length}}
rollout:
  gpu_memory_utilization: 0.6
  model: {model_path: Qwen/Qwen3-VL-2B-Instruct, precision: bf16}
  rollout_backend: sglang
  sglang: {attention_backend: triton}
  tensor_parallel_size: 1
  max_running_requests: 64
data:
  type: vlm
  max_prompt_length: 4096
  rollout_batch_size: 64
  prompt_key: problem
  image_keys: ["images"]
  answer_key: answer
  train_data_paths: ["CAIR-HKISI/geo3k"]
  system_prompt: 'Solve it. The last line is Answer: \boxed{$Answer}.'
actor:
  enable_offload: True
  global_batch_size: ${int_div:${multiply:${algorithm.group_size}, ${data.rollout_batch_size}}, 1}
  model: {model_path: "${rollout.model.model_path}"}
  optim: {lr: 1e-06, adam_beta1: 0.9, adam_beta2: 0.98, weight_decay: 0.1, clip_grad: 1}
  lr_sched: {lr_decay_style: constant, lr_warmup_fraction: 0.01}
  fsdp_config: {reshard_after_forward: True, gradient_checkpointing: True}
reward: {reward_type: math, reward_max_val: 1, reward_min_val: 0}
"""

VERL = r"""python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=256 \
    data.max_prompt_length=2048 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-3B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=geo3k_tool_config.yaml \
    +actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 \
    data.train_files=/data/train.parquet \
    trainer.total_epochs=15
"""

TRL = """
model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct
dataset_name: owner/set
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
steps_per_generation: 16
num_generations: 8
max_completion_length: 1024
max_steps: 200
learning_rate: 1.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.1
beta: 0.04
loss_type: dr_grpo
use_vllm: true
use_peft: true
lora_target_modules: [q_proj, v_proj]
reward_funcs: [accuracy_reward, think_format_reward]
report_to: [wandb]
"""

SOURCES_OF = {"slime": SLIME, "rlinf.yaml": RLINF, "verl": VERL, "trl.yaml": TRL}


def translated(capsys: pytest.CaptureFixture[str], source: str, *flags: str) -> tuple[RunConfig, str]:
    """Return what our own parser reads in the printed command, and everything that was printed."""
    assert run([source, *flags]) == 0
    text = capsys.readouterr().out
    return read_back(text), text


def read_back(command: str) -> RunConfig:
    """Return what our own parser reads in a printed command, with the variables before it."""
    words = words_of(command)
    start = words.index("python")
    assert words[start : start + 3] == ["python", "-m", "trainer.run"]
    with patch.dict(os.environ, dict(word.split("=", 1) for word in words[:start])):
        return parse(RunConfig, words[start + 3 :], "python -m trainer.run", "", SOURCES)


def words_of(command: str) -> list[str]:
    """Return the words that a shell reads."""
    return shlex.split(command.replace("\\\n", " "), comments=True)


def value_of(config: RunConfig, field: str) -> object:
    return next(value for path, value in values_of(config).items() if path[-1] == field)


def written(folder: Path, name: str) -> str:
    """Return the command, or the path of the YAML."""
    if not name.endswith(".yaml"):
        return SOURCES_OF[name]
    (folder / name).write_text(SOURCES_OF[name])
    return str(folder / name)


def differing(config: RunConfig) -> dict[str, Any]:
    return {path[-1]: new for path, (_, new) in changed(config, RunConfig()).items()}


SEED = {
    "steps": 3000,
    "seed": 42,
    "max_new_tokens": 4096,
    "grader": "math",
    "data": "VeraIsHere/geo3k_imgurl_processed",
    "max_prompt_tokens": 4096,
    "model": "Qwen/Qwen3-VL-2B-Instruct",
    "dtype": "bfloat16",
    "context_length": 8192,
    "engine": "sglang",
    "num_servers": 4,
    "num_gpus": 4,
    "problems_per_step": 64,
    "lr": 1e-6,
    "warmup_steps": 0,
    "beta2": 0.98,
    "weight_decay": 0.1,
    "recompute": 1.0,
    "aggregation": "seq-mean-token-mean",
    "correction": "none",
}


def test_the_example_of_slime_becomes_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = translated(capsys, SLIME)
    assert differing(config) == SEED | {"backend": "megatron", "tp": 4, "sp": True}
    assert config.env.env == ("geo3k",)
    recipe = parse(RunConfig, ["--config", "slime-geo3k-multi-turn"], "", "", SOURCES)
    own = {"data", "seed", "grader", "max_turns", "backend", "tp", "sp"}
    assert {path[-1] for path in changed(config, recipe)} <= own


@pytest.mark.parametrize(
    ("source", "shared"),
    [
        ("train.py --tensor-model-parallel-size 2 --sequence-parallel --rollout-batch-size 4", {"tp": 2, "sp": True}),
        ("train.py --train-backend fsdp --tensor-model-parallel-size 2 --rollout-batch-size 4", {}),
        ("train.py --context-parallel-size 1 --sequence-parallel --rollout-batch-size 4", {}),
        (
            "train.py --expert-model-parallel-size 8 --expert-tensor-parallel-size 2 --context-parallel-size 4 "
            "--pipeline-model-parallel-size 2 --rollout-batch-size 4",
            {"ep": 8, "etp": 2, "cp": 4, "pp": 2},
        ),
        (
            "python -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatron "
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            {"pp": 2},
        ),
        (  # the ranks of the servers and the backend of the critic are others
            "x actor_rollout_ref.rollout.tensor_model_parallel_size=1 critic.strategy=fsdp "
            "actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.sequence_parallel=True "
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
            {"tp": 4, "sp": True},
        ),
        (
            "x actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.sequence_parallel=True",
            {"sp": False},
        ),
        (
            "python -m rlinf actor.training_backend=megatron actor.model.tensor_model_parallel_size=2 "
            "actor.model.sequence_parallel=True actor.model.variable_seq_lengths=False",
            {"tp": 2, "sp": True},
        ),
        ("python -m rlinf actor.training_backend=fsdp actor.model.variable_seq_lengths=False", {}),
    ],
)
def test_what_ranks_of_megatron_share_is_shared_here(
    source: str, shared: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = translated(capsys, source)
    expected = ClusterConfig(backend="megatron", **shared) if shared else ClusterConfig()
    fields = LayoutConfig.model_fields
    assert config.cluster.model_dump(include=set(fields)) == expected.model_dump(include=set(fields))


def test_the_example_of_rlinf_becomes_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = translated(capsys, written(tmp_path, "rlinf.yaml"))
    assert differing(config) == {
        "env": ("geo3k_single",),
        "steps": 800,
        "eval_every": 1,
        "max_new_tokens": 4096,
        "grader": "math",
        "reward_max_val": 1.0,
        "reward_min_val": 0.0,
        "data": "CAIR-HKISI/geo3k",
        "system_prompt": r"Solve it. The last line is Answer: \boxed{$Answer}.",
        "max_prompt_tokens": 4096,
        "model": "Qwen/Qwen3-VL-2B-Instruct",
        "dtype": "bfloat16",
        "context_length": 8192,
        "engine": "sglang",
        "num_servers": 8,
        "engine_args": "--attention-backend triton --max-running-requests 64",
        "num_gpus": 8,
        "problems_per_step": 64,
        "lr": 1e-6,
        "warmup_steps": 0,
        "beta2": 0.98,
        "weight_decay": 0.1,
        "max_tokens_per_microbatch": 8192,
        "recompute": 1.0,
        "reshard": "always",
        "offload": "optimizer",
        "aggregation": "seq-mean-token-mean",
        "save_every": 100,
    }
    assert "#   algorithm.early_stop_imp_ratio 5.0: a step is never cut short" in text
    recipe = parse(RunConfig, ["--config", "rlinf-qwen3-vl-2b-geo3k"], "", "", SOURCES)
    assert {path[-1] for path in changed(config, recipe)} <= {"data", "seed", "grader", "system_prompt", "eval_every"}


def test_a_command_of_verl_is_converted_to_our_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = translated(capsys, VERL)
    found = differing(config)
    assert (config.env.env, found["max_turns"], found["group_size"]) == (("geo3k",), 5, 16)
    assert (found["problems_per_step"], found["minibatches"]) == (256, 256 // 64), "both count prompts there"
    assert (found["num_gpus"], found["num_servers"], found["tensor_parallel"]) == (8, 4, 2)
    assert (found["kl_coef"], config.algorithm.kl_estimator, found["dual_clip"]) == (0.001, "k3", 3.0)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.2), "its default is symmetric"
    assert (found["prompt_key"], found["answer_key"]) == ("prompt", "reward_model.ground_truth")
    assert (found["save_every"], config.log.tracker) == (0, ("wandb",))
    assert (found["max_new_tokens"], found["max_prompt_tokens"], config.model.context_length) == (2048, 2048, 4096)
    assert "trainer.total_epochs 15: give --steps: epochs x rows / problems per step" in text
    assert "ppo_micro_batch_size_per_gpu 32: counts samples" in text


def test_a_configuration_of_trl_is_converted_to_our_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = translated(capsys, written(tmp_path, "trl.yaml"))
    found = differing(config)
    completions = 2 * 16  # per device and steps per generation, on one process
    assert found["problems_per_step"] == completions // 8
    assert found["minibatches"] == 16 // 4
    assert (config.steps, found["warmup_steps"]) == (200 // 4, 5), "its steps are updates"
    assert (found["lora_rank"], found["lora_targets"]) == (16, ("q_proj", "v_proj"))
    assert (found["aggregation"], found["kl_coef"], found["schedule"]) == ("constant", 0.04, "cosine")
    assert (found["correction"], found["correction_low"], found["correction_high"]) == ("mis", 0.0, 3.0)
    assert "reward_funcs accuracy_reward think_format_reward: write each for a finished episode" in text


@pytest.mark.parametrize(
    ("command", "field", "value"),
    [
        ("--use-kl-loss --kl-loss-coef 0.01", "kl_coef", 0.01),
        ("--kl-loss-coef 0.01", "kl_coef", 0.0),
        ("--calculate-per-token-loss", "aggregation", "token-mean"),
        ("--use-tis --tis-clip 4", "correction_cap", 4.0),
        ("--disable-grpo-std-normalization", "scale_by_std", False),
        ("--eps-clip 0.1", "clip_high", 0.1),
        ("--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64", "minibatches", 4),
        ("--rollout-batch-size 32 --over-sampling-batch-size 48", "oversample", 1.5),
        ("--num-rollout 200 --lr-warmup-fraction 0.05", "warmup_steps", 10),
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2", "num_servers", 4),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 8", "num_gpus", 16),
        ("--rollout-max-prompt-len 1000 --rollout-max-response-len 9000", "context_length", 10_000),
        ("--advantage-estimator gspo", "policy_loss", "gspo"),
        ("--partial-rollout", "stop_early", True),
        ("--use-wandb --use-tensorboard", "tracker", ("wandb", "tensorboard")),
        ('--multimodal-keys \'{"image": "image"}\'', "image_keys", "image"),
        ("--eval-prompt-data geo3k rows.parquet", "eval_data", "rows.parquet"),
        ("--prompt-data 2026", "data", "2026"),
        ("--calculate-per-token-loss 1", "aggregation", "token-mean"),
        ("--use-tis off", "correction", "none"),
        ("--use-kl-loss null --kl-loss-coef 0.01", "kl_coef", 0.0),
    ],
)
def test_values_of_slime_are_converted(
    command: str, field: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = translated(capsys, f"python train.py {command}", "--trainer", "slime")
    assert value_of(config, field) == value


@pytest.mark.parametrize(
    ("trainer", "settings", "field", "value"),
    [
        ("verl", "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", "offload", "optimizer"),
        ("verl", "a.fsdp_config.param_offload=True a.fsdp_config.optimizer_offload=True", "offload", "all"),
        (
            "verl",
            "actor_rollout_ref.ref.fsdp_config.param_offload=True a.fsdp_config.optimizer_offload=True",
            "offload",
            "optimizer",
        ),
        ("verl", "algorithm.rollout_correction.rollout_is=token", "correction", "tis"),
        ("verl", "a.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=200", "warmup_steps", 20),
        ("verl", "a.loss_agg_mode=seq-mean-token-sum-norm", "aggregation", "constant"),
        ("verl", "a.clip_ratio_high=0.28", "clip_high", 0.28),
        ("rlinf", "runner.experiment_name=007", "name", "007"),
        ("trl", "--epsilon 0.1", "clip_high", 0.1),
        ("trl", "--gradient_checkpointing yes", "recompute", 1.0),
        ("trl", "--loss_type grpo", "aggregation", "seq-mean-token-mean"),
        ("trl", "--importance_sampling_level sequence", "policy_loss", "gspo"),
        ("trl", "--scale_rewards none", "scale_by_std", False),
        ("trl", "--use_vllm --vllm_importance_sampling_mode token_truncate", "correction_cap", 3.0),
        ("trl", "--per_device_train_batch_size 16 --num_generations 4", "problems_per_step", 4),
        ("trl", "--max_steps 100 --num_iterations 2", "steps", 50),
    ],
)
def test_values_of_verl_trl_and_rlinf_are_converted(
    trainer: str, settings: str, field: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = re.sub(r"\ba\.", "actor_rollout_ref.actor.", settings)
    config, _ = translated(capsys, f"python x.py {settings}", "--trainer", trainer)
    assert value_of(config, field) == value


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("--advantage-estimator ppo", "--advantage-estimator ppo: known here: grpo, gspo"),
        ("--rollout-batch-size 10 --n-samples-per-prompt 8 --global-batch-size 64", "1.25 is no whole number"),
        ("--lr ${LR}", "--lr ${LR}: only the running script knows the value"),
        ("--global-batch-size 64", "could not be converted (KeyError: 'rollout_batch_size')"),
        ("--moe-foo 3", "--moe-foo 3: no setting here does this"),
        ("--prompt-data rows.jsonl@[0:64]", "rows.jsonl@[0:64]: give the file to --data, and how many"),
        ("--rollout-external-engine-addrs a:1", "a:1: give each server to --engine-url, as http://HOST:PORT"),
        ("--use-tis maybe", "--use-tis maybe: known here: true, false"),
        ("--hf-checkpoint m --ref-load other", "--ref-load other: the reference of --kl-coef is the --model"),
        ("--lr 1e-6", "--lr-decay-style (its default) linear: known here: constant, cosine"),
        ("--use-wandb --wandb-key 12345", "--wandb-key ...: a secret"),
    ],
)
def test_what_has_no_counterpart_is_named_with_its_reason(
    command: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = translated(capsys, f"python train.py {command}", "--trainer", "slime")
    assert line in text
    assert "12345" not in text


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("X=1 Y=a,b python -u train.py --lr 1", {"lr": "1"}),
        ("python -m verl.trainer.main_ppo a.b=1 c.d=2", {"a.b": "1", "c.d": "2"}),
        ("python train.py --custom-rm-path my/rm.py --lr 1", {"custom_rm_path": "my/rm.py", "lr": "1"}),
        ("trl grpo --report_to wandb tensorboard --beta -1", {"report_to": ["wandb", "tensorboard"], "beta": "-1"}),
        ("x.py --lr=1 +a.b=[x,y] ++c=null", {"lr": "1", "a.b": ["x", "y"], "c": "null"}),
    ],
)
def test_the_flags_and_overrides_of_a_command_are_its_settings(command: str, settings: dict[str, Any]) -> None:
    assert read_settings(command) == settings


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "translation.md").read_text()
    block = page.split("```console\n")[1].split("```")[0]
    command, _, shown = block.partition('"\n')
    _, text = translated(capsys, command.removeprefix('$ python -m trainer.translate "'))
    lines = text.splitlines()
    assert [line for line in shown.splitlines() if line not in (*lines, "...")] == []


def test_a_command_may_be_broken_over_lines(capsys: pytest.CaptureFixture[str]) -> None:
    broken, _ = translated(capsys, "python train.py --lr 1e-6 \\\n  --num-rollout 7\n --rollout-batch-size 4")
    assert (broken.optim.lr, broken.steps, broken.rollout.problems_per_step) == (1e-6, 7, 4)


def test_a_value_that_no_run_can_have_is_an_error_that_names_the_trainers_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(lambda: run(["python train.py --hf-checkpoint m --eps-clip 3"])) == 2
    assert capsys.readouterr().err.startswith("error: slime's --eps-clip: must be less than 1, got 3")


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("gone.yaml", "must be a file here, or a command in quotes"),
        ("run.sh", "must be YAML or a command in quotes"),
        ("bash run.sh", "must hold settings"),
        ("train.py --lr '1", "must be a command of a shell"),
        ("ls --color", "must have settings of slime, verl, trl, rlinf"),
    ],
)
def test_what_is_no_command_of_a_known_trainer_is_one_line(source: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        run([source])


def test_no_value_leaves_its_line_or_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    lines = f"a\\ntouch {mark}\\n"
    (tmp_path / "run.yaml").write_text(
        f'runner: {{max_steps: 8, zzz: "{lines}", "{lines}": 1}}\ndata: {{prompt_key: p, system_prompt: "{lines}"}}'
    )
    hostile = f"--hf-checkpoint 'a; touch {mark}' --lr 1e-6 --prompt-data '$(touch {mark})' --save '; touch {mark}'"
    with pytest.raises(UserError, match="must be a valid integer"):
        run([f'x.py --lr 1 --num-rollout \'__import__("os").mkdir("{mark}")\''])
    for source in (f"train.py {hostile}", str(tmp_path / "run.yaml")):
        assert run([source]) == 0
        printed = capsys.readouterr().out.replace("python -m trainer.run", "echo")
        subprocess.run(["bash", "-c", printed], check=True, stdout=subprocess.DEVNULL, timeout=20)
        assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.yaml",
            "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{n + 1}: &a{n + 1} {{x: *a{n}, y: *a{n}}}\n" for n in range(40)),
        ),
        ("b.yaml", "a0: &a0 [x, y]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))),
    ],
)
def test_a_source_that_grows_without_end_is_left_in_time(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    began = time.monotonic()
    with pytest.raises(UserError):
        run([str(tmp_path / name)])
    assert time.monotonic() - began < 5


def test_every_row_of_the_table_is_of_a_known_kind_and_names_settings_of_ours() -> None:
    kinds = {"to", "words", "is", "ranks", "if", "same", "lost", "only_if"}
    fields = {path[-1] for path, _ in leaves(RunConfig)}
    for trainer in other_trainers().values():
        for name in trainer.defaults:
            assert any(fnmatchcase(name, pattern) for pattern in trainer.settings), name
        assert trainer.always.keys() <= fields
        for name, row in trainer.settings.items():
            if isinstance(row, str):
                assert row in fields, name
                continue
            results = [result for result in row.get("words", {}).values() if isinstance(result, dict)]
            own = {row.get("to"), row.get("ranks"), *row.get("is", {}), *(key for each in results for key in each)}
            assert row.keys() <= kinds and own - {None, "same", "lost"} <= fields, name


@pytest.mark.parametrize(
    ("trainer", "name", "value"),
    [
        ("slime", "multimodal_keys", "[" * 20_000),
        ("slime", "rollout_max_response_len", "9" * 5000),
        ("trl", "max_completion_length", "\u00b2"),
    ],
)
def test_a_value_that_python_cannot_read_is_a_line_or_an_error_of_one(trainer: str, name: str, value: str) -> None:
    with contextlib.suppress(UserError):
        assert [line for line in translate({name: value}, trainer).notes() if "could not" in line or "must" in line]


@pytest.mark.parametrize(("trainer", "name"), [("verl", "trainer.logger"), ("trl", "report_to")])
def test_a_tracker_that_is_not_here_is_named(trainer: str, name: str) -> None:
    found = translate({name: ["wandb", "swanlab"]}, trainer)
    assert (name, ["wandb", "swanlab"], Note("known here: tensorboard, wandb")) in found.unsaid
    assert found.config.log.tracker == RunConfig().log.tracker
    assert translate({name: ["console", "wandb"]}, trainer).config.log.tracker == ("wandb",)


def test_a_name_in_a_formula_is_a_function_or_the_end_of_one_setting_alone() -> None:
    for trainer in other_trainers().values():
        rows = [row for row in trainer.settings.values() if isinstance(row, dict)]
        formulas = [*trainer.formulas.values(), *(row.get("only_if", "x") for row in rows)]
        formulas += [formula for row in rows for formula in row.get("is", {}).values()]
        parts = [part for formula in formulas for part in ast.walk(ast.parse(str(formula)))]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        names |= {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
        called = {part.func.id for part in parts if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)}
        assert called <= FUNCTIONS.keys() | {"either", "has", "v"}
        for name in names:
            assert sum(row == name or row.endswith(f".{name}") for row in trainer.settings) <= 1, name


VALUES = st.sampled_from(["true", "false", "0", "1", "2", "8", "0.5", "1e-6", "-1", "grpo", "a b", "", "$X", "[a, b]"])


@given(st.sampled_from([*TRAINERS]), st.data())
def test_any_settings_give_a_command_that_our_parser_reads_or_one_line(trainer: str, data: st.DataObject) -> None:
    theirs = other_trainers()[TRAINERS[trainer]]
    names = sorted({*(name for name in theirs.settings if "*" not in name), "other"})
    given_settings = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=6))
    try:
        found = translate(given_settings, trainer)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert isinstance(found, Translation)
    assert read_back(found.command()) == found.config
    lost = {name: note.reason for name, _, note in found.unsaid if not note.is_same}
    assert ("other" in given_settings) == (lost.get(theirs.spelt("other")) == "no setting here does this")
