"""Packs lessons into batches of few shapes, so that few graphs are compiled.

Legend: B rows, T tokens, P patches of all pictures, M image placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.model.mrope import mrope_positions
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from trainer.starter.demonstrations import Demonstration

Grid = tuple[int, int, int]
#: Patches of the largest picture that fills a batch up.
MOST_BLANK = 512


@dataclass(frozen=True, eq=False)
class SftBatch:
    """Packed rows with their pictures, in row order.

    `document_BT` numbers the lessons inside a row from 1; 0 is padding. `patches_P` are (P, 3, 256) uint8. Blank
    pictures may follow those of the lessons; no token shows them.
    """

    ids_BT: Tensor
    document_BT: Tensor
    loss_mask_BT: Tensor
    positions_3BT: Tensor
    patches_P: Tensor
    grids: tuple[Grid, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> SftBatch:
        """Return the batch with a function applied to every tensor."""
        tensors = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    def to(self, device: torch.device) -> SftBatch:
        """Return the batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SftBatch:
        """Return the batch in pinned memory (for the data loader), so that copies to the device overlap with work."""
        return self.map(Tensor.pin_memory)

    def vision(self, num_placeholders: int) -> VisionBatch:
        """Return the pictures as the network takes them: values of -1 to 1, and two equal frames."""
        values = self.patches_P.float() / 127.5 - 1.0
        values = values[:, :, None].expand(-1, -1, 2, -1).flatten(1)
        return VisionBatch(values, self.grids, torch.arange(num_placeholders, device=values.device))


@dataclass(frozen=True)
class Collator:
    """Packs lessons into rows of `width` tokens: longest first, each into the first row with room.

    The number of rows, of pictures and of patches are multiples of the steps; padding fills them up.
    """

    image_token_id: int
    pad_id: int
    row_step: int = 1
    picture_step: int = 1
    patch_step: int = 1
    width: int = 576
    patch_size: int = 16
    merge_size: int = 2

    def __call__(self, lessons: Sequence[Demonstration]) -> SftBatch:
        rows = self.rows(lessons)
        width = max(self.width, *(len(d.ids_T) for d in lessons))
        height = _up(len(rows), self.row_step)
        ids_BT = np.full((height, width), self.pad_id, dtype=np.int64)
        document_BT = np.zeros((height, width), dtype=np.int32)
        mask_BT = np.zeros((height, width), dtype=bool)
        positions_3BT = np.zeros((3, height, width), dtype=np.int64)
        for row, packed in enumerate(rows):
            end = 0
            for number, d in enumerate(packed, 1):
                grids = [(1, *(side // self.patch_size for side in image.shape[:2])) for image in d.images]
                start, end = end, end + len(d.ids_T)
                ids_BT[row, start:end] = d.ids_T
                document_BT[row, start:end] = number
                mask_BT[row, start:end] = d.loss_mask_T
                positions_3BT[:, row, start:end] = mrope_positions(d.ids_T, grids, self.image_token_id, self.merge_size)
        patches_P, grids = self._patches([image for packed in rows for d in packed for image in d.images])
        tensors = [torch.from_numpy(x) for x in (ids_BT, document_BT, mask_BT, positions_3BT, patches_P)]
        return SftBatch(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], grids)

    def rows(self, lessons: Sequence[Demonstration]) -> list[list[Demonstration]]:
        """Return the lessons of each row, in order."""
        rows: list[list[Demonstration]] = []
        room: list[int] = []
        for d in sorted(lessons, key=lambda d: -len(d.ids_T)):
            length = len(d.ids_T)
            row = next((index for index, free in enumerate(room) if free >= length), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(max(self.width, length))
            rows[row].append(d)
            room[row] -= length
        return rows

    def _patches(self, images: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.uint8], tuple[Grid, ...]]:
        """Return the patches of all pictures and of blank ones that fill the batch up, and their grids."""
        grids: list[Grid] = [
            (1, image.shape[0] // self.patch_size, image.shape[1] // self.patch_size) for image in images
        ]
        pieces = [patchify(image, self.patch_size, self.merge_size) for image in images]
        num_patches, num_pictures = sum(map(len, pieces)), len(images)
        count = _up(num_pictures, self.picture_step) - num_pictures
        block = self.merge_size**2
        missing = _up(num_patches + count * block, self.patch_step) - num_patches
        while missing > count * MOST_BLANK:
            count += self.picture_step
            missing = _up(num_patches + count * block, self.patch_step) - num_patches
        for number in range(count):
            blocks = missing // block // count + (number < missing // block % count)
            grids.append((1, self.merge_size, self.merge_size * blocks))
        pieces.append(np.full((missing, 3, self.patch_size**2), 255, dtype=np.uint8))
        return np.concatenate(pieces), tuple(grids)


def patchify(image_HWC: NDArray[np.uint8], patch_size: int = 16, merge_size: int = 2) -> NDArray[np.uint8]:
    """Cut a picture into patches, (patches, channels, values), in the order of the starter's image processor."""
    rows, columns = (side // patch_size // merge_size for side in image_HWC.shape[:2])
    blocks = image_HWC.reshape(rows, merge_size, patch_size, columns, merge_size, patch_size, -1)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, image_HWC.shape[2], patch_size**2)


def taught_logits(model: PolicyModel, batch: SftBatch) -> Tensor:
    """Return the logits (N, V) from which the tokens of the loss mask are predicted, row by row."""
    num_placeholders = int((batch.ids_BT == model.image_token_id).sum())
    same_BTT = batch.document_BT[:, :, None] == batch.document_BT[:, None, :]
    target_BT = batch.loss_mask_BT.roll(-1, dims=1)  # lessons begin with a prompt, so no target wraps around
    mask_B1TT = same_BTT.tril()[:, None]
    return model(batch.ids_BT, batch.positions_3BT, mask_B1TT, target_BT, batch.vision(num_placeholders))


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
