"""Packs token streams into one row, the input of `PolicyModel.token_scores`.

Legend: T packed tokens, N chosen tokens, K ids that one was drawn from, M image placeholders.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.model.attention import Segments, Span
from agents.model.state_plan import StatePlan
from agents.types import ProcessedImage


@dataclass(frozen=True)
class VisionBatch:
    """The unique images of a batch, and the places of their features.

    The i-th image placeholder of the batch, streams in order, gets row `feature_index_M[i]` of the merged features of
    all images. Two streams that show one image use the same rows.
    """

    pixels_PD: Tensor
    grids: tuple[tuple[int, int, int], ...]
    feature_index_M: Tensor

    @classmethod
    def build(cls, images: Sequence[Sequence[ProcessedImage]], device: torch.device | str) -> VisionBatch | None:
        """Collect the images of each stream; return None when there is none.

        Example: two streams that both show one 20-token image give 80 patch rows and 40 feature indices 0..19, 0..19.
        """
        start_of: dict[str, int] = {}
        unique: list[ProcessedImage] = []
        index: list[np.ndarray] = []
        total = 0
        for stream in images:
            for image in stream:
                # By content: one image that several streams show is encoded once.
                if image.digest not in start_of:
                    start_of[image.digest] = total
                    unique.append(image)
                    total += image.num_tokens
                index.append(np.arange(image.num_tokens) + start_of[image.digest])
        if not unique:
            return None
        # Pinned memory is copied to a GPU ten times faster, and while the program continues.
        on_gpu = torch.device(device).type == "cuda"
        num_patches = sum(len(image.pixels_PD) for image in unique)
        patch_values = unique[0].pixels_PD.shape[1]
        pixels_PD = torch.empty(num_patches, patch_values, pin_memory=on_gpu)
        torch.cat([torch.from_numpy(image.pixels_PD) for image in unique], out=pixels_PD)
        return cls(
            pixels_PD=pixels_PD.to(device, non_blocking=True),
            grids=tuple(image.grid_thw for image in unique),
            feature_index_M=torch.from_numpy(np.concatenate(index)).to(device),
        )


@dataclass(frozen=True, eq=False)
class PackedStreams:
    """Sequences concatenated in one row, and the tokens to score.

    The logits at the places `before_N` predict the tokens `targets_N`, which were drawn from the ids `kept_NK`, or from
    all without them. `placeholders_M` are the places of the image placeholders, and `spans` are the sequences.
    """

    ids_T: Tensor
    positions_3T: Tensor
    segments: Segments
    vision: VisionBatch | None
    placeholders_M: Tensor
    before_N: Tensor
    targets_N: Tensor
    spans: tuple[Span, ...]
    kept_NK: Tensor | None = None

    @functools.cached_property
    def state_plan(self) -> StatePlan:
        """Where the sequences lie for layers with states; networks without never ask."""
        return StatePlan.build(self.spans, self.ids_T.device)

    @classmethod
    def build(
        cls,
        ids_T: NDArray[np.int64],
        positions_3T: NDArray[np.int64],
        spans: Sequence[Span],
        images: Sequence[Sequence[ProcessedImage]],
        before_N: NDArray[np.int64],
        targets_N: NDArray[np.int64],
        image_token_id: int,
        device: torch.device | str,
        with_buckets: bool,
        kept_NK: NDArray[np.int64] | None = None,
    ) -> PackedStreams:
        """Move a layout to a device. `images` are those of each sequence, in token order."""

        def tensor(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            ids_T=tensor(ids_T),
            positions_3T=tensor(positions_3T),
            segments=Segments.build(spans, True, device, with_buckets),
            vision=VisionBatch.build(images, device),
            placeholders_M=tensor(np.flatnonzero(ids_T == image_token_id)),
            before_N=tensor(before_N),
            targets_N=tensor(targets_N),
            spans=tuple(spans),
            kept_NK=None if kept_NK is None else tensor(kept_NK),
        )
