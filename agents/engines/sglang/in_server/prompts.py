"""A prompt with images, ready for SGLang's scheduler: ids, where the images are in them, and mRoPE positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.engines.sglang.in_server.kept_images import Grid, ImageError
from agents.model.mrope import mrope_positions


@dataclass(frozen=True, eq=False)
class ExpandedPrompt:
    """Ids with one placeholder per image token, the first and last place of each image, positions of shape (3, T)."""

    ids: list[int]
    spans: list[tuple[int, int]]
    positions_3T: NDArray[np.int64]

    @property
    def delta(self) -> int:
        """What is added to a later token's place to get its position."""
        return int(self.positions_3T.max()) + 1 - len(self.ids)


def expand(ids: Sequence[int], grids: Sequence[Grid], image_token_id: int, merge_size: int) -> ExpandedPrompt:
    """Expand the one placeholder of each image; all other ids stay what they are.

    Raises:
        ImageError: there are more or fewer placeholders than images.

    >>> prompt = expand([7, 9, 7], [(1, 2, 4)], image_token_id=9, merge_size=2)
    >>> prompt.ids, prompt.spans, prompt.delta
    ([7, 9, 9, 7], [(1, 2)], 0)
    """
    # Ids come with one placeholder an image, as SGLang wants them from every client.
    places = [place for place, token in enumerate(ids) if token == image_token_id]
    if len(places) != len(grids):
        raise ImageError(f"{len(places)} placeholders for {len(grids)} images")
    expanded: list[int] = []
    spans: list[tuple[int, int]] = []
    end = 0
    for place, (time, height, width) in zip(places, grids, strict=True):
        expanded += ids[end:place]
        first = len(expanded)
        end = place + 1
        expanded += [image_token_id] * (time * height * width // merge_size**2)
        spans.append((first, len(expanded) - 1))
    expanded += ids[end:]
    positions_3T = mrope_positions(np.array(expanded, dtype=np.int64), grids, image_token_id, merge_size)
    return ExpandedPrompt(expanded, spans, positions_3T)
