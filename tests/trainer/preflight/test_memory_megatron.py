"""Claims about the memory estimate of Megatron: counts are those of a network cut by hand, and layouts cost what they
must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor
from transformers import AutoTokenizer

from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from envs.config.cli import exit_code
from tests.tiny_models import tiny_config
from trainer.config.learner import LearnerConfig
from trainer.learner.layout import Layout
from trainer.learner.lora import add_lora
from trainer.learner.sharding import freeze_vision
from trainer.learner.weights_io import meta_model
from trainer.memory import run
from trainer.preflight.memory_estimate import estimate
from trainer.preflight.memory_megatron import stage_parameters
from trainer.preflight.memory_terms import GIB, Plan
from trainer.preflight.qwen3_vl import qwen3_vl_config

#: The axis along which tensor-parallel ranks cut a tensor, by the end of its name; they hold all others whole.
AXES = {
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "q_proj.weight": 0,
    "q_proj.bias": 0,
    "k_proj.weight": 0,
    "k_proj.bias": 0,
    "v_proj.weight": 0,
    "v_proj.bias": 0,
    "o_proj.weight": 1,
    "gate_proj.weight": 0,
    "up_proj.weight": 0,
    "down_proj.weight": 1,
    "attn.qkv.weight": 0,
    "attn.qkv.bias": 0,
    "attn.proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_fc2.weight": 1,
}


def tiny(model_type: str, tied: bool = True) -> PolicyModel:
    return meta_model(tiny_config(model_type, AutoTokenizer.from_pretrained(STARTER_PATH), tied))


def piece(name: str, tensor: Tensor, layout: Layout, tp_rank: int, ep_rank: int, etp_rank: int) -> Tensor:
    """Cut a tensor as Megatron does, on the meta device."""
    if "mlp.experts." in name:
        own = tensor.chunk(layout.expert)[ep_rank]
        return own.chunk(layout.expert_tensor, 1 if name.endswith("gate_up_proj") else 2)[etp_rank]
    axis = next((axis for end, axis in AXES.items() if name.endswith(end)), None)
    return tensor if axis is None else tensor.chunk(layout.tensor, axis)[tp_rank]


def by_hand(model: PolicyModel, layout: Layout, stage: int, tp_rank: int, ep_rank: int, etp_rank: int) -> int:
    """Return the values on one rank: every tensor of the network is cut, and those of its stage are counted."""
    layers = model.config.get_text_config().num_hidden_layers
    own = range(stage * layers // layout.pipeline, (stage + 1) * layers // layout.pipeline)
    ends = {"first": stage == 0, "last": stage == layout.pipeline - 1}
    total = 0
    for name, tensor in model.state_dict().items():
        if "language_model.layers." in name or name.startswith("backbone.model.layers."):
            is_here = int(name.split("layers.")[1].split(".")[0]) in own
        elif name.endswith("lm_head.weight"):  # one tensor with a tied embedding, unless stages are apart
            is_tied = model.backbone.lm_head.weight is model.architecture.decoder(model.backbone).embed_tokens.weight
            is_here = ends["last"] and not (is_tied and ends["first"])
        else:
            is_here = ends["first"] if ".visual." in name or "embed_tokens" in name else ends["last"]
        total += piece(name, tensor, layout, tp_rank, ep_rank, etp_rank).numel() if is_here else 0
    return total


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("qwen3_vl", Layout()),
        ("qwen3_vl", Layout(tensor=2)),
        ("qwen3_vl", Layout(tensor=2, pipeline=3, context=2)),
        ("qwen2", Layout(tensor=2, pipeline=3)),
        ("qwen3", Layout(tensor=2)),
        ("llama", Layout(pipeline=3)),
        ("qwen3_vl_moe", Layout(tensor=2, sequence=True)),
        ("qwen3_vl_moe", Layout(tensor=2, pipeline=3, expert=2, expert_tensor=2, sequence=True)),
    ],
)
def test_a_rank_holds_what_is_left_when_the_network_is_cut_by_hand(model_type: str, layout: Layout, tied: bool) -> None:
    model = tiny(model_type, tied)
    found = [count.total for count in stage_parameters(model, layout)]
    for stage in range(layout.pipeline):
        for ranks in [(0, 0, 0), (layout.tensor - 1, layout.expert - 1, layout.expert_tensor - 1)]:
            assert found[stage] == by_hand(model, layout, stage, *ranks), (stage, ranks)


def test_experts_are_cut_by_their_own_sizes_and_the_rest_by_tensor_ranks() -> None:
    model = meta_model(qwen3_vl_config("30b-a3b"))
    experts = 48 * 128 * 3 * 2048 * 768
    whole = stage_parameters(model, Layout())[0]
    assert whole.total == 31_070_754_032 and whole.trained_experts == experts
    (eight,) = stage_parameters(model, Layout(expert=8))
    assert (eight.trained_experts, eight.trained) == (experts // 8, whole.trained)
    found = estimate(model, Plan(num_gpus=16, layout=Layout(expert=8)))
    assert found.weights == 2 * (whole.trained + experts // 8) and found.gradients == 2 * found.weights
    # 16 ranks hold the same weights but those of the experts, of which there are two copies.
    assert found.optimizer == -(-12 * whole.trained // 16) + 12 * experts // 8 // 2


def test_a_block_on_one_rank_is_the_arithmetic_by_hand() -> None:
    plan = Plan(num_gpus=1, tokens=96, patches=80, layout=Layout())
    model = tiny("qwen3_vl")
    norms, matrices, patch = 16 * 64, 4 * 64 + 4 * 32 + 6 * 96 + 8 * 96, (8 * 32, 8 * 32 + 4 * 64)
    found = estimate(model, plan)
    assert found.activations == 96 * 4 * (norms + matrices) + 80 * 3 * sum(patch)
    assert found.logits == 10 * 96 * 768 + 4 * 64 * 768 and found.gathered == 0
    two = estimate(model, replace(plan, num_gpus=2, layout=Layout(tensor=2)))
    assert two.activations == 96 * 4 * (norms + matrices // 2) + 80 * 3 * (patch[0] + patch[1] // 2)
    assert two.logits == (10 * 96 + 4 * 64) * 768 // 2
    shared = estimate(model, replace(plan, num_gpus=2, layout=Layout(tensor=2, sequence=True)))
    assert two.activations - shared.activations == 96 * 4 * norms // 2
    streams = estimate(model, replace(plan, num_gpus=2, layout=Layout(context=2)))
    assert streams.activations == 48 * 4 * (norms + matrices) + 80 * 3 * sum(patch)  # pictures on every rank
    assert streams.weights == found.weights and streams.optimizer == found.optimizer // 2
    # The first of three stages holds three micro-batches of its one layer and of the tower.
    stages = estimate(model, replace(plan, num_gpus=3, layout=Layout(pipeline=3)))
    assert stages.activations == 3 * (96 * (norms + matrices) + 80 * 3 * sum(patch)) + 96 * (norms + matrices)


def test_copies_of_tokens_for_experts_are_counted_where_they_arrive() -> None:
    model = tiny("qwen3_vl_moe")
    text = model.config.text_config
    plan = Plan(num_gpus=1, tokens=96, patches=0, layout=Layout())
    chosen, size = text.num_experts_per_tok, text.moe_intermediate_size
    one = 16 * 64 + 4 * 64 + 4 * 32 + 6 * 96 + chosen * (4 * 64 + 8 * size)
    assert estimate(model, plan).activations == 96 * 4 * one
    spread = estimate(model, replace(plan, num_gpus=2, layout=Layout(expert=2)))
    assert spread.activations == 96 * 4 * one  # as many arrive as leave
    cut = estimate(model, replace(plan, num_gpus=2, layout=Layout(expert_tensor=2)))
    assert cut.activations == 96 * 4 * (one + chosen * 4 * 64)  # both ranks' tokens, half of each expert


def test_recomputed_blocks_keep_their_input_and_frozen_weights_have_no_gradient() -> None:
    model, plan = tiny("llama"), Plan(num_gpus=2, tokens=96, patches=0, recompute=1.0, layout=Layout(2, sequence=True))
    block = 96 * (16 * 64 + 4 * 64 + 4 * 32 + 8 * 96) // 2
    assert estimate(model, plan).activations == 3 * 96 * 2 * 64 // 2 + block
    model, plan = tiny("qwen3_vl"), Plan(num_gpus=2, layout=Layout(2))
    full = estimate(model, plan)
    freeze_vision(model)
    frozen = estimate(model, plan)
    assert frozen.weights == full.weights and frozen.activations < full.activations
    (count,) = stage_parameters(model, Layout(2))
    assert count.frozen > 0 and frozen.gradients == 4 * count.trained and frozen.optimizer == 12 * count.trained
    add_lora(model, LearnerConfig(lora_rank=8))
    (adapters,) = stage_parameters(model, Layout(2))
    in_and_out = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96)
    assert adapters.trained == 3 * 8 * in_and_out // 2


def test_float32_needs_no_second_copy_of_the_weights() -> None:
    model, plan = tiny("llama"), Plan(tokens=96, patches=0, layout=Layout())
    narrow, wide = estimate(model, plan), estimate(model, replace(plan, compute_bytes=4))
    assert wide.weights == 2 * narrow.weights and wide.optimizer * 12 == narrow.optimizer * 8


def test_four_ranks_share_a_stream_of_128k_tokens_with_pictures() -> None:
    model = meta_model(qwen3_vl_config("8b"))
    long = Plan(num_gpus=4, tokens=131_072, patches=4 * 16_384, recompute=1.0)
    whole = estimate(model, replace(long, num_gpus=1, layout=Layout())).total
    by_stream = estimate(model, replace(long, layout=Layout(context=4)))
    by_both = estimate(model, replace(long, layout=Layout(tensor=2, context=2, sequence=True)))
    assert by_stream.total < 100 * GIB < 180 * GIB < whole
    assert by_both.activations == by_stream.activations and by_both.total < 75 * GIB  # half the weights


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--tp 2", "error: --tp: needs --backend megatron, or nothing reads it, got 2"),
        ("--backend megatron --tp 2 --gpus 3", "error: --gpus: must be a multiple of 2 = --tp 2, got 3; give --gpus 4"),
        ("--backend megatron --offload all", "error: --offload: must be none with --backend megatron, got all"),
    ],
)
def test_what_cannot_be_computed_is_one_line(argv: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: run(argv.split())) == 2
    assert capsys.readouterr().err.startswith(line)


def test_the_command_prints_a_table_for_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--backend", "megatron", "--cp", "4", "--gpus", "4", "--model", str(STARTER_PATH)]) == 0
    text = capsys.readouterr().out
    assert "--backend megatron --cp 4, on a rank of the pipeline stage that needs the most." in text
    assert {line.split()[-1] for line in text.splitlines()[4:]} == {"yes"}
