"""Cuts pictures into patches as the checkpoint's processor does: several at once, and many times faster.

A processor of the Qwen family gives each pixel a value that depends on its level and channel alone, and orders the
values by patch. `PatchCutter.learn` reads both off the processor itself, and proves that nothing else happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from agents.engines.sglang.in_server.kept_pictures import Allocate, Grid

CHANNELS, LEVELS = 3, 256
#: Sides of the pictures to learn from, in patches: one of them is not resized.
PROBE_SIDES = (4, 8, 16, 32, 64)
#: What a processor returns: patches of shape (P, channels * frames * patch size squared), and their grid.
Processed = Callable[[Image.Image], tuple[torch.Tensor, Grid]]


@dataclass(frozen=True, eq=False)
class PatchCutter:
    """Cuts pictures that the processor would not resize.

    `values` has the bits of each level's value, channel by channel. `frames` is how often a picture stands in a patch,
    which was made for videos.

    Example::

        cutter = PatchCutter.learn(processor_cut, patch_size=16, merge_size=2, frames=2)
        grid = cutter.cut(picture, torch.empty)     # 160 x 128: (1, 8, 10), written to a tensor of (80, 1536)
    """

    values: NDArray[np.unsignedinteger]
    dtype: torch.dtype
    patch_size: int
    merge_size: int
    frames: int

    @classmethod
    def learn(cls, reference: Processed, patch_size: int, merge_size: int, frames: int) -> PatchCutter | None:
        """Return the cutter that does what `reference` does; None if there is none."""
        random = np.random.default_rng(0)
        for side in PROBE_SIDES:
            height, width = side * patch_size, 2 * side * patch_size
            levels = random.permutation(height * width * CHANNELS).reshape(height, width, CHANNELS) % LEVELS
            probe = Image.fromarray(levels.astype(np.uint8))
            patches, grid = reference(probe)
            if grid == (1, side, 2 * side):
                return cls._from_probe(probe, patches.detach().cpu(), patch_size, merge_size, frames)
        return None

    @classmethod
    def _from_probe(
        cls, probe: Image.Image, patches: torch.Tensor, patch_size: int, merge_size: int, frames: int
    ) -> PatchCutter | None:
        """Return the cutter that gives these patches; None where a value depends on more than level and channel."""
        bits = np.dtype(f"u{patches.dtype.itemsize}")
        wanted = patches.contiguous().view(torch.uint8).numpy().view(bits)
        values = np.tile(np.arange(LEVELS, dtype=bits), (CHANNELS, 1))  # each level is its own value
        unchanged = cls(values, patches.dtype, patch_size, merge_size, frames)
        levels = unchanged._bits_of(probe)
        if wanted.shape != levels.shape:
            return None
        learnt = np.zeros_like(values)
        seen_PCN, wanted_PCN = (values_PN.reshape(len(wanted), CHANNELS, -1) for values_PN in (levels, wanted))
        for channel in range(CHANNELS):
            learnt[channel, seen_PCN[:, channel]] = wanted_PCN[:, channel]
        cutter = replace(unchanged, values=learnt)
        return cutter if np.array_equal(cutter._bits_of(probe), wanted) else None

    def cut(self, picture: Image.Image, allocate: Allocate) -> Grid:
        """Write the patches of an RGB picture whose sides are multiples of patch size times merge size."""
        patches = allocate(self._shape(picture), self.dtype)
        self._write_bits(picture, patches.view(torch.uint8).numpy().view(self.values.dtype))
        return 1, picture.height // self.patch_size, picture.width // self.patch_size

    def _shape(self, picture: Image.Image) -> tuple[int, int]:
        """Return the number of patches and of values of each."""
        area = self.patch_size**2
        return picture.height * picture.width // area, CHANNELS * self.frames * area

    def _bits_of(self, picture: Image.Image) -> NDArray[np.unsignedinteger]:
        """Return the values of a picture in the order of patches, as bits: shape (P, values of a patch)."""
        return self._write_bits(picture, np.empty(self._shape(picture), self.values.dtype))

    def _write_bits(self, picture: Image.Image, out_PN: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        size, merge = self.patch_size, self.merge_size
        rows, columns = picture.height // size // merge, picture.width // size // merge
        run = np.dtype(f"V{self.values.itemsize * size}")  # a row of a patch: copied as one item
        out = out_PN.view(run).reshape(rows, columns, merge, merge, CHANNELS, self.frames, size)
        levels = np.asarray(picture)
        for channel in range(CHANNELS):
            values = np.take(self.values[channel], levels[:, :, channel]).view(run)
            ordered = values.reshape(rows, merge, size, columns, merge).transpose(0, 3, 1, 4, 2)
            out[:, :, :, :, channel] = ordered[:, :, :, :, None]
        return out_PN
