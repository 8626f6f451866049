"""The benchmark of a training step: what it counts, what it trains on, and that every path takes the same step."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from benchmarks import learner
from benchmarks.flops import active_experts, forward_flops, triangle
from benchmarks.learner_ours import Options, fresh_model, our_step
from benchmarks.learner_peers import padded_batches, padded_logprobs, plain_step, score_all
from benchmarks.learner_profile import breakdown, kind_of
from benchmarks.learner_workload import (
    GEO3K,
    RECIPE,
    TINY,
    make_samples,
    plain_network,
    real_tokens,
    shape_config,
)
from trainer.planning.shape import decoder_weights


@pytest.fixture(scope="module")
def config():
    return shape_config("tiny")


@pytest.fixture(scope="module")
def samples(config):
    made = make_samples(config, TINY)
    scores = score_all(plain_network(config, "cpu"), made, "cpu", 200)
    return [replace(s, logprobs_T=scores_T) for s, scores_T in zip(made, scores, strict=True)]


def test_counted_operations_are_those_that_pytorch_counts(config, samples):
    """PyTorch counts attention over all pairs of a stream, where half of them are masked: twice T (T + 1) / 2, less T.
    It also counts the rotary frequencies, a product of inner size 1 in some versions; that is within the tolerance."""
    network = plain_network(config, "cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for sample in samples:
            padded_logprobs(network, padded_batches([sample], 1, config.image_token_id, "cpu")[0])
    counted = forward_flops(config, samples, shared=False)
    pairs = sum(triangle(len(s.ids_T)) for s in samples)
    everywhere = counted.attention * sum(len(s.ids_T) ** 2 for s in samples) // pairs
    assert counter.get_total_flops() == pytest.approx(counted.total - counted.attention + everywhere, rel=0.02)


@pytest.mark.parametrize("name", ["2b", "30b-a3b@3", "qwen3.5-2b"])
def test_counted_weights_are_the_matrices_that_a_token_uses(name: str) -> None:
    config = shape_config(name)
    with torch.device("meta"):
        decoder = AutoModelForImageTextToText.from_config(config).model.language_model
    text = config.get_text_config()
    matrices = {name: weight.numel() for name, weight in decoder.layers.named_parameters() if weight.dim() > 1}
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    if experts:
        experts = experts * text.num_experts_per_tok // text.num_experts
    others = sum(size for name, size in matrices.items() if ".experts." not in name and "conv1d" not in name)
    assert decoder_weights(text) + active_experts(text) == others + experts


def test_a_shared_prompt_and_its_image_count_once(config, samples):
    needed, whole = (forward_flops(config, samples, shared) for shared in (True, False))
    assert whole.tokens == real_tokens(samples) == needed.tokens + 6 * samples[0].prefix_length
    assert (needed.images, whole.images) == (2, 8)
    assert needed.head == whole.head
    text = config.text_config
    per_pair = 4 * text.num_attention_heads * text.head_dim * text.num_hidden_layers
    assert whole.attention - needed.attention == per_pair * 6 * triangle(samples[0].prefix_length)


def test_nothing_is_shared_where_all_prompts_differ(config):
    samples = make_samples(config, TINY, shared=False)
    assert forward_flops(config, samples, True) == forward_flops(config, samples, False)


def test_the_workload_is_as_described(config):
    samples = make_samples(config, GEO3K)
    lengths = np.array([len(s.ids_T) - s.prefix_length for s in samples])
    assert len(samples) == 64
    assert {s.prefix_length for s in samples} == {260}
    assert (samples[0].ids_T == config.image_token_id).sum() == 110
    assert abs(lengths.mean() - 644) < 1 and lengths.min() >= 150 and lengths.max() <= 2379
    assert {int(s.turns_T.max()) for s in samples} == {2, 3}
    masked = 1 - sum(int(s.mask_T.sum()) for s in samples) / lengths.sum()
    assert 0.04 < masked < 0.06
    assert sum(s.weight * s.mask_T.sum() for s in samples) == pytest.approx(1)
    for problem in range(8):
        assert np.sum([s.advantage for s in samples[8 * problem : 8 * problem + 8]]) == pytest.approx(0, abs=1e-9)


def test_our_step_is_the_padded_one(config, samples):
    theirs = plain_step(plain_network(config, "cpu"), samples, 100, RECIPE, "cpu", bfloat16=False)
    mine = our_step(fresh_model(config, "cpu"), samples, Options(100), "cpu")
    for _ in range(2):
        ours, padded = mine(), theirs(True)
        assert ours.loss == pytest.approx(padded.loss, rel=1e-4)
        assert ours.grad_norm == pytest.approx(padded.grad_norm, rel=1e-4)


def test_float32_masters_under_a_bfloat16_network_take_nearly_that_step(config, samples):
    step = plain_step(plain_network(config, "cpu"), samples, 100, RECIPE, "cpu", bfloat16=True)
    exact = plain_step(plain_network(config, "cpu"), samples, 100, RECIPE, "cpu", bfloat16=False)(True)
    assert step(True).grad_norm == pytest.approx(exact.grad_norm, rel=0.02)


def test_options_are_read_from_their_short_form():
    assert Options.parse("8192:recompute0.5:compile:lora32") == Options(8192, recompute=0.5, compile=True, lora=32)
    with pytest.raises(ValueError, match="'fast'"):
        Options.parse("8192:fast")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "gemm"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("Memcpy HtoD (Pageable -> Device)", "memcpy, memset"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "elementwise"),
        ("triton_poi_fused_add_mul_silu_3", "compiled"),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert kind_of(name) == kind


def test_a_breakdown_finds_the_output_layer_and_the_tower(config, samples):
    network = plain_network(config, "cpu")
    found = breakdown(lambda: plain_step(network, samples, 200, RECIPE, "cpu", bfloat16=False)(True), network, "cpu")
    assert found["kinds_s"]["gemm, output layer"] > 0
    assert found["kinds_s"]["gemm, vision tower"] > 0


def test_every_row_is_written(tmp_path: Path, monkeypatch):
    rows = ["--ours", "200", "200:wrong", "--plain", "200", "--repeats", "1"]
    arguments = ["--model", "tiny", "--device", "cpu", "--parts", "gemm,ours,plain", "--out", str(tmp_path), *rows]
    monkeypatch.setattr(sys, "argv", ["learner", *arguments])
    learner.main()
    written = json.loads((tmp_path / "learner_tiny.json").read_text())
    good, wrong = written["ours"]
    assert "wrong" in wrong["failed"]
    assert good["loss"] == pytest.approx(written["plain"][0]["loss"], rel=1e-4)
    assert 0 < good["mfu_needed"] < good["mfu_whole"]
