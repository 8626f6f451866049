"""Turns images into patches for the model, each image once, addressed by content hash.

The processor is the checkpoint's own, in its Pillow form, so torchvision is not needed. Images are resized only here:
an engine in another process gets the resized image as a PNG file (`ProcessedImage.png`), which it does not resize
again, so engine and trainer see the same pixels.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agents.types import ProcessedImage
from envs.errors import UserError, first_line
from envs.images import MAX_PIXELS, MAX_RATIO, image_digest

#: Patches are float32, and hold each pixel twice in time: they take eight times the bytes of their image.
MAX_BYTES = 2 * 2**30
_LIMITS = ("min_pixels", "max_pixels")
#: How an image is cut, by the names in `vision_config`.
_CUTS = ("patch_size", "temporal_patch_size", "spatial_merge_size")


class ImageStore:
    """Turns images into `ProcessedImage`s and keeps the latest ones, so that all samples of a group share them.

    Example::

        store = ImageStore.find("path/to/model")
        image = store.process(Image.new("RGB", (160, 128)))    # image.num_tokens == 20

    The store keeps at most `max_bytes` and evicts the least recently used images first.
    """

    def __init__(self, processor: Any, merge_size: int, max_bytes: int = MAX_BYTES) -> None:
        self._processor = processor
        self.merge_size = merge_size
        self.max_bytes = max_bytes
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._bytes = 0

    @classmethod
    def find(cls, path: str | Path) -> ImageStore | None:
        """Read the image processor settings of a model folder; None where it has none, as a language model.

        Raises:
            UserError: the settings are not those of a vision-language model of Qwen or GLM, or cannot process an image.
        """
        from transformers import ImageProcessingMixin

        try:
            settings, _ = ImageProcessingMixin.get_image_processor_dict(path)
        except OSError:  # there is no such file
            return None
        except Exception as error:  # as whatever reads it raises it
            rule, fix = "must have a readable preprocessor_config.json", "take the file of the model's repository"
            raise UserError("--model", rule, first_line(error), fix) from error
        if isinstance(settings, dict):
            kind = str(settings.get("image_processor_type", ""))
        else:
            kind = ""
        pillow_form = _pillow_form(kind)
        if pillow_form is None:
            rule = "must have the image processor of a Qwen or GLM vision-language model"
            raise UserError("--model", rule, kind or "none", "take a Qwen2.5-VL, Qwen3-VL or GLM-4.1V checkpoint")
        try:
            processor: Any = pillow_form.from_dict(_with_limits(settings))
            edges = (processor.size["shortest_edge"], processor.size["longest_edge"])
            if None in edges or not 0 < edges[0] <= min(edges[1], MAX_PIXELS):
                raise ValueError(f"the smallest and largest numbers of pixels are {edges[0]} and {edges[1]}")
            side = processor.patch_size * processor.merge_size
            patch = {"shortest_edge": side**2, "longest_edge": side**2}
            # One patch, white: it shows settings that Transformers takes and cannot compute with.
            with np.errstate(all="ignore"):
                tried = processor(images=[Image.new("RGB", (side, side), "white")], size=patch, return_tensors="np")
            if not np.isfinite(tried["pixel_values"]).all():
                raise ValueError("image_mean, image_std and rescale_factor give numbers that are not finite")
        except Exception as error:  # the processor raises what its settings lead to
            rule = "must have a preprocessor_config.json that can process an image"
            fix = 'take the model\'s own; limits are {"size": {"shortest_edge": 3136, "longest_edge": ...}}'
            raise UserError("--model", rule, first_line(error), fix) from error
        return cls(processor, int(processor.merge_size))

    def check_fits(self, vision: object) -> None:
        """Raise `UserError` if images are cut in another way than a `vision_config` says that they are read."""
        if not isinstance(vision, Mapping):
            return
        for name in _CUTS:
            ours = getattr(self._processor, name.removeprefix("spatial_"))
            if vision.get(name, ours) != ours:
                rule = f"must have the {name} of its config.json, {vision[name]}, in preprocessor_config.json too"
                raise UserError("--model", rule, ours, "take both files of the model's repository")

    def save(self, folder: str | Path) -> None:
        """Write `preprocessor_config.json`."""
        self._processor.save_pretrained(folder)

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the patches of an image, from the store if it has them.

        Raises:
            ValueError: the image has no pixels, or one side is more than 200 times the other.
        """
        if 0 in image.size:
            raise ValueError(f"an image must have pixels, got {image.width}x{image.height}")
        # A copy, which stays as it is when the user draws on the image later.
        image = image.convert("RGB")
        digest = image_digest(image)
        if digest in self._images:
            self._images.move_to_end(digest)
            return self._images[digest]
        found = self._images[digest] = self._processed(digest, image)
        self._bytes += found.num_bytes
        # The newest stays, however large it is: it is in use.
        while self._bytes > self.max_bytes and len(self._images) > 1:
            _, oldest = self._images.popitem(last=False)
            self._bytes -= oldest.num_bytes
        return found

    def grid(self, image: Image.Image) -> tuple[int, int, int]:
        """Return the grid (time, rows, columns) of an image without processing it.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        height, width = stable_size(self._processor, image.height, image.width)
        return 1, height // self._processor.patch_size, width // self._processor.patch_size

    def num_tokens(self, image: Image.Image) -> int:
        """Return the tokens of an image without processing it; raises as `grid`."""
        time_, rows, columns = self.grid(image)
        return time_ * rows * columns // self.merge_size**2

    def _processed(self, digest: str, image: Image.Image) -> ProcessedImage:
        height, width = stable_size(self._processor, image.height, image.width)
        if image.size != (width, height):
            image = image.resize((width, height), resample=self._processor.resample)
        processed = self._processor(images=[image], return_tensors="np")
        time_, rows, columns = (int(n) for n in processed["image_grid_thw"][0])
        return ProcessedImage(
            digest=digest,
            pixels_PD=np.asarray(processed["pixel_values"], dtype=np.float32),
            grid_thw=(time_, rows, columns),
            num_tokens=time_ * rows * columns // self.merge_size**2,
            resized=image,
        )


def _pillow_form(kind: str) -> Any | None:
    """Return the class that processes images with Pillow, by the `image_processor_type` of a checkpoint; or None."""
    if kind.startswith(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil
    if kind.startswith(("Glm4v", "Glm46V")):
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        return Glm4vImageProcessorPil
    return None


def _with_limits(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return image processor settings whose `min_pixels` and `max_pixels` stand beside `size`.

    There the processor reads them; older versions wrote them into `size`.

    >>> _with_limits({"size": {"min_pixels": 3136, "max_pixels": 100352}})
    {'min_pixels': 3136, 'max_pixels': 100352, 'size': None}
    """
    size = settings.get("size")
    if not isinstance(size, Mapping):
        return dict(settings)
    limits = {name: value for name, value in size.items() if name in _LIMITS}
    edges = {name: value for name, value in size.items() if name not in _LIMITS}
    given = {name: value for name, value in settings.items() if value is not None}
    return {**limits, **given, "size": edges if edges or not limits else None}


def stable_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    """Return a (height, width) that the processor would not resize again.

    This is the processor's own result for all but very thin images (one side more than about 60 times the other). The
    processor resizes those to an area above its limit, or to a ratio that it rejects; here they are resized repeatedly
    until nothing changes.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    module = sys.modules[type(processor).__module__]
    limits = {
        "factor": processor.patch_size * processor.merge_size,
        "min_pixels": processor.size["shortest_edge"],
        "max_pixels": processor.size["longest_edge"],
    }
    # GLM's counts the pixels of all frames that a patch holds.
    if type(processor).__name__.startswith("Glm"):
        limits |= dict.fromkeys(("num_frames", "temporal_factor"), processor.temporal_patch_size)
    size = module.smart_resize(height=height, width=width, **limits)
    for _ in range(100):
        longest = MAX_RATIO * min(size)
        size = (min(size[0], longest), min(size[1], longest))
        again = module.smart_resize(height=size[0], width=size[1], **limits)
        if again == size:
            return size
        size = again
    raise ValueError(f"an image of {width}x{height} pixels has no stable size under {limits}")
