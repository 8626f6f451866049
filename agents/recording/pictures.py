"""Reads the pictures of a recording: PNG files alone, whose pixels have the hash that is their name."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

from PIL import Image

from agents.recording.safe_files import check_real_folder, read_regular
from envs.errors import UserError
from envs.images import MAX_BYTES, decode_image, image_digest

#: Bytes of decoded pictures to keep.
MAX_KEPT = 2**30
_FIX = "take a copy of the whole folder"


def read_picture(path: Path) -> tuple[bytes, Image.Image]:
    """Return a picture's file, and the picture.

    Raises:
        UserError: there is no regular file, it is no PNG or a damaged one, it is too large, or its pixels have another
            hash than its name says.
    """
    check_real_folder(path.parent)
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise UserError(str(path), "must be a readable picture", error.strerror or str(error), _FIX) from error
    image = decode_image(content, str(path), formats=("PNG",))
    if (digest := image_digest(image)) != path.stem:
        raise UserError(str(path), "must be the picture that was recorded", f"pixels of hash {digest}", _FIX)
    return content, image


class PictureStore:
    """Keeps the decoded pictures that were read last, up to `max_bytes`, so that a group's episodes share them.

    Example::

        store = PictureStore()
        store.read(Path("episodes/images/00ff00ff.png")).size      # (160, 128)
    """

    def __init__(self, max_bytes: int = MAX_KEPT) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._pictures: OrderedDict[Path, Image.Image] = OrderedDict()

    def read(self, path: Path) -> Image.Image:
        """Return a decoded picture. Raises `UserError` like `read_picture`."""
        if path not in self._pictures:
            self._pictures[path] = read_picture(path)[1]
            self.num_bytes += picture_bytes(self._pictures[path])
        self._pictures.move_to_end(path)
        picture = self._pictures[path]
        while self.num_bytes > self.max_bytes and len(self._pictures) > 1:
            self.num_bytes -= picture_bytes(self._pictures.popitem(last=False)[1])
        return picture


def picture_bytes(picture: Image.Image) -> int:
    """Return the memory of a decoded picture."""
    return len(picture.getbands()) * picture.width * picture.height
