"""Turns images into patches for the model, each image once, addressed by content hash.

The processor is the checkpoint's own, in its Pillow form, so torchvision is not needed. Images are resized only here:
an engine in another process gets the resized image as a PNG file (`ProcessedImage.png`), which it does not resize
again, so engine and trainer see the same pixels.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agents.types import ProcessedImage
from envs.errors import UserError, first_line
from envs.images import MAX_PIXELS, MAX_RATIO, image_digest

MAX_BYTES = 2 * 2**30
_LIMITS = ("min_pixels", "max_pixels")
#: How an image is cut, by the names in `vision_config`.
_CUTS = ("patch_size", "temporal_patch_size", "spatial_merge_size")


@dataclass(frozen=True)
class ImageStats:
    """The counters of a store: it holds `num_images` of `bytes` and took `process_s` seconds for `misses` images.

    `hits` counts images that it had already. An eviction frees an image unless a trajectory still has it.
    """

    num_images: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    process_s: float = 0.0


@dataclass(frozen=True, eq=False)
class _HashedImage:
    """An image object, the memory of its pixels when they were hashed, and their digest."""

    image: weakref.ref[Image.Image]
    pixels: Any
    digest: str


class ImageStore:
    """Turns images into `ProcessedImage`s and keeps the latest ones, so that all samples of a group share them.

    Example::

        store = ImageStore.find("path/to/model")
        image = store.process(Image.new("RGB", (160, 128)))    # image.num_tokens == 20
        store.stats()                                          # ImageStats(num_images=1, bytes=307200, misses=1, ...)

    The store keeps at most `max_bytes` and evicts the least recently used images first. It still finds an evicted
    image while a trajectory holds it. An image object is hashed once: the store marks it read-only for Pillow, which
    then copies the pixels before it draws on them; the store notices the new memory and hashes again. (A write through
    the pixel access object of `Image.load` raises; only `Image.frombytes` on such an object goes unnoticed.)
    """

    def __init__(self, processor: Any, merge_size: int, max_bytes: int = MAX_BYTES) -> None:
        self._processor = processor
        self.merge_size = merge_size
        self.max_bytes = max_bytes
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[str, ProcessedImage] = weakref.WeakValueDictionary()
        self._hashed: dict[int, _HashedImage] = {}
        self._bytes = self._hits = self._misses = self._evictions = 0
        self._process_s = 0.0

    @classmethod
    def find(cls, path: str | Path) -> ImageStore | None:
        """Read the image processor settings of a model folder; None where it has none, as a language model.

        Raises:
            UserError: the settings are not those of a Qwen vision-language model, or cannot process an image.
        """
        from transformers import ImageProcessingMixin
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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
        if not kind.startswith(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")):
            rule = "must have the image processor of a Qwen vision-language model"
            raise UserError("--model", rule, kind or "none", "take a Qwen2.5-VL or Qwen3-VL checkpoint")
        try:
            processor: Any = Qwen2VLImageProcessorPil.from_dict(_with_limits(settings))
            edges = (processor.size["shortest_edge"], processor.size["longest_edge"])
            if None in edges or not 0 < edges[0] <= min(edges[1], MAX_PIXELS):
                raise ValueError(f"the smallest and largest numbers of pixels are {edges[0]} and {edges[1]}")
            side = processor.patch_size * processor.merge_size
            patch = {"shortest_edge": side**2, "longest_edge": side**2}
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

    def stats(self) -> ImageStats:
        """Return the counters of the store."""
        return ImageStats(
            len(self._images), self._bytes, self._hits, self._misses, self._evictions, round(self._process_s, 6)
        )

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the patches of an image, from the store if it has them.

        Raises:
            ValueError: the image has no pixels, or one side is more than 200 times the other.
        """
        known = self._hashed.get(id(image))
        if known is not None and known.image() is image and image.im is known.pixels and image.readonly:
            digest = known.digest
        else:
            digest = self._digest(image)
        found = self._images.get(digest) or self._alive.get(digest)
        if found is None:
            started = time.perf_counter()
            found = self._alive[digest] = self._processed(digest, image.convert("RGB"))
            self._process_s += time.perf_counter() - started
            self._misses += 1
        else:
            self._hits += 1
        self._keep(digest, found)
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

    def _digest(self, image: Image.Image) -> str:
        """Return the hash of the image as RGB, and remember it while the object lives unchanged."""
        if 0 in image.size:
            raise ValueError(f"an image must have pixels, got {image.width}x{image.height}")
        image.load()
        digest = image_digest(image if image.mode == "RGB" else image.convert("RGB"))
        key = id(image)
        hashed = self._hashed

        def forget(reference: weakref.ref[Image.Image]) -> None:
            if key in hashed and hashed[key].image is reference:
                del hashed[key]

        image.readonly = 1
        self._hashed[key] = _HashedImage(weakref.ref(image, forget), image.im, digest)
        return digest

    def _keep(self, digest: str, image: ProcessedImage) -> None:
        if digest not in self._images:
            self._bytes += image.num_bytes
        self._images[digest] = image
        self._images.move_to_end(digest)
        while self._bytes > self.max_bytes and len(self._images) > 1:
            _, oldest = self._images.popitem(last=False)
            self._bytes -= oldest.num_bytes
            self._evictions += 1

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
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    limits = {
        "factor": processor.patch_size * processor.merge_size,
        "min_pixels": processor.size["shortest_edge"],
        "max_pixels": processor.size["longest_edge"],
    }
    size = smart_resize(height, width, **limits)
    for _ in range(100):
        longest = MAX_RATIO * min(size)
        size = (min(size[0], longest), min(size[1], longest))
        again = smart_resize(*size, **limits)
        if again == size:
            return size
        size = again
    raise ValueError(f"an image of {width}x{height} pixels has no stable size under {limits}")
