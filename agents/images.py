"""Images for the model, each processed once: a picture in, patches and a grid out, addressed by content hash.

The processor is the checkpoint's own, in its Pillow form, so torchvision is not needed.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agents.types import ProcessedImage
from envs.images import image_digest


class ImageStore:
    """Turns pictures into `ProcessedImage`s and keeps the latest, so that all samples of a group share one.

    Example::

        store = ImageStore.from_checkpoint("path/to/model")
        image = store.process(Image.new("RGB", (160, 128)))    # image.num_tokens == 20
    """

    def __init__(self, processor: Any, merge_size: int, capacity: int = 1024) -> None:
        self._processor, self.merge_size, self._capacity = processor, merge_size, capacity
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> ImageStore:
        """Read `preprocessor_config.json` of a model folder."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        return cls(processor, merge_size=int(processor.merge_size))

    def save(self, folder: str | Path) -> None:
        """Write `preprocessor_config.json`."""
        self._processor.save_pretrained(folder)

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the patches of a picture (RGB), from the store when it was seen before."""
        image = image.convert("RGB")
        digest = image_digest(image)
        if digest in self._images:
            self._images.move_to_end(digest)
            return self._images[digest]
        processed = self._processor(images=[image], return_tensors="np")
        time, height, width = (int(n) for n in processed["image_grid_thw"][0])
        result = ProcessedImage(
            digest=digest,
            pixels_PD=np.asarray(processed["pixel_values"], dtype=np.float32),
            grid_thw=(time, height, width),
            num_tokens=time * height * width // self.merge_size**2,
        )
        self._images[digest] = result
        if len(self._images) > self._capacity:
            self._images.popitem(last=False)
        return result
