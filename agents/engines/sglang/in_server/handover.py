"""Hands a prepared prompt from SGLang's tokenizer manager to its scheduler.

Up to 0.5.18 SGLang pickles what its processors return. A `PreparedPrompt` pickles as numbers and `ImageAddress`es,
and is unpickled in the scheduler as SGLang's own `MultimodalProcessorOutput`, whose images are mapped from shared
memory. Later releases write records field by field, so they get their own record, with the kept images in it.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
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

from agents.engines.sglang.in_server.kept_images import ImageAddress, map_image
from agents.engines.sglang.in_server.prompts import ExpandedPrompt

#: The releases whose scheduler is known to take what is handed over. With another one SGLang ignores these modules.
PROVEN = tuple(f"0.5.{number}" for number in range(15, 24))
if not sglang.__version__.startswith(PROVEN):
    raise ImportError(f"images are kept with SGLang {PROVEN[0]} to {PROVEN[-1]}, got {sglang.__version__}")
#: Whether records are pickled.
IS_PICKLED = dataclasses.is_dataclass(MultimodalProcessorOutput)


def prepared_prompt(
    prompt: ExpandedPrompt,
    addresses: Sequence[ImageAddress],
    hashes: Sequence[int],
    token_ids: dict[str, Any],
) -> Any:
    """Return what the processor returns; `hashes` are the keys of SGLang's caches, one an image."""
    items = [
        MultimodalDataItem(modality=Modality.IMAGE, hash=number, offsets=[span])
        for number, span in zip(hashes, prompt.spans, strict=True)
    ]
    for item in items:
        # Stands for the placeholders in the prefix cache, so that images with other hashes share nothing.
        item.set_pad_value()
    if IS_PICKLED:
        return PreparedPrompt(prompt, items, addresses, token_ids)
    _attach(items, addresses)
    return MultimodalProcessorOutput(
        mm_items=items,
        input_ids=prompt.ids,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(prompt.ids, items),
        mrope_positions=torch.from_numpy(prompt.positions_3T),
        mrope_position_delta=torch.tensor([[prompt.delta]]),
        **token_ids,
    )


def _attach(items: Sequence[Any], addresses: Sequence[ImageAddress]) -> None:
    """Give SGLang's items their images."""
    for item, address in zip(items, addresses, strict=True):
        item.feature = map_image(address)
        item.model_specific_data = {"image_grid_thw": torch.tensor([address.grid_thw])}


_Record: Any = MultimodalProcessorOutput if IS_PICKLED else object


class PreparedPrompt(_Record):
    """SGLang's record, with images by address and positions as bytes."""

    def __init__(
        self, prompt: ExpandedPrompt, items: list[Any], addresses: Sequence[ImageAddress], token_ids: dict[str, Any]
    ) -> None:
        super().__init__(mm_items=items, input_ids=prompt.ids, **token_ids)
        self.prompt = prompt
        self.token_ids = token_ids
        self.addresses = tuple(addresses)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        padded_ids = array("q", self.build_padded_input_ids(self.prompt.ids, self.mm_items))
        positions = self.prompt.positions_3T.tobytes()
        return unpack, (padded_ids, self.mm_items, self.addresses, positions, self.prompt.delta, self.token_ids)


def unpack(
    padded_ids: array[int],
    items: list[Any],
    addresses: Sequence[ImageAddress],
    positions: bytes,
    delta: int,
    token_ids: dict[str, Any],
) -> Any:
    """Return SGLang's record of a prompt, in the scheduler."""
    _attach(items, addresses)
    return MultimodalProcessorOutput(
        mm_items=items,
        padded_input_ids=padded_ids,
        mrope_positions=torch.frombuffer(bytearray(positions), dtype=torch.int64).view(3, -1),
        mrope_position_delta=torch.tensor([[delta]]),
        **token_ids,
    )
