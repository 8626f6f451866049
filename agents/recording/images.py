"""Reads the images of a recording: PNG files alone, whose pixels have the hash that is their name."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from PIL import Image

from agents.recording.safe_files import check_real_folder, read_regular
from envs.errors import UserError
from envs.images import MAX_BYTES, decode_image, image_digest

#: Bytes of decoded images to keep.
MAX_KEPT = 2**30
_FIX = "take a copy of the whole folder"


def read_image(path: Path) -> tuple[bytes, Image.Image]:
    """Return an image's file, and the image.

    Raises:
        UserError: there is no regular file, it is no PNG or a damaged one, it is too large, or its pixels have another
            hash than its name says.
    """
    check_real_folder(path.parent)
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise UserError(str(path), "must be a readable image", error.strerror or str(error), _FIX) from error
    # PNG alone: other decoders, such as that of EPS, run programs.
    image = decode_image(content, str(path), formats=("PNG",))
    # A stranger could put another image in its place, and a replay would blame the environment.
    if (digest := image_digest(image)) != path.stem:
        raise UserError(str(path), "must be the image that was recorded", f"pixels of hash {digest}", _FIX)
    return content, image


class DecodedImages:
    """Keeps the decoded images that were read last, up to `max_bytes`, so that a group's episodes share them.

    Example::

        store = ImageStore()
        store.read(Path("episodes/images/00ff00ff.png")).size      # (160, 128)
    """

    def __init__(self, max_bytes: int = MAX_KEPT) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._images: OrderedDict[Path, Image.Image] = OrderedDict()

    def read(self, path: Path) -> Image.Image:
        """Return a decoded image. Raises `UserError` like `read_image`."""
        if path not in self._images:
            self._images[path] = read_image(path)[1]
            self.num_bytes += image_bytes(self._images[path])
        self._images.move_to_end(path)
        image = self._images[path]
        # At least one stays, or an image over the bound could never be read.
        while self.num_bytes > self.max_bytes and len(self._images) > 1:
            self.num_bytes -= image_bytes(self._images.popitem(last=False)[1])
        return image


def image_bytes(image: Image.Image) -> int:
    """Return the memory of a decoded image."""
    return len(image.getbands()) * image.width * image.height
