"""Computes the inputs of a vision tower besides pixels, for all images of a batch at once, from their grids."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agents.model.attention import Segments, Span

Grid = tuple[int, int, int]


def tower_inputs(
    grids: Sequence[Grid], merge: int, window: int | None, device: torch.device | str, with_buckets: bool = True
) -> dict[str, Any]:
    """Return the inputs of a vision tower besides pixels; `window` is the side of a window in merged tokens, if any.

    With these arguments the towers of Transformers (5.12 to 5.23) do not compute them image by image. `segments` is for
    `agents.model.attention.vision_attention`; `with_buckets` is needed unless variable-length attention runs.
    """

    def segments(lengths: Sequence[int]) -> Segments:
        starts = itertools.accumulate(lengths, initial=0)
        spans = [Span(start, length) for start, length in zip(starts, lengths, strict=False)]
        return Segments.build(spans, False, device, with_buckets)

    # Frames of a video attend to themselves alone.
    frames = [height * width for time, height, width in grids for _ in range(time)]
    images = segments(frames)
    inputs: dict[str, Any] = {
        "grid_thw": torch.tensor(grids, device=device),
        "position_ids": torch.cat([_patch_positions(grid, merge) for grid in grids]).to(device),
        "cu_seqlens": images.q_bounds_S,
        "max_seqlen": images.max_q,
        "segments": (images,),
    }
    if window is not None:
        orders, cuts = zip(*(_windows(grid, merge, window) for grid in grids), strict=True)
        begins = itertools.accumulate((len(order) for order in orders), initial=0)
        lengths = [length for cut in cuts for length in cut]
        windows = segments(lengths)
        inputs["window_index"] = torch.cat([order + begin for order, begin in zip(orders, begins, strict=False)]).to(
            device
        )
        inputs["cu_window_seqlens"] = windows.q_bounds_S
        inputs["max_window_seqlen"] = windows.max_q
        inputs["segments"] = (images, windows)
    return inputs


@functools.lru_cache(maxsize=256)
def _patch_positions(grid: Grid, merge: int) -> Tensor:
    """Return the row and column of each patch, (patches, 2), in the processor's order of merge blocks."""
    # Tokens merge blocks of patches, so a block's patches follow each other.
    time, height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    both = torch.stack([rows, columns], dim=-1).view(height // merge, merge, width // merge, merge, 2)
    return both.transpose(1, 2).reshape(-1, 2).repeat(time, 1)


@functools.lru_cache(maxsize=256)
def _windows(grid: Grid, merge: int, window: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the merged tokens of an image window by window, and the number of patches of each window.

    Windows begin at the upper left corner of each frame; those at the right and lower edge are smaller.
    """
    time = grid[0]
    rows = grid[1] // merge
    columns = grid[2] // merge
    across = -(-columns // window)
    row, column = torch.meshgrid(torch.arange(rows) // window, torch.arange(columns) // window, indexing="ij")
    in_frame = (row * across + column).flatten()
    number = (torch.arange(time)[:, None] * (-(-rows // window) * across) + in_frame).flatten()
    return number.argsort(stable=True), tuple((number.bincount() * merge**2).tolist())
