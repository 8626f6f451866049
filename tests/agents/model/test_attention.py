"""Claims about packed attention: it is dense attention under the mask that the spans write down, in value and gradient.

Legend: T packed tokens, H heads, G key heads, D values of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from agents.model.attention import (
    Segments,
    Span,
    needs_buckets,
    register_attention,
    segment_attention,
    text_attention,
    vision_attention,
)
from agents.model.vision import tower_inputs
from tests.budget import examples

HEAD = 8
SCALING = 0.3


@dataclass(frozen=True)
class Case:
    """Spans of a packed row and the heads of its queries and keys."""

    spans: tuple[Span, ...]
    heads: int
    key_heads: int
    is_causal: bool

    @property
    def num_tokens(self) -> int:
        return sum(span.length for span in self.spans)


def row(start: int, prefix: int, lengths: Sequence[int]) -> list[Span]:
    """Return the spans of a prompt and the samples that go on from it; a prompt of 0 tokens is none."""
    if not prefix:
        return [Span(start + sum(lengths[:k]), length) for k, length in enumerate(lengths)]
    ends = [start + prefix + sum(lengths[:k]) for k in range(len(lengths))]
    return [
        Span(start, prefix),
        *(Span(end, length, start, prefix) for end, length in zip(ends, lengths, strict=True)),
    ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = st.integers(1, 9) if draw(st.booleans()) else st.just(draw(st.integers(1, 9)))
    most_prefix = 12 if draw(st.booleans()) else 0
    spans: list[Span] = []
    for _ in range(draw(st.integers(1, 4))):
        start = sum(span.length for span in spans)
        spans += row(start, draw(st.integers(0, most_prefix)), draw(st.lists(lengths, min_size=1, max_size=4)))
    key_heads = draw(st.integers(1, 2))
    return Case(tuple(spans), key_heads * draw(st.integers(1, 3)), key_heads, draw(st.booleans()))


def inputs(case: Case, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return random queries, keys and values that want gradients."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(case.num_tokens, heads, HEAD) for heads in (case.heads, case.key_heads, case.key_heads)]
    values = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)
    return [value.to(device, dtype).requires_grad_() for value in values]


def seen(spans: Sequence[Span], is_causal: bool) -> Tensor:
    """Return the (T, T) matrix of which token sees which, token by token."""
    count = sum(span.length for span in spans)
    seen_TT = torch.zeros(count, count, dtype=torch.bool)
    for span in spans:
        for place in range(span.start, span.start + span.length):
            seen_TT[place, span.prefix_start : span.prefix_start + span.prefix_length] = True
            seen_TT[place, span.start : place + 1 if is_causal else span.start + span.length] = True
    return seen_TT


def dense(query: Tensor, key: Tensor, value: Tensor, seen_TT: Tensor) -> Tensor:
    """Return softmax(scaling q k) v over what each token sees; query head h has key head h // groups."""
    groups = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores_TT = SCALING * query[:, head] @ key[:, head // groups].T
        heads.append(scores_TT.masked_fill(~seen_TT, -torch.inf).softmax(-1) @ value[:, head // groups])
    return torch.stack(heads, dim=1)


def gradients(out: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a fixed random weighting of the output."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.autograd.grad((out * weights.to(out.device, out.dtype)).sum(), tensors)


@examples(100)
@given(cases())
def test_attention_within_segments_is_dense_attention_under_their_mask(case: Case) -> None:
    tensors = inputs(case)
    segments = Segments.build(case.spans, case.is_causal, "cpu", with_buckets=True)
    got = segment_attention(*tensors, segments, SCALING)  # type: ignore[misc]
    expected = dense(*tensors, seen(case.spans, case.is_causal))  # type: ignore[misc]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(got, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@given(cases())
def test_buckets_hold_every_query_once_and_less_than_four_times_its_work(case: Case) -> None:
    segments = Segments.build(case.spans, case.is_causal, "cpu", with_buckets=True)
    if segments.even_length:
        assert {span.length for span in case.spans} == {segments.even_length}
        return
    assert segments.bucket_row_T is not None
    padded = torch.cat([bucket.queries_BQ.flatten() for bucket in segments.buckets])
    assert torch.equal(padded[segments.bucket_row_T], torch.arange(case.num_tokens))
    work = sum(bucket.queries_BQ.numel() * bucket.keys_BK.shape[1] for bucket in segments.buckets)
    assert work < 4 * sum(span.length * span.num_keys for span in case.spans)


def test_only_sequences_with_a_prefix_need_a_mask_that_is_quadratic_in_their_length() -> None:
    segments = Segments.build([Span(0, 1000), Span(1000, 900), *row(1900, 3, [70])], True, "cpu", with_buckets=True)
    masks = {tuple(bucket.queries_BQ.shape): bucket.seen_B1QK is not None for bucket in segments.buckets}
    assert masks == {(2, 1000): False, (1, 3): False, (1, 70): True}


def test_three_samples_of_one_prompt_are_the_spans_by_hand() -> None:
    segments = Segments.build(row(0, 3, [2, 1]), True, "cpu", with_buckets=True)
    assert segments.keys_K is not None
    assert segments.keys_K.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5]
    assert segments.q_bounds_S.tolist() == [0, 3, 5, 6] and segments.k_bounds_S.tolist() == [0, 3, 8, 12]
    assert (segments.max_q, segments.max_k, segments.even_length) == (512, 512, 0)
    assert seen(row(0, 3, [2, 1]), True).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
def test_what_fills_a_bucket_reaches_no_other_sequence(dtype: torch.dtype, is_causal: bool) -> None:
    """Padding repeats the first token. However large that is, the others have the values and gradients of without."""
    spans = (Span(0, 1), *row(1, 5, [3, 4, 1, 7]), Span(21, 6))
    case = Case(spans, 4, 2, is_causal)
    segments = Segments.build(spans, is_causal, "cpu", with_buckets=True)
    assert len(segments.buckets) < len(spans)  # some of them are padded
    results = []
    for size in (0.0, 1e10, -1e10):
        tensors = inputs(case, dtype=dtype)
        with torch.no_grad():
            for tensor in tensors:
                tensor[0] = size
        out = segment_attention(*tensors, segments, SCALING)  # type: ignore[misc]
        found = [out, *gradients(out[1:], tensors)]
        assert all(tensor.isfinite().all() for tensor in found)
        results.append([tensor[1:] for tensor in found])
    for other in results[1:]:
        assert all(torch.equal(got, expected) for got, expected in zip(other, results[0], strict=True))


class Layer(nn.Module):
    """What Transformers asks of the layer that attention is part of."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, True


@pytest.mark.parametrize("masked", [True, False])
def test_a_decoder_without_segments_runs_transformers_own_attention(masked: bool) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, HEAD, generator=rng) for heads in (4, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5).clone() if masked else None
    if mask is not None:
        mask[1, :, :, 0] = False
        mask[1, :, 0, 0] = True
    got, _ = text_attention(Layer(2), query, key, value, mask, scaling=SCALING, dropout=0.0)
    expected, _ = sdpa_attention_forward(Layer(2), query, key, value, mask, scaling=SCALING, dropout=0.0)
    assert torch.equal(got, expected)
    for stream in range(2):
        here = torch.ones(5, 5, dtype=torch.bool).tril() if mask is None else mask[stream, 0]
        by_hand = dense(*(x[stream].transpose(0, 1) for x in (query, key, value)), here)  # type: ignore[misc]
        torch.testing.assert_close(got[stream], by_hand, rtol=0, atol=1e-5)


def test_a_decoder_with_segments_does_not_look_at_its_mask() -> None:
    case = Case(tuple(row(0, 4, [3, 2])), 4, 2, True)
    tensors = inputs(case)
    segments = Segments.build(case.spans, True, "cpu", with_buckets=True)
    batch = [x.transpose(0, 1)[None] for x in tensors]
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    got, _ = text_attention(Layer(2), *batch, nothing, segments, scaling=SCALING)  # type: ignore[misc]
    assert torch.equal(got[0], segment_attention(*tensors, segments, SCALING))  # type: ignore[misc]


@pytest.mark.parametrize("grids", [[(1, 8, 12), (1, 4, 4)], [(1, 4, 4), (1, 4, 4)], [(2, 8, 6)]])
def test_a_tower_with_windows_attends_within_the_cut_that_it_asks_for(grids: list[tuple[int, int, int]]) -> None:
    given_inputs = tower_inputs(grids, merge=2, window=2, device="cpu")
    count = sum(int(np.prod(grid)) for grid in grids)
    case = Case((Span(0, count),), 2, 2, False)
    tensors = inputs(case)
    batch = [x.transpose(0, 1)[None] for x in tensors]
    for bounds in (given_inputs["cu_seqlens"], given_inputs["cu_window_seqlens"]):
        got, _ = vision_attention(Layer(1), *batch, None, SCALING, bounds, given_inputs["segments"])  # type: ignore[misc]
        edges = bounds.tolist()
        assert edges[-1] == count
        spans = [Span(start, end - start) for start, end in itertools.pairwise(edges)]
        expected = dense(*tensors, seen(spans, False))  # type: ignore[misc]
        torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-12)


def test_both_functions_are_known_to_transformers_however_often_they_are_registered() -> None:
    from transformers import AttentionInterface

    from agents.model.attention import TEXT_ATTENTION, VISION_ATTENTION

    register_attention()
    register_attention()
    known = AttentionInterface()
    assert known[TEXT_ATTENTION] is text_attention and known[VISION_ATTENTION] is vision_attention


def test_segments_without_buckets_say_so_off_the_gpu() -> None:
    case = Case(tuple(row(0, 4, [3, 2])), 4, 2, True)
    segments = Segments.build(case.spans, True, "cpu", with_buckets=False)
    with pytest.raises(AssertionError, match="built for variable-length attention alone"):
        segment_attention(*inputs(case), segments, SCALING)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.bfloat16, True),
        ("cpu", torch.float32, True),
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, False),
        ("cuda", torch.float16, False),
    ],
)
def test_only_half_precision_on_a_gpu_does_without_buckets(device: str, dtype: torch.dtype, expected: bool) -> None:
    assert needs_buckets(torch.device(device), dtype) is expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
@examples(40)
@given(cases())
def test_on_a_gpu_flash_attention_is_dense_attention_within_bfloat16(case: Case) -> None:
    tensors = inputs(case, device="cuda", dtype=torch.bfloat16)
    segments = Segments.build(case.spans, case.is_causal, "cuda", with_buckets=False)
    got = segment_attention(*tensors, segments, SCALING)  # type: ignore[misc]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = dense(*exact, seen(case.spans, case.is_causal).cuda())  # type: ignore[misc]
    pairs = [(got, expected), *zip(gradients(got, tensors), gradients(expected, exact), strict=True)]
    for ours, theirs in pairs:
        assert (ours.double() - theirs).norm() <= 0.02 * theirs.norm() + 1e-6
