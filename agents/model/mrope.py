"""Computes the multimodal rotary positions (mRoPE) of a token stream from its ids and image grids.

A text token has the same position on all three axes (time, height, width). An image's tokens share one time and
spread over height and width; the text after it continues at one past the image's largest position. Qwen2-VL, arXiv
2409.12191, section 2.1; equal to `get_rope_index` of Transformers, which tests compare it with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agents.types import ProcessedImage


def mrope_positions(
    ids_T: NDArray[np.int64], grids: Sequence[tuple[int, int, int]], image_token_id: int, merge_size: int
) -> NDArray[np.int64]:
    """Return the positions of every token, shape (3, T).

    `grids` are the (time, height, width) patch grids of the images in stream order; each image's placeholders must be
    one unbroken run. Without images every row counts from 0, and a network with ordinary rotary positions uses the
    first row. Raises AssertionError when placeholders and grids disagree.

    >>> mrope_positions(np.array([7, 9, 9, 7]), [(1, 2, 4)], image_token_id=9, merge_size=2).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    positions_3T = np.empty((3, len(ids_T)), dtype=np.int64)
    cursor = 0
    start = 0
    used = 0
    image_at = np.flatnonzero(ids_T == image_token_id)
    shapes = [(time, height // merge_size, width // merge_size) for time, height, width in grids]
    expected = sum(map(math.prod, shapes))
    assert len(image_at) == expected, f"placeholders: {len(image_at)} in the stream, {expected} in grids"
    for time, rows, columns in shapes:
        count = time * rows * columns
        first = int(image_at[used])
        last = int(image_at[used + count - 1])
        assert last - first == count - 1, f"placeholders {first} to {last} are no unbroken run of {count}"
        text = first - start
        positions_3T[:, start:first] = cursor + np.arange(text)
        cursor += text
        grid = np.stack(np.meshgrid(np.arange(time), np.arange(rows), np.arange(columns), indexing="ij"))
        positions_3T[:, first : first + count] = cursor + grid.reshape(3, -1)
        # Text goes on behind the largest position of the image.
        cursor += max(rows, columns)
        start = first + count
        used += count
    positions_3T[:, start:] = cursor + np.arange(len(ids_T) - start)
    return positions_3T


def num_images_within(
    ids: Sequence[int] | NDArray[np.int64], images: Sequence[ProcessedImage], image_token_id: int
) -> int:
    """Return how many of a stream's images are in its first ids; these must not end inside an image."""
    placeholders = np.count_nonzero(np.asarray(ids) == image_token_id)
    number = 0
    while placeholders > 0:
        placeholders -= images[number].num_tokens
        number += 1
    return number
