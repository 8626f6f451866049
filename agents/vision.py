"""Attention of the vision towers over all images at once, and the indices that it takes: grids in, tensors out.

Transformers calls attention once an image, or once a window, unless it is flash attention. `vision_attention` poses as
one such and runs the segments (images or windows) of one length as one batch.

Legend: P patches of all images, S segments, L patches of a segment.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Transformers hands whole ragged batches, with their cumulative lengths, only to attention functions named so.
VISION_ATTENTION = "trueturn_flash_vision"

Grid = tuple[int, int, int]


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    segments: Mapping[int, Sequence[Tensor]],
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention inside each segment. Tensors are (1, heads, P, head_dim); returns (1, P, heads, head_dim).

    `cu_seq_lens_q` (S + 1) says where segments begin and end; `segments[S]` are their patches as `segment_rows` gives
    them. A tower with windows has two ways to cut its patches, and one number of segments can not stand for both:
    as many windows as images are the images.
    """
    heads, patches, dim = query.shape[1:]
    count = len(cu_seq_lens_q) - 1
    if not segments[count]:
        q, k, v = (x.view(heads, count, patches // count, dim).transpose(0, 1) for x in (query[0], key[0], value[0]))
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        return out.transpose(1, 2).reshape(1, patches, heads, dim), None
    result = torch.empty_like(query[0].transpose(0, 1))  # (P, heads, head_dim)
    for rows_SL in segments[count]:
        q, k, v = (x[0][:, rows_SL].transpose(0, 1) for x in (query, key, value))  # (S, heads, L, head_dim)
        result[rows_SL.flatten()] = F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1)
    return result.unsqueeze(0), None


def segment_rows(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the rows of the patches of each segment, a (S, L) tensor a length; nothing where all have one length.

    >>> [rows.tolist() for rows in segment_rows([2, 1, 2])]
    [[[0, 1], [3, 4]], [[2]]]
    """
    if len(set(lengths)) == 1:
        return ()
    starts: dict[int, list[int]] = {}
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        starts.setdefault(length, []).append(start)
    return tuple(torch.tensor(begin)[:, None] + torch.arange(length) for length, begin in starts.items())


def tower_inputs(grids: Sequence[Grid], merge: int, window: int | None, device: torch.device | str) -> dict[str, Any]:
    """Return what a vision tower takes besides pixels; `window` is the side of a window in merged tokens, if any.

    The names are those that the towers of Transformers (5.12 to 5.23) take in place of computing them image by image,
    and `segments` for `vision_attention`.
    """
    frames = [height * width for time, height, width in grids for _ in range(time)]
    cuts = [frames]
    inputs: dict[str, Any] = {
        "grid_thw": torch.tensor(grids, device=device),
        "position_ids": torch.cat([_patch_positions(grid, merge) for grid in grids]).to(device),
        "cu_seqlens": _bounds(frames, device),
        "max_seqlen": max(frames),
    }
    if window is not None:
        orders, lengths = zip(*(_windows(grid, merge, window) for grid in grids), strict=True)
        begins = itertools.accumulate((len(order) for order in orders), initial=0)
        cuts.append([length for each in lengths for length in each])
        inputs["window_index"] = torch.cat([order + begin for order, begin in zip(orders, begins, strict=False)]).to(
            device
        )
        inputs["cu_window_seqlens"] = _bounds(cuts[1], device)
        inputs["max_window_seqlen"] = max(cuts[1])
    segments = {len(cut): tuple(rows.to(device) for rows in segment_rows(cut)) for cut in cuts}
    return {**inputs, "segments": segments}


def _bounds(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)


@functools.lru_cache(maxsize=256)
def _patch_positions(grid: Grid, merge: int) -> Tensor:
    """Return (patches, 2): row and column of each patch, in the merge-block order that the processor writes."""
    time, height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    both = torch.stack([rows, columns], dim=-1).view(height // merge, merge, width // merge, merge, 2)
    return both.transpose(1, 2).reshape(-1, 2).repeat(time, 1)


@functools.lru_cache(maxsize=256)
def _windows(grid: Grid, merge: int, window: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the merged tokens of an image window by window, and how many patches each window has.

    Windows begin at the upper left corner of each frame; those at the right and lower edge hold what is left.
    """
    time, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    across = -(-columns // window)
    row, column = torch.meshgrid(torch.arange(rows) // window, torch.arange(columns) // window, indexing="ij")
    in_frame = (row * across + column).flatten()
    number = (torch.arange(time)[:, None] * (-(-rows // window) * across) + in_frame).flatten()
    return number.argsort(stable=True), tuple((number.bincount() * merge**2).tolist())


def register_attention() -> None:
    """Make `vision_attention` known to Transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(VISION_ATTENTION, vision_attention)
