"""Cuts images into patches as the checkpoint's processor does, in two steps: levels by patch, then their values.

A processor of the Qwen family gives each pixel a value that depends on its level and channel alone, and orders the
values by patch. `learn_values` reads the values off the processor itself, and proves that nothing else happens. So a
image can wait and travel as one byte for each level, a quarter of its patches in bfloat16, and get its values on the
GPU that encodes it.

Legend: P patches, N values of a patch, C channels, L levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from agents.engines.sglang.in_server.kept_images import Grid

CHANNELS = 3
LEVELS = 256
#: Sides of the images to learn from, in patches: one of them is not resized.
PROBE_SIDES = (4, 8, 16, 32, 64)
#: What a processor returns: patches (P, N), and their grid.
Processed = Callable[[Image.Image], tuple[Tensor, Grid]]


@dataclass(frozen=True)
class PatchForm:
    """Pixels along a side of a patch, patches along a side of a token, and how often an image stands in a patch.

    The last is because patches were made for videos.
    """

    patch_size: int
    merge_size: int
    frames: int


def ordered_levels(image: Image.Image, form: PatchForm) -> tuple[Tensor, Grid]:
    """Return the levels of an RGB image by patch and channel, for one frame, and the grid of its patches.

    Its sides must be multiples of patch size times merge size. Example: an image of 160 x 128 in patches of 16 gives
    levels of shape (80, 768) and the grid (1, 8, 10).
    """
    size = form.patch_size
    merge = form.merge_size
    rows = image.height // size // merge
    columns = image.width // size // merge
    pixels = np.asarray(image).reshape(rows, merge, size, columns, merge, size, CHANNELS)
    levels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 4, 6, 2, 5))
    return torch.from_numpy(levels).view(-1, CHANNELS * size**2), (1, rows * merge, columns * merge)


def patch_values(levels_PN: Tensor, values_CL: Tensor, frames: int) -> Tensor:
    """Return the patches of `ordered_levels` by the value of each level, (P, C * frames * pixels of a patch)."""
    levels_PCN = levels_PN.long().unflatten(1, (CHANNELS, -1))
    levels_PCN += torch.arange(CHANNELS, device=levels_PN.device)[:, None] * LEVELS
    values_PCN = values_CL.flatten()[levels_PCN]
    return values_PCN[:, :, None].expand(-1, -1, frames, -1).flatten(1)


def learn_values(reference: Processed, form: PatchForm) -> Tensor | None:
    """Return the values (C, L) by which `patch_values` does what `reference` does; None if there are none."""
    random = np.random.default_rng(0)
    for side in PROBE_SIDES:
        height = side * form.patch_size
        width = 2 * side * form.patch_size
        pixels = random.permutation(height * width * CHANNELS).reshape(height, width, CHANNELS) % LEVELS
        probe = Image.fromarray(pixels.astype(np.uint8))
        patches, grid = reference(probe)
        if grid == (1, side, 2 * side):
            return _values(ordered_levels(probe, form)[0], patches.detach().cpu().contiguous(), form.frames)
    return None


def _values(levels_PN: Tensor, wanted: Tensor, frames: int) -> Tensor | None:
    """Return the values that turn these levels into these patches; None where one depends on more than its level."""
    if wanted.shape != (len(levels_PN), levels_PN.shape[1] * frames):
        return None
    values_CL = wanted.new_zeros(CHANNELS, LEVELS)
    levels_PCN = levels_PN.long().unflatten(1, (CHANNELS, -1))
    wanted_PCN = wanted.view(len(wanted), CHANNELS, frames, -1)[:, :, 0]
    for channel in range(CHANNELS):
        values_CL[channel, levels_PCN[:, channel]] = wanted_PCN[:, channel]
    made = patch_values(levels_PN, values_CL, frames)
    if torch.equal(made.view(torch.uint8), wanted.view(torch.uint8)):
        return values_CL
    return None
