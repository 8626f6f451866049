"""Hands a prepared prompt from SGLang's tokenizer manager to its scheduler.

Up to 0.5.18 SGLang pickles what its processors return. A `PreparedPrompt` pickles as numbers and `ImageAddress`es,
and is unpickled in the scheduler as SGLang's own `MultimodalProcessorOutput`, whose images are mapped from shared
memory. Later releases write records field by field, so they get their own record, with the kept images in it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import functools
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import sglang
import torch
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)

from agents.engines.sglang.in_server import scheduler
from agents.engines.sglang.in_server.cutting import CHANNELS, LEVELS
from agents.engines.sglang.in_server.kept_images import ImageAddress, map_image
from agents.engines.sglang.in_server.prompts import ExpandedPrompt
from agents.engines.sglang.in_server.scheduler.levels import LEVEL_VALUES

#: The releases whose scheduler is known to take what is handed over. With another one SGLang ignores these modules.
PROVEN = tuple(f"0.5.{number}" for number in range(15, 24))
if not sglang.__version__.startswith(PROVEN):
    raise ImportError(f"images are kept with SGLang {PROVEN[0]} to {PROVEN[-1]}, got {sglang.__version__}")
#: Whether records are pickled.
IS_PICKLED = dataclasses.is_dataclass(MultimodalProcessorOutput)


def takes_levels() -> bool:
    """Return whether the scheduler of this server gives levels their values, by `scheduler.levels`."""
    return os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE") == scheduler.__name__


def prepared_prompt(
    prompt: ExpandedPrompt,
    addresses: Sequence[ImageAddress],
    hashes: Sequence[int],
    level_values: torch.Tensor | None,
    token_ids: dict[str, Any],
) -> Any:
    """Return what the processor returns; `hashes` are the keys of SGLang's caches, one an image.

    `level_values` are those of `patch_values`, for images that are kept as levels.
    """
    items = [
        MultimodalDataItem(modality=Modality.IMAGE, hash=number, offsets=[span])
        for number, span in zip(hashes, prompt.spans, strict=True)
    ]
    for item in items:
        item.set_pad_value()
    if IS_PICKLED:
        return PreparedPrompt(
            mm_items=items,
            input_ids=prompt.ids,
            prompt=prompt,
            addresses=addresses,
            level_values=level_values,
            **token_ids,
        )
    for item, address in zip(items, addresses, strict=True):
        item.feature = map_image(address)
        item.model_specific_data = _data(address, level_values)
    return MultimodalProcessorOutput(
        mm_items=items,
        input_ids=prompt.ids,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(prompt.ids, items),
        mrope_positions=torch.from_numpy(prompt.positions_3T),
        mrope_position_delta=torch.tensor([[prompt.delta]]),
        **token_ids,
    )


_Record: Any = MultimodalProcessorOutput if IS_PICKLED else object


class PreparedPrompt(_Record):
    """SGLang's record, with images by address and positions as bytes."""

    def __init__(
        self,
        prompt: ExpandedPrompt,
        addresses: Sequence[ImageAddress],
        level_values: torch.Tensor | None,
        **fields: Any,
    ) -> None:
        super().__init__(**fields)
        self.prompt = prompt
        self.addresses = tuple(addresses)
        self.level_values = level_values

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        keys = [(item.hash, item.pad_value, item.offsets[0]) for item in self.mm_items]
        padded_ids = array("q", self.build_padded_input_ids(self.prompt.ids, self.mm_items))
        ids = (self.im_token_id, self.im_start_id, self.im_end_id, self.video_token_id, self.audio_token_id)
        positions = self.prompt.positions_3T.tobytes()
        levels = None
        if self.level_values is not None:
            levels = str(self.level_values.dtype).split(".")[1], self.level_values.view(torch.uint8).numpy().tobytes()
        return unpack, (padded_ids, keys, self.addresses, levels, positions, self.prompt.delta, ids)


def _data(address: ImageAddress, level_values: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return what an item holds beside its image."""
    data = {"image_grid_thw": torch.tensor([address.grid_thw])}
    if address.dtype == "uint8":
        assert level_values is not None, "an image was kept as levels before their values were learnt"
        data[LEVEL_VALUES] = level_values
    return data


@functools.cache
def _level_values(dtype: str, values: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(values), dtype=getattr(torch, dtype)).view(CHANNELS, LEVELS)


def unpack(
    padded_ids: array[int],
    keys: Sequence[tuple[int, int, tuple[int, int]]],
    addresses: Sequence[ImageAddress],
    levels: tuple[str, bytes] | None,
    positions: bytes,
    delta: int,
    ids: tuple[int | None, ...],
) -> Any:
    """Return SGLang's record of a prompt, in the scheduler."""
    if levels:
        level_values = _level_values(*levels)
    else:
        level_values = None
    items = [
        MultimodalDataItem(
            modality=Modality.IMAGE,
            hash=number,
            pad_value=pad_value,
            offsets=[span],
            feature=map_image(address),
            model_specific_data=_data(address, level_values),
        )
        for (number, pad_value, span), address in zip(keys, addresses, strict=True)
    ]
    names = ("im_token_id", "im_start_id", "im_end_id", "video_token_id", "audio_token_id")
    return MultimodalProcessorOutput(
        mm_items=items,
        padded_input_ids=padded_ids,
        mrope_positions=torch.frombuffer(bytearray(positions), dtype=torch.int64).view(3, -1),
        mrope_position_delta=torch.tensor([[delta]]),
        **dict(zip(names, ids, strict=True)),
    )
