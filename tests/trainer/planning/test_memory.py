"""Claims about the memory estimate: counts are those of the real networks, and blocks keep what the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from agents.model import STARTER_PATH
from agents.model.attention import Span
from agents.model.linear_logprobs import SamplingDistribution
from agents.model.mrope import mrope_positions
from agents.model.packed import PackedStreams
from agents.model.policy import PolicyModel
from agents.types import ProcessedImage
from envs.config.cli import exit_code
from tests.tiny_models import MODEL_TYPES, tiny_config, write_tiny_model
from trainer.config.learner import LearnerConfig
from trainer.learner.lora import add_lora
from trainer.learner.sharding import freeze_vision
from trainer.learner.weights_io import meta_model
from trainer.memory import run
from trainer.planning.memory import (
    COMPILED_SHARE,
    GIB,
    Parameters,
    Plan,
    decoder_block,
    estimate,
    state_block,
    vision_block,
)
from trainer.planning.qwen3_vl import qwen3_vl_config
from trainer.planning.shape import ModelShape


@pytest.mark.parametrize(
    ("name", "total"),
    # The first three as their model cards count the weights.
    [("2b", 2_127_532_032), ("4b", 4_437_815_808), ("8b", 8_767_123_696), ("32b", 33_357_390_064)],
)
def test_the_dense_qwen3_vl_have_the_parameters_of_their_checkpoints(name: str, total: int) -> None:
    model = meta_model(qwen3_vl_config(name))
    assert all(parameter.is_meta for parameter in model.parameters())
    text, vision = model.config.text_config, model.config.vision_config
    hidden, queries, keys = text.hidden_size, 128 * text.num_attention_heads, 128 * 8
    block = 2 * hidden * (queries + keys) + 3 * hidden * text.intermediate_size + 2 * hidden + 2 * 128
    side, mlp = vision.hidden_size, vision.intermediate_size
    vision_block = 4 * side * side + 4 * side + 2 * side * mlp + mlp + side + 4 * side
    merger = (4 * side) ** 2 + 4 * side + 4 * side * hidden + hidden
    tower = vision.depth * vision_block + 4 * merger + 2 * side + 3 * 8 * side + 3 * 2 * 16 * 16 * side + side
    embedding = 151_936 * hidden * (1 if text.tie_word_embeddings else 2)
    by_hand = text.num_hidden_layers * block + tower + 2304 * side + embedding + hidden
    count = Parameters.of(model)
    assert (
        (count.trained, count.frozen) == (total, 0)
        and count.next_unit == (block if block < tower else tower)
        and total == by_hand
    )


def tiny(model_type: str = "qwen3_vl", tied: bool = True) -> PolicyModel:
    return meta_model(tiny_config(model_type, AutoTokenizer.from_pretrained(STARTER_PATH), tied))


DECODER = 4096 + 2 * 2048 + 4096 + 2 * 16 + 3 * 64 * 96 + 2 * 64
TOWER = (32 * 96 + 96) + (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 4 * 32
MERGERS = (64 + 128 * 128 + 128 + 128 * 64 + 64) + 2 * (256 + 128 * 128 + 128 + 128 * 64 + 64)
PATCHES = 3 * 2 * 16 * 16 * 32 + 32 + 256 * 32


def test_the_estimate_of_a_tiny_network_is_the_arithmetic_by_hand() -> None:
    model = tiny()
    vocabulary = model.config.text_config.vocab_size
    tower, root = 3 * TOWER + MERGERS + PATCHES, 64 * vocabulary + 64
    blocks = 3 * DECODER + tower
    assert Parameters.of(model) == Parameters(blocks + root, 0, blocks, tower, DECODER, tower, root, root)
    found = estimate(model, Plan(num_gpus=2, tokens=100, patches=80))
    assert found.weights == 2 * (blocks + root) and found.optimizer == 4 * (blocks + root)
    assert found.gathered == 2 * (root + tower + DECODER)
    assert found.gradients == 2 * (blocks + root) + 2 * (root + tower) + 4 * tower
    alone, kept = estimate(model, Plan(tokens=100)), estimate(model, Plan(num_gpus=2, reshard="never"))
    assert alone.gathered == kept.gathered == 2 * (root + blocks)  # nothing to give up, and nothing given up
    assert kept.gradients == 2 * (blocks + root) + 2 * (root + tower) + 4 * (blocks + root)
    per_token = 16 * 64 + 4 * 64 + 4 * 32 + 6 * 96 + 8 * 96
    per_patch = 16 * 32 + 4 * 64
    assert found.activations == 100 * 4 * per_token + 80 * 3 * per_patch
    assert found.logits == 10 * 100 * vocabulary + 4 * 64 * vocabulary
    parts = (found.weights, found.gathered, found.gradients, found.optimizer, found.activations, found.logits)
    assert found.total == sum(parts)


def test_what_is_recomputed_keeps_its_input_alone() -> None:
    found = estimate(tiny("llama"), Plan(tokens=100, recompute=1.0))
    assert found.activations == 3 * 100 * 2 * 64 + 100 * (16 * 64 + 4 * 64 + 4 * 32 + 8 * 96)
    less = [estimate(tiny(), Plan(recompute=share)).activations for share in (0.0, 0.34, 0.67, 1.0)]
    assert less == sorted(less, reverse=True) and len(set(less)) == 4


@pytest.mark.parametrize(
    ("num_gpus", "tokens", "patches", "recompute", "peak_gib"),
    # Measured on H100s: scaling_backends.json and learner_2b.json of benchmarks/results.
    [(1, 16384, 7920, 0.0, 55.96), (2, 16384, 7920, 0.0, 44.97), (1, 32768, 3520, 1.0, 42.87)],
)
def test_the_estimate_is_within_15_percent_of_the_measured_peak(
    num_gpus: int, tokens: int, patches: int, recompute: float, peak_gib: float
) -> None:
    plan = Plan(num_gpus, tokens, patches, recompute, is_compiled=True)
    assert estimate(meta_model(qwen3_vl_config("2b")), plan).total / GIB == pytest.approx(peak_gib, rel=0.15)


def test_compiled_blocks_keep_the_measured_share_and_recomputed_ones_their_whole_input() -> None:
    eager, compiled = (estimate(tiny("llama"), Plan(tokens=100, is_compiled=on)).activations for on in (False, True))
    assert compiled == pytest.approx(COMPILED_SHARE * eager, rel=1e-4)
    found = estimate(tiny("llama"), Plan(tokens=100, recompute=1.0, is_compiled=True)).activations
    block = 100 * (16 * 64 + 4 * 64 + 4 * 32 + 8 * 96)
    assert found == 3 * 100 * 2 * 64 + int(COMPILED_SHARE * block)


def test_frozen_weights_have_no_gradient_and_no_moments() -> None:
    model = tiny()
    full = estimate(model, Plan())
    freeze_vision(model)
    count, found = Parameters.of(model), estimate(model, Plan(frozen_bytes=2))
    assert count.frozen == 3 * TOWER + MERGERS + PATCHES
    assert found.weights == 4 * count.trained + 2 * count.frozen
    assert found.optimizer == 8 * count.trained and found.gradients < full.gradients - 4 * count.frozen
    assert found.activations < full.activations


def test_adapters_are_all_that_is_trained_with_lora() -> None:
    model = tiny()
    base = Parameters.of(model)
    add_lora(model, LearnerConfig(lora_rank=8))
    count, found = Parameters.of(model), estimate(model, Plan(frozen_bytes=2))
    in_and_out = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96)
    assert count.trained == 3 * 8 * in_and_out and count.frozen == base.trained
    assert found.weights == 4 * count.trained + 2 * count.frozen and found.optimizer == 8 * count.trained
    assert found.gradients == 4 * count.trained + 6 * 8 * in_and_out
    assert found.logits == 10 * 4096 * model.config.text_config.vocab_size


def test_an_offloaded_optimizer_counts_only_where_its_step_needs_more() -> None:
    model = meta_model(qwen3_vl_config("2b"))
    here, away = (estimate(model, Plan(tokens=64, patches=0, recompute=1.0, offload=o)) for o in ("none", "optimizer"))
    assert here.optimizer == 8 * 2_127_532_032
    passing = here.total - here.optimizer
    step = here.weights + 4 * 2_127_532_032 + here.optimizer
    assert away.total == max(passing, step) < here.total
    long = estimate(model, Plan(tokens=16_384, offload="optimizer"))
    assert long.optimizer == 0
    nothing, count = estimate(model, Plan(offload="all")), Parameters.of(model)
    assert nothing.weights == nothing.optimizer == 0
    assert nothing.gradients == 2 * (count.root + count.largest_unit) + 4 * max(count.root, count.largest_unit)


def kept_bytes(block: nn.Module, taken: dict[int, int], ours: set[int]) -> Callable[..., Any]:
    """Return the block's forward, which writes down the memory that autograd keeps in it."""
    forward = block.forward

    def counted(*args: Any, **options: Any) -> Any:
        shared = {table.untyped_storage().data_ptr() for table in options.get("position_embeddings") or ()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in ours | shared:
                taken[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **options)

    return counted


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_blocks_keep_what_the_formulas_say(model_type: str) -> None:
    """Against what autograd keeps of one sequence in bfloat16; softmax's sums and the like are the 4%."""
    config = tiny_config(model_type, AutoTokenizer.from_pretrained(STARTER_PATH), tied=False)
    text = config.get_text_config()
    text.hidden_size, text.intermediate_size = 256, 768
    text.num_attention_heads = text.num_key_value_heads = 16  # off the GPU, keys are repeated for every head
    torch.manual_seed(0)
    if hasattr(text, "moe_intermediate_size"):
        text.moe_intermediate_size = 192
    images: list[ProcessedImage] = []
    ids = torch.randint(30, 200, (200,)).numpy()
    if vision := getattr(config, "vision_config", None):
        vision.hidden_size, vision.num_heads, vision.intermediate_size, vision.out_hidden_size = 256, 16, 1024, 256
        pixels = torch.randn(256, 3 * vision.temporal_patch_size * vision.patch_size**2).numpy()
        images = [ProcessedImage("image", pixels, (1, 16, 16), 64)]
        ids = np.concatenate([ids[:20], np.full(64, config.image_token_id), ids[20:]])
    model = PolicyModel.from_config(config).bfloat16()
    ours = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: list[dict[int, int]] = [{} for _ in model.blocks]
    for block, taken in zip(model.blocks, kept, strict=True):
        block.forward = kept_bytes(block, taken, ours)
    packed = PackedStreams.build(
        ids_T=ids,
        positions_3T=mrope_positions(ids, [i.grid_thw for i in images], model.image_token_id, model.merge_size),
        spans=[Span(0, len(ids))],
        images=[images],
        before_N=np.arange(len(ids) - 1),
        targets_N=ids[1:],
        image_token_id=model.image_token_id,
        device="cpu",
        with_buckets=True,
    )
    scores = model.token_scores(packed, SamplingDistribution())
    if model.architecture.states:
        assert sum(kept[1].values()) / len(ids) == pytest.approx(state_block(text), rel=0.03)
        # Off the GPU, what attention gives is copied before its gate.
        copied = 2 * text.num_attention_heads * text.head_dim
        assert sum(kept[3].values()) / len(ids) == pytest.approx(decoder_block(text) + copied, rel=0.03)
    else:
        assert sum(kept[1].values()) / len(ids) == pytest.approx(decoder_block(text), rel=0.04)
    if images:
        assert vision is not None
        # Off the GPU, attention takes the values where the joint projection wrote them: 4 C bytes more stay.
        expected = vision_block(vision) + 4 * vision.hidden_size
        assert sum(kept[-2].values()) / 256 == pytest.approx(expected, rel=0.03)
    del scores


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_the_matrices_of_a_network_with_states_are_counted_by_kind(model_type: str) -> None:
    network = tiny(model_type, tied=False)
    shape = ModelShape.of(network)
    layers = network.architecture.decoder(network.backbone).layers
    matrices = {name: p.numel() for name, p in layers.named_parameters() if p.dim() > 1 and "conv1d" not in name}
    experts = sum(count for name, count in matrices.items() if ".experts." in name)
    gates = sum(count for name, count in matrices.items() if "shared_expert_gate" in name)  # of one output each
    assert shape.experts == experts and shape.dense == sum(matrices.values()) - experts - gates
    text = network.config.text_config
    assert shape.attention_values == text.num_attention_heads * text.head_dim  # of the one layer with attention
    # For each of 3 layers and 4 heads: 4 * 64 * 8 + 64 * 24 + 2 * 64 * 16 + 6 * 8 * 16.
    assert shape.state_flops == 12 * 6_400


def test_the_command_prints_a_table_that_says_it_is_computed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["--model", "2b", "--gpus", "2", "--memory-gib", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Computed, not measured: GiB on each of 2 GPUs with 30 GiB")
    assert len(lines) == 3 + 9 and lines[3].startswith("all") and lines[-1].startswith("LoRA")
    weights = 4 * 2_127_532_032 / 2 / GIB
    assert f"{weights:.1f}" in lines[3].split() and {line.split()[-1] for line in lines[3:]} == {"yes", "no"}
    write_tiny_model(tmp_path / "llama", "llama")
    assert run(["--model", str(tmp_path / "llama")]) == 0
    assert "no vision" not in capsys.readouterr().out
    for argv in (["--gpus", "0"], ["--tokens", "10", "--image-tokens", "11"], ["--model", str(tmp_path)]):
        assert exit_code(lambda argv=argv: run(argv)) == 2
    assert "must be a model folder or hub id" in capsys.readouterr().err
