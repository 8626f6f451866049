"""Images for the model, each processed once: a picture in, patches and a grid out, addressed by content hash.

The processor is the checkpoint's own, in its Pillow form, so torchvision is not needed. A picture is resized here, and
only here: an engine elsewhere gets the resized picture as a PNG file (`ProcessedImage.png`), whose resizing there
changes nothing, so that engine and trainer see the same pixels.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agents.types import ProcessedImage
from envs.errors import UserError
from envs.images import image_digest

MAX_BYTES = 2 * 2**30
#: The most extreme sides that the processor takes, long to short.
MAX_RATIO = 200


@dataclass(frozen=True)
class ImageStats:
    """What a store holds and has done: `bytes` are those held, `process_s` the seconds spent on `misses` pictures.

    `hits` count pictures that were there already. An eviction frees a picture unless a trajectory still has it.
    """

    num_images: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    process_s: float = 0.0


@dataclass(frozen=True, eq=False)
class _Seen:
    """A picture object whose digest is known: its pixels' memory, and the digest."""

    picture: weakref.ref[Image.Image]
    pixels: Any
    digest: str


class ImageStore:
    """Turns pictures into `ProcessedImage`s and keeps the latest, so that all samples of a group share one.

    Example::

        store = ImageStore.from_checkpoint("path/to/model")
        image = store.process(Image.new("RGB", (160, 128)))    # image.num_tokens == 20
        store.stats()                                          # ImageStats(num_images=1, bytes=307200, misses=1, ...)

    At most `max_bytes` are kept, the pictures used longest ago being let go first. One that is let go while a
    trajectory still holds it is found again, not processed again. An object that was processed before is not even
    hashed: it is marked read-only for Pillow, which then copies the pixels before it draws on them, so that changed
    pixels are seen as other memory and hashed anew. (A write through the pixel access object of `Image.load` raises;
    `Image.frombytes` called on such an object is the one change that goes unseen.)
    """

    def __init__(self, processor: Any, merge_size: int, max_bytes: int = MAX_BYTES) -> None:
        self._processor, self.merge_size, self.max_bytes = processor, merge_size, max_bytes
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[str, ProcessedImage] = weakref.WeakValueDictionary()
        self._seen: dict[int, _Seen] = {}
        self._bytes = self._hits = self._misses = self._evictions = 0
        self._process_s = 0.0

    @classmethod
    def from_checkpoint(cls, path: str | Path, max_bytes: int = MAX_BYTES) -> ImageStore:
        """Read `preprocessor_config.json` of a model folder. Raises `UserError` where there is none."""
        store = cls.find(path, max_bytes)
        if store is None:
            rule = "must have preprocessor_config.json"
            raise UserError("--model", rule, str(path), "add the file from the model's repository")
        return store

    @classmethod
    def find(cls, path: str | Path, max_bytes: int = MAX_BYTES) -> ImageStore | None:
        """Read the image processor settings of a model folder; None where it has none, as a language model.

        Raises:
            UserError: the settings are not those of a Qwen vision-language model.
        """
        from transformers import ImageProcessingMixin
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            settings, _ = ImageProcessingMixin.get_image_processor_dict(path)
        except OSError:  # there is no such file
            return None
        kind = str(settings.get("image_processor_type", ""))
        if not kind.startswith(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")):
            rule = "must have the image processor of a Qwen vision-language model"
            raise UserError("--model", rule, kind or "none", "take a Qwen2.5-VL or Qwen3-VL checkpoint")
        processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        return cls(processor, int(processor.merge_size), max_bytes)

    def save(self, folder: str | Path) -> None:
        """Write `preprocessor_config.json`."""
        self._processor.save_pretrained(folder)

    def stats(self) -> ImageStats:
        """Return what the store holds and has done so far."""
        return ImageStats(
            len(self._images), self._bytes, self._hits, self._misses, self._evictions, round(self._process_s, 6)
        )

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the patches of a picture, from the store when it was seen before.

        Raises:
            ValueError: the picture has no pixels, or one side is more than 200 times the other.
        """
        seen = self._seen.get(id(image))
        if seen is not None and seen.picture() is image and image.im is seen.pixels and image.readonly:
            digest = seen.digest
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
        """Return the grid (time, rows, columns) into which `process` cuts a picture, without cutting it.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        height, width = stable_size(self._processor, image.height, image.width)
        return 1, height // self._processor.patch_size, width // self._processor.patch_size

    def _digest(self, picture: Image.Image) -> str:
        """Return the hash of the picture as RGB, and remember it for as long as the object lives unchanged."""
        if 0 in picture.size:
            raise ValueError(f"a picture must have pixels, got {picture.width}x{picture.height}")
        picture.load()
        digest = image_digest(picture if picture.mode == "RGB" else picture.convert("RGB"))
        key = id(picture)
        seen = self._seen

        def forget(reference: weakref.ref[Image.Image]) -> None:
            if key in seen and seen[key].picture is reference:
                del seen[key]

        picture.readonly = 1
        self._seen[key] = _Seen(weakref.ref(picture, forget), picture.im, digest)
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

    def _processed(self, digest: str, picture: Image.Image) -> ProcessedImage:
        height, width = stable_size(self._processor, picture.height, picture.width)
        if picture.size != (width, height):
            picture = picture.resize((width, height), resample=self._processor.resample)
        processed = self._processor(images=[picture], return_tensors="np")
        time_, rows, columns = (int(n) for n in processed["image_grid_thw"][0])
        return ProcessedImage(
            digest=digest,
            pixels_PD=np.asarray(processed["pixel_values"], dtype=np.float32),
            grid_thw=(time_, rows, columns),
            num_tokens=time_ * rows * columns // self.merge_size**2,
            picture=picture,
        )


def stable_size(processor: Any, height: int, width: int) -> tuple[int, int]:
    """Return the (height, width) to which the processor resizes, such that it would not resize the result again.

    That is its own size for all but very thin pictures (one side more than about 60 times the other), which it resizes
    to an area above its limit, or to a ratio that it refuses: those are resized until it has nothing left to change.

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
    raise ValueError(f"a picture of {width}x{height} pixels has no stable size under {limits}")
