"""Attention within the sequences of one packed row, for decoder and vision tower: no padding, no mask over the row.

The inputs are queries, keys and values of all tokens, and `Segments` that say which keys each sequence sees. On a GPU
in half precision this is one call of torch's variable-length flash attention. Elsewhere sequences of similar length run
as one batch of scaled dot products, with a small mask for the padding.

Transformers finds both functions through its registry. Legend: T packed tokens, K keys of all sequences, S sequences,
B sequences of a bucket, D values of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

#: The decoder's attention: packed with `segments`, otherwise Transformers' own scaled dot product with its masks.
TEXT_ATTENTION = "trueturn_segments"
# Needs "flash" in its name: other functions do not get whole ragged batches with cumulative lengths from Transformers.
VISION_ATTENTION = "trueturn_flash_vision"
#: The maximum length is rounded up to a multiple of this, so that a compiled block sees few different numbers.
LENGTH_STEP = 512


@dataclass(frozen=True)
class Span:
    """One sequence of a packed row: its own tokens, and a prefix of earlier tokens that it also sees.

    Example: a prompt of 8 tokens and two samples that continue it with 2 and 4 tokens are `Span(0, 8)`,
    `Span(8, 2, 0, 8)` and `Span(10, 4, 0, 8)`.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0

    @property
    def num_keys(self) -> int:
        """Tokens that the last token of the sequence sees, itself included."""
        return self.prefix_length + self.length


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """Sequences of similar length as one batch.

    `queries_BQ` and `keys_BK` are places in the packed row, padded with 0. `seen_B1QK` is True if a query sees a key;
    None where each sees the keys up to its own.
    """

    queries_BQ: Tensor
    keys_BK: Tensor
    seen_B1QK: Tensor | None


@dataclass(frozen=True, eq=False)
class Segments:
    """How a packed row is cut into sequences.

    `q_bounds_S` and `k_bounds_S` (S + 1, int32) are the places where the queries and the keys of each sequence begin.
    `keys_K` are the places of the keys in the packed row, None where keys and tokens are the same. In a causal sequence
    the last query sees all keys, the one before it all but the last, and so on. `even_length` is the common length of
    all sequences if they have one and none has a prefix, else 0. `buckets`, and `bucket_row_T`, the place of each token
    in their concatenated batches, exist only where attention needs them: off the GPU, or in float32.
    """

    q_bounds_S: Tensor
    k_bounds_S: Tensor
    keys_K: Tensor | None
    max_q: int
    max_k: int
    is_causal: bool
    even_length: int
    buckets: tuple[SequenceBatch, ...]
    bucket_row_T: Tensor | None

    @classmethod
    def build(cls, spans: Sequence[Span], is_causal: bool, device: torch.device | str, with_buckets: bool) -> Segments:
        """Return the segments of sequences that cover the packed tokens in order."""
        q_lengths = [s.length for s in spans]
        k_lengths = [s.num_keys for s in spans]
        shares = any(s.prefix_length for s in spans)
        even = 0
        keys_K = None
        if shares:
            keys_K = torch.from_numpy(np.concatenate([_keys(span) for span in spans])).to(device)
        elif len(set(q_lengths)) == 1:
            even = q_lengths[0]
        buckets: tuple[SequenceBatch, ...] = ()
        rows = None
        if with_buckets and not even:
            buckets, rows = _buckets(spans, is_causal, device)
        return cls(
            q_bounds_S=_bounds(q_lengths, device),
            k_bounds_S=_bounds(k_lengths, device),
            keys_K=keys_K,
            max_q=_rounded(max(q_lengths)),
            max_k=_rounded(max(k_lengths)),
            is_causal=is_causal,
            even_length=even,
            buckets=buckets,
            bucket_row_T=rows,
        )


def segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float) -> Tensor:
    """Return the attention of (T, heads, D) queries over (T, key heads, D) keys and values, (T, heads, D)."""
    if not needs_buckets(query.device, query.dtype):
        return _varlen(query, key, value, segments, scaling)
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    if segments.even_length:
        q, k, v = (x.unflatten(0, (-1, segments.even_length)).transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=segments.is_causal, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)
    assert segments.bucket_row_T is not None, "these segments were built for variable-length attention alone"
    queries = _rows(query, [bucket.queries_BQ for bucket in segments.buckets])
    keys, values = (_rows(x, [bucket.keys_BK for bucket in segments.buckets]) for x in (key, value))
    padded = []
    for bucket, q, k, v in zip(segments.buckets, queries, keys, values, strict=True):
        seen = bucket.seen_B1QK
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling)
        padded.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(padded).index_select(0, segments.bucket_row_T)


def _rows(x: Tensor, places: Sequence[Tensor]) -> list[Tensor]:
    """Return the (T, heads, D) rows of `x` at the (B, T) places of each bucket, as (B, heads, T, D).

    They are read at once, so that their gradient is one sum, and by `index_select`, whose gradient repeats to the bit:
    every sample of a prompt reads the prompt's keys, and the gradient of plain indexing adds these up in whatever order
    the threads of a CPU reach them.
    """
    rows = x.index_select(0, torch.cat([each.flatten() for each in places]))
    parts = rows.split([each.numel() for each in places])
    return [part.unflatten(0, each.shape).transpose(1, 2) for part, each in zip(parts, places, strict=True)]


def needs_buckets(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether attention runs over padded batches: flash attention needs a GPU and half precision."""
    return device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16)


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if segments.keys_K is not None:
        key = key.index_select(0, segments.keys_K)
        value = value.index_select(0, segments.keys_K)
    size = query.shape[-1]
    if size % 8:  # the kernel accepts multiples of 8 only; zeros change no score
        query, key, value = (F.pad(x, (0, -size % 8)) for x in (query, key, value))
    # A causal window is aligned at the lower right: the last query of a sequence sees its last key.
    window = (-1, 0) if segments.is_causal else (-1, -1)
    out: Any = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        segments.q_bounds_S,
        segments.k_bounds_S,
        segments.max_q,
        segments.max_k,
        window_size=window,
        scale=scaling,
        **_GROUPED_HEADS,
    )
    return out[..., :size]


#: For keys with fewer heads than queries: torch up to 2.11 needs no flag, later versions do.
_GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if torch.__version__ >= "2.12" else {}


def text_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a decoder layer for (B, heads, T, D) tensors; return (B, T, heads, D).

    With `segments` there is one packed row and the mask is ignored; without, this is Transformers' "sdpa".
    """
    if segments is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return segment_attention(q, k, v, segments, options["scaling"]).unsqueeze(0), None
    # A decode step: Transformers would copy keys and values for each of their query heads.
    if query.shape[2] == 1:
        return _one_query(query, key, value, attention_mask, options["scaling"]), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _one_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return the attention of one query a row, (B, 1, heads, D).

    The query heads of a key head are its queries here, so that its keys and values need not be copied for each.
    """
    grouped_BKQD = query.view(query.shape[0], key.shape[1], -1, query.shape[-1])
    out_BKQD = F.scaled_dot_product_attention(grouped_BKQD, key, value, attn_mask=mask, scale=scaling)
    return out_BKQD.flatten(1, 2)[:, None]


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    segments: Sequence[Segments],
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a vision layer inside each image or window.

    Tensors are (1, heads, T, D); returns (1, T, heads, D). A tower with windows has two segmentations of its patches;
    the bounds that a layer gets say which one to use.
    """
    # By identity: a comparison of values would recompile a compiled block for every new number of sequences.
    chosen = next(each for each in segments if each.q_bounds_S is cu_seq_lens_q)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return segment_attention(q, k, v, chosen, scaling).unsqueeze(0), None


def register_attention() -> None:
    """Register both functions with Transformers; another call changes nothing.

    cuDNN's attention is off from then on: in half precision it takes 0.1 to 1 s for each new length of its inputs, and
    a stream that is written has a new length at every token.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(TEXT_ATTENTION, text_attention)
    AttentionMaskInterface.register(TEXT_ATTENTION, sdpa_mask)
    AttentionInterface.register(VISION_ATTENTION, vision_attention)


def _bounds(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)


def _rounded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _keys(span: Span) -> NDArray[np.int64]:
    prefix = np.arange(span.prefix_start, span.prefix_start + span.prefix_length)
    return np.concatenate([prefix, np.arange(span.start, span.start + span.length)])


def _buckets(
    spans: Sequence[Span], is_causal: bool, device: torch.device | str
) -> tuple[tuple[SequenceBatch, ...], Tensor]:
    """Batch the sequences whose numbers of queries, and of keys, round up to the same power of two.

    Returns the buckets and the place of each token in their concatenated batches.
    """

    def size(span: Span) -> tuple[int, int]:
        # Up to a power of two: less than half of a bucket is padding.
        return (span.length - 1).bit_length(), (span.num_keys - 1).bit_length()

    order = sorted(range(len(spans)), key=lambda index: (size(spans[index]), index))
    rows_T = np.empty(sum(span.length for span in spans), dtype=np.int64)
    buckets = []
    base = 0
    for _, members in itertools.groupby(order, key=lambda index: size(spans[index])):
        chosen = [spans[index] for index in members]
        width_q = max(s.length for s in chosen)
        width_k = max(s.num_keys for s in chosen)
        queries_BQ = np.zeros((len(chosen), width_q), dtype=np.int64)
        keys_BK = np.zeros((len(chosen), width_k), dtype=np.int64)
        for number, span in enumerate(chosen):
            queries_BQ[number, : span.length] = np.arange(span.start, span.start + span.length)
            # Places of other rows of the bucket stay 0: the mask hides them.
            keys_BK[number, : span.num_keys] = _keys(span)
            rows_T[span.start : span.start + span.length] = base + np.arange(span.length)
            base += width_q
        seen_B1QK = None
        # Without prefixes a query never sees padding: that comes after it. A mask would be quadratic in the length.
        if not is_causal or any(span.prefix_length for span in chosen):
            seen_B1QK = torch.from_numpy(_seen(chosen, width_q, width_k, is_causal)).to(device)
        places = (torch.from_numpy(queries_BQ).to(device), torch.from_numpy(keys_BK).to(device))
        buckets.append(SequenceBatch(*places, seen_B1QK))
    return tuple(buckets), torch.from_numpy(rows_T).to(device)


def _seen(spans: Sequence[Span], width_q: int, width_k: int, is_causal: bool) -> NDArray[np.bool_]:
    """Return which keys each query of a bucket sees, (B, 1, Q, K)."""
    seen_BQK = np.zeros((len(spans), width_q, width_k), dtype=np.bool_)
    seen_BQK[:, :, 0] = True  # a padding query that sees nothing would give NaN
    for number, span in enumerate(spans):
        seen_QK = seen_BQK[number, : span.length, : span.num_keys]
        if is_causal:
            last_Q = np.arange(span.prefix_length, span.num_keys)
            np.greater_equal.outer(last_Q, np.arange(span.num_keys), out=seen_QK)
        else:
            seen_QK[:] = True
    return seen_BQK[:, None]
