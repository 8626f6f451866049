"""Embedded engines that do something wrong, for the doctor to find; each takes the place of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agents.engines.hf import HFEngine
from agents.engines.hf_batch import CachedPrefix
from agents.model.policy import PolicyModel
from agents.types import Completion, GenerateRequest, ProcessedImage
from tests.agents.engines.sglang_server import first


class ChangedImages(HFEngine):
    """An engine that reads other pixels than it is given."""

    def changed(self, pixels_PD: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what is read."""
        raise NotImplementedError

    def _images(self, images: Sequence[ProcessedImage]) -> tuple[ProcessedImage, ...]:
        return tuple(replace(image, pixels_PD=self.changed(image.pixels_PD)) for image in images)

    async def submit(self, session: Any, request: GenerateRequest) -> Completion:
        """Write a turn."""
        return await super().submit(session, replace(request, images=self._images(request.images)))

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Score a stream."""
        return await super().score(ids, self._images(images))


class BlindEngine(ChangedImages):
    """Ignores what is in an image."""

    def changed(self, pixels_PD: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return grey."""
        return np.zeros_like(pixels_PD)


class UnnormalisedEngine(ChangedImages):
    """Reads pixels from 0 to 1, as if its processor did not normalise."""

    def changed(self, pixels_PD: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take the normalisation back."""
        return pixels_PD * np.float32(0.5) + np.float32(0.5)


class SwappedEngine(HFEngine):
    """Has the weights of two layers of its decoder exchanged."""

    def __init__(self, model: PolicyModel, *args: Any, **options: Any) -> None:
        decoder: Any = model.backbone
        swap(*decoder.model.language_model.layers[:2])
        super().__init__(model, *args, **options)


class SwappedTowerEngine(HFEngine):
    """Has the weights of two layers of its vision tower exchanged."""

    def __init__(self, model: PolicyModel, *args: Any, **options: Any) -> None:
        backbone: Any = model.backbone
        swap(*backbone.model.visual.blocks[:2])
        super().__init__(model, *args, **options)


class StaleSessionEngine(HFEngine):
    """Lets open sessions go on with the keys and values that older weights have made."""

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Copy, and forget nothing."""
        kept = [(session, session.prefix) for session in self._open.values()]
        super().load_weights(weights, version)
        for session, prefix in kept:
            session.prefix = prefix


class StalePrefixEngine(HFEngine):
    """Keeps what it has read of prompts for later sessions, over changes of weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prompts: dict[tuple[int, ...], CachedPrefix] = {}

    async def submit(self, session: Any, request: GenerateRequest) -> Completion:
        """Begin with what is known of the prompt, and remember it."""
        if not session.prefix.ids and request.ids in self._prompts:
            session.prefix = self._prompts[request.ids]
        completion = await super().submit(session, request)
        end = len(request.ids) - 1
        self._prompts.setdefault(request.ids, first(session.prefix, end))
        return completion


class StaleImagesEngine(HFEngine):
    """Encodes each image once, over changes of weights."""

    def __init__(self, model: PolicyModel, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        encode, known = model.encode_images, dict[tuple[bytes, str], list[Tensor]]()

        def once(pixels_PD: Tensor, grids: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
            key = (pixels_PD.numpy().tobytes(), str(grids))
            if key not in known:
                with torch.inference_mode(False), torch.no_grad():
                    known[key] = encode(pixels_PD.clone(), grids, dtype)
            return known[key]

        model.encode_images = once  # type: ignore[method-assign]


@torch.no_grad()
def swap(one: nn.Module, other: nn.Module) -> None:
    """Exchange the weights of two layers of one kind."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    for a, b in pairs:
        mine, theirs = (p.to_local() if isinstance(p, DTensor) else p for p in (a, b))
        kept = mine.clone()
        mine.copy_(theirs)
        theirs.copy_(kept)
