"""Claims about compiled blocks: the gradients of uncompiled ones, from a few compiled forms however shapes change.

On a GPU, blocks call torch's variable-length flash attention. Here an operator of the same shapes stands in for it, so
that blocks are traced as they are there.

Legend: Q queries, K keys of all sequences, H heads, D values of a head.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import agents.model.attention
import agents.model.policy
import trainer.data.packing
from agents.model import STARTER_PATH, delta_net, linear_logprobs
from agents.model.architectures import ARCHITECTURES
from agents.model.attention import Segments, Span, segment_attention
from agents.model.kernel_cache import FOLDERS, keep_kernels
from agents.model.policy import PolicyModel
from agents.model.state_plan import StatePlan
from agents.types import SamplingParams
from tests.paths import ROOT
from tests.trainer.steps import Case, Difference, Variant, take_variant
from trainer.config.inputs import ModelConfig
from trainer.config.learner import LearnerConfig
from trainer.config.run import RunConfig
from trainer.learner.compile_choice import is_compiled
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.setup.components import with_compile_chosen


def weights(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Return the attention weights (H, Q, K) of one sequence; the last query sees its last key."""
    seen = torch.ones(len(query), len(key), dtype=torch.bool)
    if is_causal:
        seen = seen.tril(len(key) - len(query))
    scores_HQK = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores_HQK.masked_fill(~seen, -torch.inf).softmax(-1)


def sequences(q_bounds: Tensor, k_bounds: Tensor) -> list[tuple[slice, slice]]:
    cuts = zip(itertools.pairwise(q_bounds.tolist()), itertools.pairwise(k_bounds.tolist()), strict=True)
    return [(slice(*q), slice(*k)) for q, k in cuts]


@torch.library.custom_op("trueturn_tests::varlen", mutates_args=())
def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Attend within each sequence, (Q, H, D)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = torch.empty_like(query)
    for q, k in sequences(q_bounds, k_bounds):
        out[q] = torch.einsum("hqk,khd->qhd", weights(query[q], key[k], is_causal, scale), value[k])
    return out


@torch.library.custom_op("trueturn_tests::varlen_backward", mutates_args=())
def varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    grad_q, grad_k, grad_v = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k in sequences(q_bounds, k_bounds):
        probs = weights(query[q], key[k], is_causal, scale)
        grad_probs = torch.einsum("qhd,khd->hqk", grad[q], value[k])
        grad_scores = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True)) * scale
        grad_v[k] = torch.einsum("hqk,qhd->khd", probs, grad[q])
        grad_q[q] = torch.einsum("hqk,khd->qhd", grad_scores, key[k])
        grad_k[k] = torch.einsum("hqk,qhd->khd", grad_scores, query[q])
    return grad_q, grad_k.unflatten(1, (-1, groups)).sum(2), grad_v.unflatten(1, (-1, groups)).sum(2)


@varlen.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


@varlen_backward.register_fake
def _(grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in tensors[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.numbers = inputs[5:]


def _derive(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*varlen_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers), *[None] * 6)


varlen.register_autograd(_derive, setup_context=_keep)


def varlen_attn(*tensors: Any, window_size: tuple[int, int], scale: float, **_: Any) -> Tensor:
    """Stand in for `torch.nn.attention.varlen.varlen_attn`."""
    return varlen(*tensors, window_size == (-1, 0), scale)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Trace as on a GPU, and fail where a kind of block needs more than four forms; give the compiler's counters."""
    import torch.nn.attention.varlen as module
    from torch._dynamo.utils import counters

    monkeypatch.setattr(module, "varlen_attn", varlen_attn)
    for user in (agents.model.attention, agents.model.policy, trainer.data.packing):
        monkeypatch.setattr(user, "needs_buckets", lambda device, dtype: False)
    torch._dynamo.reset()
    linear_logprobs._compiled.cache_clear()
    delta_net._compiled.cache_clear()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=6):
        yield counters
    torch._dynamo.reset()
    linear_logprobs._compiled.cache_clear()
    delta_net._compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "backend"),
    [
        ("qwen3_vl", "eager"),
        ("qwen3_vl_moe", "aot_eager"),
        ("qwen2_5_vl", "aot_eager"),
        ("qwen3_5", "eager"),
        pytest.param(
            *("qwen3", "inductor"),
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs a C++ compiler"),
        ),
    ],
)
def test_compiled_blocks_have_the_same_gradients_and_few_forms(
    model_type: str, backend: str, traced: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # "eager" traces the forward alone, and "aot_eager" the backward too, which takes three times as long.
    # Two kernels of the scores. Blocks of the decoder with and without gradient, with and without shared prompts; of
    # the tower with and without gradient, its first block apart, since what that reads is a view.
    # A state layer cuts its block in three frames, and compiles what it does within chunks in two.
    row = ARCHITECTURES[model_type]
    most = 2 + 4 + 4 * row.vision + 2 * row.windows + 20 * row.states
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    case = Case.write(tmp_path / model_type, model_type)
    # Some blocks recomputed, some not, and batches of one stream and of several, with images and without.
    config = LearnerConfig(recompute=0.5, compile="off")
    expected = take_variant(case, Variant(max_tokens=100, config=config))
    assert traced["stats"]["unique_graphs"] == 0
    compiled = Variant(max_tokens=100, config=config.model_copy(update={"compile": "on"}))
    difference = Difference.between(take_variant(case, compiled), expected)
    assert difference.loss < 1e-5 and difference.worst_gradient < 1e-4, difference
    assert 0 < traced["stats"]["unique_graphs"] <= most
    # Only where a state layer's scan over chunks is left out.
    assert all("delta_net" in reason or "_mix" in reason for reason in traced["graph_break"])
    assert not traced["graph_break"] or row.states


@pytest.mark.slow
def test_what_state_layers_do_within_chunks_has_the_same_gradients_compiled(
    traced: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    case = Case.write(tmp_path / "qwen3_5", "qwen3_5")
    model = PolicyModel.load(case.checkpoint)
    layer = model.architecture.decoder(model.backbone).layers[0].linear_attn
    rng = torch.Generator().manual_seed(0)
    for spans in ((Span(0, 150),), (Span(0, 70), Span(70, 9, 0, 70), Span(79, 130, 0, 70), Span(209, 3))):
        length = sum(span.length for span in spans)
        hidden_1TH = torch.randn(1, length, model.config.text_config.hidden_size, generator=rng, requires_grad=True)
        wanted = torch.randn(hidden_1TH.shape, generator=rng)
        results = []
        for choice in (False, True):
            plan = replace(StatePlan.build(spans, "cpu"), is_compiled=choice)
            out_1TH, _ = delta_net.delta_net_forward(layer, hidden_1TH, plan)
            results.append([out_1TH, *torch.autograd.grad((out_1TH * wanted).sum(), [hidden_1TH, *layer.parameters()])])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert delta_net._compiled.cache_info().currsize == 2
    assert 0 < traced["stats"]["unique_graphs"] <= 4


def test_the_operator_that_stands_in_is_attention_within_segments(traced: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    spans = (Span(0, 4), Span(4, 3, 0, 4), Span(7, 2, 0, 4), Span(9, 5))
    for is_causal in (True, False):
        results = []
        for with_buckets in (True, False):
            agents.model.attention.needs_buckets = lambda *_, it=with_buckets: it  # type: ignore[assignment]
            rng.manual_seed(0)
            tensors = [torch.randn(14, heads, 8, generator=rng, requires_grad=True) for heads in (4, 2, 2)]
            segments = Segments.build(spans, is_causal, "cpu", with_buckets)
            out = segment_attention(*tensors, segments, 0.3)  # type: ignore[misc]
            results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_score_compiles_nothing_and_is_that_of_the_uncompiled_network(
    traced: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    case = Case.write(tmp_path / "qwen3", "qwen3")
    scores = []
    for choice in ("off", "on"):
        learner = FSDPLearner(
            PolicyModel.load(case.checkpoint), SamplingParams(), 1, config=LearnerConfig(compile=choice)
        )
        scores.append(learner.score([5, 6, 7, 8, 9], ()))
    assert traced["stats"]["unique_graphs"] == 0
    assert np.array_equal(*scores)


@pytest.mark.parametrize(
    ("choice", "on_gpu", "num_parameters", "expected"),
    [
        ("auto", True, 5_600_000, False),
        ("auto", True, 2_128_000_000, True),
        ("auto", False, 2_128_000_000, False),
        ("on", False, 5_600_000, True),
        ("off", True, 2_128_000_000, False),
    ],
)
def test_a_large_network_is_compiled_on_a_gpu_and_a_given_choice_stays(
    choice: Any, on_gpu: bool, num_parameters: int, expected: bool
) -> None:
    assert is_compiled(LearnerConfig(compile=choice), on_gpu, num_parameters) == expected


def test_the_start_says_that_the_starter_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig(model=ModelConfig(device="cuda"))
    caplog.set_level("INFO", "trainer")
    plan = with_compile_chosen(config, STARTER_PATH)
    assert plan.learner.compile == "off" and config.learner.compile == "auto"
    (line,) = caplog.messages
    assert line == "--compile auto is off at 6.9 M parameters"
    given = config.model_copy(update={"learner": LearnerConfig(compile="on")})
    assert with_compile_chosen(given, STARTER_PATH) is given


COMPILED_SCORES = """
import torch
from agents.model.architectures import ARCHITECTURES
from agents.model.kernel_cache import keep_kernels
from agents.model.linear_logprobs import linear_scores
from agents.types import SamplingDistribution

keep_kernels()
rng = torch.Generator().manual_seed(0)
hidden, weight = (torch.randn(n, 16, generator=rng, requires_grad=True) for n in (40, 300))
scores, entropy = linear_scores(hidden, weight, torch.arange(40), SamplingDistribution(), compiled=True)
(scores.sum() + entropy.sum()).backward()
print([tensor.detach().numpy().tobytes().hex() for tensor in (scores, entropy, hidden.grad, weight.grad)])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs a C++ compiler")
def test_kernels_that_were_kept_give_the_same_bits(tmp_path: Path) -> None:
    known = {name: value for name, value in os.environ.items() if name not in FOLDERS}
    variables = {**known, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed, kept = [], []
    for _ in ("cold", "warm"):
        command = [sys.executable, "-c", COMPILED_SCORES]
        printed.append(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)
        kept.append(set((tmp_path / "cache" / "trueturn" / "kernels").rglob("*.so")))
    assert printed[0] and printed[0] == printed[1]
    assert kept[0] and kept[0] == kept[1], "nothing is compiled again"


def test_kernels_are_kept_where_the_user_says_and_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_kernels()
    assert not FOLDERS.keys() & os.environ.keys()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    kept = tmp_path / "cache" / "trueturn" / "kernels"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(kept / "torchinductor") and kept.is_dir()
    for name in FOLDERS:  # so that the test leaves none
        monkeypatch.delenv(name)
