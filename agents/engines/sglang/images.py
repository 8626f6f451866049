"""How an image goes to a server: once, then by its key.

A server that we start has an image processor of ours (`in_server`), which keeps what it has been sent. To any other
server an image goes along with every request, as SGLang has it. `SGLangClient.keeps_images` finds out which one a
server is.

An entry of `image_data` is `trueturn-image:KEY:HASH`, with `:PNG` in base64 the first time. KEY is of the image
alone, HASH is what its encoding is kept under. A server that is asked for an image it does not have answers
`trueturn-image misses KEY ...`; it is then sent again.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from agents.engines.sglang.releases import UNKNOWN, Release
from agents.types import ProcessedImage

MARK = "trueturn-image"
#: The entry that asks for the protocol, and what `in_server` answers.
HELLO = f"{MARK}?"
PROTOCOL = f"{MARK} protocol 1"

URI = "data:image/png;base64,"
#: Bytes of the chunk that ends a PNG file.
PNG_END = 12
_MISSES = re.compile(rf"{MARK} misses ((?:[0-9a-f]+ ?)+)")


def image_key(png: bytes) -> str:
    """Return the key of a PNG file: a hash of it, so that nobody can pass one image off as another."""
    return hashlib.blake2b(png, digest_size=16).hexdigest()


#: By image: its key, which every episode and turn that shows the image asks for.
_KEYS: WeakKeyDictionary[ProcessedImage, str] = WeakKeyDictionary()


def _key(image: ProcessedImage) -> str:
    if image not in _KEYS:
        _KEYS[image] = image_key(image.png)
    return _KEYS[image]


def data_uri(image: ProcessedImage, salt: str = "") -> str:
    """Return the image, already in the size that the model reads, as a data URI."""
    return URI + base64.b64encode(salted_file(image.png, salt)).decode()


def salted_file(png: bytes, salt: str) -> bytes:
    """Return a PNG file of the same pixels with the salt as a comment; the same file for an empty salt."""
    if not salt:
        return png
    chunk = b"tEXt" + b"Comment\0" + salt.encode("latin-1")
    # A chunk of PNG: the length of its text, the text, a checksum.
    framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    # Comments may stand anywhere before the chunk that ends the file.
    return png[:-PNG_END] + framed + png[-PNG_END:]


def salted_hash(image: ProcessedImage, salt: str) -> str:
    """Return 14 hexadecimal digits (to the server a positive 64-bit number) that depend on image and salt."""
    return hashlib.blake2b(f"{image.digest}/{salt}".encode(), digest_size=7).hexdigest()


class SentImages:
    """The images that one server has been sent.

    Example::

        sent = SentImages()
        sent.entries([image], "salt")       # ["trueturn-image:KEY:HASH:PNG"]
        sent.entries([image], "salt")       # ["trueturn-image:KEY:HASH"]
        sent.forget(missed_images(text))  # the server does not have it: the next entry holds the PNG again
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def entries(self, images: Iterable[ProcessedImage], salt: str) -> list[str]:
        """Return the entries of a request; an image counts as sent from then on."""
        return [self._entry(image, salt) for image in images]

    def _entry(self, image: ProcessedImage, salt: str) -> str:
        short = f"{MARK}:{_key(image)}:{salted_hash(image, salt)}"
        if _key(image) in self._keys:
            return short
        self._keys.add(_key(image))
        return f"{short}:{data_uri(image).removeprefix(URI)}"

    def forget(self, keys: Iterable[str]) -> None:
        """Note that the server does not have these images."""
        self._keys.difference_update(keys)


def missed_images(refusal: str) -> tuple[str, ...]:
    """Return the keys of the images that a server says it does not have; none where it refuses something else."""
    found = _MISSES.search(refusal)
    if found:
        return tuple(found[1].split())
    return ()


def image_fields(
    images: Sequence[ProcessedImage], salt: str, sent: SentImages | None = None, release: Release = UNKNOWN
) -> dict[str, Any]:
    """Return the fields of a body for its images; `sent` is None for a server that does not keep them.

    `salt` becomes part of each image's name on the server. It holds the version of the weights, so that the server does
    not reuse an image that older weights encoded.
    """
    if not images:
        return {}
    if sent is not None:
        return {"image_data": sent.entries(images, salt)}
    if release.names_files:
        return {"image_data": [data_uri(image, salt) for image in images]}
    return {
        "image_data": [data_uri(image) for image in images],
        "mm_hashes": [salted_hash(image, salt) for image in images],
    }
