"""Loads images from untrusted data safely, as fully decoded RGB images.

Accepted forms: encoded bytes, base64 text, a data URI, a path, a `PIL.Image.Image`, or one of these in a dict, such as
``{"bytes": ..., "path": ...}`` or a part of a chat message. `load_image` takes all of them, `decode_image` what is
found already.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from envs.errors import UserError

#: A located image: a checked path, its encoded bytes, or an image in memory.
ImageSource = Path | bytes | Image.Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 50_000_000
MAX_BYTES = 64 * 2**20
#: The largest ratio of long to short side that image processors accept.
MAX_RATIO = 200

_LONGEST_PATH = 4096
#: Where a dict holds its image; the first one that is there counts.
_HOLDERS = ("bytes", "image", "image_url", "url", "path")


@dataclass(frozen=True)
class ImageAccess:
    """What an image's value may name besides holding the image itself.

    Paths are relative to `root` and must stay below it after symbolic links are resolved, unless `allow_outside`;
    without `root` no path is allowed.
    """

    root: Path | None = None
    allow_outside: bool = False


NO_PATHS = ImageAccess()


def image_digest(image: Image.Image) -> str:
    """Return a hash of an image's pixels and size: its key in stores and recordings."""
    return hashlib.blake2b(image.tobytes(), digest_size=16, salt=b"%dx%d" % image.size).hexdigest()


def load_image(value: object, field: str, access: ImageAccess = NO_PATHS, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the image as an upright, fully decoded RGB image; transparent parts become white.

    A string is, in this order: a data URI, the path of an existing file that `access` allows, base64 of an image. An
    animation gives its first frame. `field` names the place in errors: "train.jsonl row 3 images[0]".

    Example::

        >>> load_image("images/1622.png", "row 0 images[0]", ImageAccess(Path("geo3k"))).mode
        'RGB'

    Raises:
        UserError: a missing file, a path that `access` refuses, more than 64 MiB or `max_pixels` pixels, no pixels,
            a format other than PNG, JPEG, WEBP, GIF or BMP, or a damaged file.
    """
    return decode_image(_find(value, field, access), field, max_pixels)


def _find(value: object, field: str, access: ImageAccess) -> ImageSource:
    """Locate the image: check its path or decode its base64, without reading pixels."""
    if isinstance(value, Mapping) and (held := held_image(value)):
        # Where rows come from a pipeline of qwen-vl-utils. Two sizes of one image would be two inputs.
        if sized := next((name for name in ("min_pixels", "max_pixels") if value.get(name) is not None), ""):
            fix = "remove it: the processor of the model decides the size of every image"
            raise UserError(field, f"must have no {sized} of its own", value[sized], fix)
        name, inner = held
        if name == "bytes" and isinstance(inner, str):
            return _from_base64(inner, field)
        return _find(inner, field, access)
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | Path):
        return _find_text(str(value), field, access)
    shape = getattr(value, "shape", None)
    if shape is not None:  # an array or a tensor
        got = f"{type(value).__name__} of shape {tuple(shape)}"
        raise UserError(field, "must be an image", got, "use PIL.Image.fromarray")
    fix = "give a path, base64 text, bytes or {'bytes': ..., 'path': ...}"
    raise UserError(field, "must be an image", f"{type(value).__name__}: {value!r:.200}", fix)


def decode_image(
    source: ImageSource, field: str, max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = FORMATS
) -> Image.Image:
    """Read the image as RGB; check format and limits before decoding pixels (see `load_image` for errors)."""
    shown = source.name if isinstance(source, Path) else f"{type(source).__name__} of an image"
    try:
        if isinstance(source, Image.Image):
            check_size(source, field, max_pixels)
            return _to_rgb(source)
        _check_bytes(source.stat().st_size if isinstance(source, Path) else len(source), field)
        # Read once: between two readings a file could change.
        data = source.read_bytes() if isinstance(source, Path) else source
        with Image.open(BytesIO(data), formats=formats) as header:
            check_size(header, field, max_pixels)
            # verify() alone sees a wrong checksum, load() alone sees missing pixels.
            header.verify()
        with Image.open(BytesIO(data), formats=formats) as image:
            return _to_rgb(image)
    except UserError:
        raise
    except UnidentifiedImageError as error:
        fix = f"give one of {', '.join(formats)}"
        raise UserError(field, "must be an image of a known format", shown, fix) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:  # by Pillow's own limit
        rule = f"must have at most {max_pixels} pixels"
        raise UserError(field, rule, f"{shown}: {error}", "scale it down") from error
    # Pillow's format plugins raise a dozen unrelated types on damaged files.
    except Exception as error:
        got = f"{shown}: {type(error).__name__}: {error}"
        fix = "the file is damaged: replace it or drop the row"
        raise UserError(field, "must be a whole image", got, fix) from error


def held_image(value: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the key and the image of a dict; None if it holds none.

    A part of a chat message may hold it two deep: `{"image_url": {"url": ...}}` or `{"image": {"bytes": ...}}`.
    """
    # OpenAI's parts nest a dict under image_url, those of Hugging Face under image.
    nested = next((value[name] for name in _HOLDERS if isinstance(value.get(name), Mapping)), value)
    found = ((name, nested[name]) for name in _HOLDERS if nested.get(name) is not None)
    return next((held for held in found if not isinstance(held[1], Mapping)), None)


def _find_text(text: str, field: str, access: ImageAccess) -> ImageSource:
    """Locate an image given as a string: a data URI, an existing file, or base64 of an image."""
    if text.startswith("data:"):
        header, comma, body = text.partition(",")
        if not comma or not header.endswith(";base64"):
            raise UserError(field, "must be a base64 data URI", text, "write data:image/png;base64,...")
        return _from_base64(body, field)
    # A URL in a data set is a stranger's text: to ask it would reach hosts of the network that training runs in.
    if text.startswith(("http://", "https://")):
        raise UserError(field, "must not be a URL", text, "download the image and give its path")
    # A relative path has no meaning without a root: it must not fall back on the working directory.
    root = access.root
    path = Path(text.removeprefix("file://")) if root is None else root / text.removeprefix("file://")
    if (root is not None or path.is_absolute()) and _is_file(path):
        return _check_inside(path, field, access)
    data = _decode_base64(text, field)
    if data is not None and _is_image(data):
        return data
    below = f"paths are relative to {root}" if root else "there is no folder that paths are relative to"
    raise UserError(field, "no such file, and no base64 image", text, below)


def _is_file(path: Path) -> bool:
    """Return whether the path is a file; False for a string that cannot be a path (too long, with a NUL)."""
    try:
        return len(str(path)) <= _LONGEST_PATH and path.is_file()
    except (OSError, ValueError):
        return False


def _check_inside(path: Path, field: str, access: ImageAccess) -> Path:
    # A link in a stranger's data set may lead to any file of this machine.
    resolved = path.resolve()
    if access.allow_outside or (access.root and resolved.is_relative_to(access.root.resolve())):
        return resolved
    inside = "must be inside the data set's folder, symbolic links followed", "move the image there"
    rule, fix = inside if access.root else ("must be an image, not a path", "give the image itself")
    raise UserError(field, rule, str(path), f"{fix}, or --allow-outside-images for rows")


def _from_base64(text: str, field: str) -> bytes:
    data = _decode_base64(text, field)
    if data is None:
        raise UserError(field, "must be base64", text[:40], "encode the image's bytes with the standard alphabet")
    return data


def _decode_base64(text: str, field: str) -> bytes | None:
    if len(text) > 2 * MAX_BYTES:  # base64 takes 4 characters for 3 bytes, so no spaces explain this length
        _check_bytes(len(text) * 3 // 4, field)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    # A character outside ASCII is a ValueError; the other faults are its subclass binascii.Error.
    except ValueError:
        return None


def _is_image(data: bytes) -> bool:
    # The first bytes of WEBP, PNG, JPEG, GIF and BMP.
    riff = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    return riff or data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM"))


def _check_bytes(size: int, field: str) -> None:
    if size > MAX_BYTES:
        raise UserError(field, f"must have at most {MAX_BYTES} bytes", size, "compress it or scale it down")


def check_size(image: Image.Image, field: str, max_pixels: int) -> None:
    """Raise `UserError` for an image without pixels, with too many, or too thin for any model."""
    width, height = image.size
    if not width * height:
        raise UserError(field, "must have pixels", f"{width}x{height}", "give an image that shows something")
    if width * height > max_pixels:
        raise UserError(field, f"must have at most {max_pixels} pixels", f"{width}x{height}", "scale it down")
    # Qwen's image processor raises for thinner ones, in the middle of a run.
    if max(width, height) > MAX_RATIO * min(width, height):
        rule = f"must have no side over {MAX_RATIO} times as long as the other"
        raise UserError(field, rule, f"{width}x{height}", "cut it into parts")


def _to_rgb(image: Image.Image) -> Image.Image:
    """Decode and convert to RGB: apply EXIF rotation, put transparency on white, scale 16-bit grey to 8 bits."""
    # A camera notes beside the pixels how it was held; the processors of models do not look there.
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Pillow's own conversion clips at 255, which turns nearly all of a 16-bit image white.
        grey = image.convert("I").point(lambda value: value * (1 / 257))
        return grey.convert("L").convert("RGB")
    if image.mode == "F":
        # Pillow clips at 255 here too, and floats from 0 to 1 would all be black.
        raise ValueError(
            "an image of floats has no known range; write it as 8 bits, such as (255 * array).astype('uint8')"
        )
    if image.has_transparency_data:
        on_top = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", on_top.size, "white"), on_top).convert("RGB")
    return image.convert("RGB")
