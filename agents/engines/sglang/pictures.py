"""How a picture goes to a server: once, then by its key.

A server that we start has a picture processor of ours (`in_server`), which keeps what it has been sent. To any other
server a picture goes along with every request, as SGLang has it. `picture_protocol` finds out which one a server is.

An entry of `image_data` is `trueturn-picture:KEY:HASH`, with `:PNG` in base64 the first time. KEY is of the picture
alone, HASH is what its encoding is kept under. A server that is asked for a picture it does not have answers
`trueturn-picture misses KEY ...`; it is then sent again.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from agents.types import ProcessedImage

MARK = "trueturn-picture"
#: The entry that asks for the protocol, and what `in_server` answers.
HELLO, PROTOCOL = f"{MARK}?", f"{MARK} protocol 1"

URI = "data:image/png;base64,"
_MISSES = re.compile(rf"{MARK} misses ((?:[0-9a-f]+ ?)+)")


@dataclass(frozen=True)
class _Encoded:
    """A picture as it is sent: its PNG file as a data URI, and a key that depends on that file alone."""

    key: str
    uri: str


_ENCODED: WeakKeyDictionary[ProcessedImage, _Encoded] = WeakKeyDictionary()


def picture_key(png: bytes) -> str:
    """Return the key of a PNG file: a hash of it, so that nobody can pass one picture off as another."""
    return hashlib.blake2b(png, digest_size=16).hexdigest()


def _encoded(image: ProcessedImage) -> _Encoded:
    """Return the picture, already in the size that the model reads; encoded once per picture."""
    if image not in _ENCODED:
        _ENCODED[image] = _Encoded(picture_key(image.png), URI + base64.b64encode(image.png).decode())
    return _ENCODED[image]


def data_uri(image: ProcessedImage) -> str:
    """Return the picture as a data URI."""
    return _encoded(image).uri


def salted_hash(image: ProcessedImage, salt: str) -> str:
    """Return 14 hexadecimal digits (to the server a positive 64-bit number) that depend on picture and salt."""
    return hashlib.blake2b(f"{image.digest}/{salt}".encode(), digest_size=7).hexdigest()


class SentPictures:
    """The pictures that one server has been sent.

    Example::

        sent = SentPictures()
        sent.entries([image], "salt")       # ["trueturn-picture:KEY:HASH:PNG"]
        sent.entries([image], "salt")       # ["trueturn-picture:KEY:HASH"]
        sent.forget(missed_pictures(text))  # the server does not have it: the next entry holds the PNG again
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def entries(self, images: Iterable[ProcessedImage], salt: str) -> list[str]:
        """Return the entries of a request; a picture counts as sent from then on."""
        return [self._entry(_encoded(image), salted_hash(image, salt)) for image in images]

    def _entry(self, picture: _Encoded, hash_: str) -> str:
        short = f"{MARK}:{picture.key}:{hash_}"
        if picture.key in self._keys:
            return short
        self._keys.add(picture.key)
        return f"{short}:{picture.uri.removeprefix(URI)}"

    def forget(self, keys: Iterable[str]) -> None:
        """Note that the server does not have these pictures."""
        self._keys.difference_update(keys)


def missed_pictures(refusal: str) -> tuple[str, ...]:
    """Return the keys of the pictures that a server says it does not have; none where it refuses something else."""
    found = _MISSES.search(refusal)
    return tuple(found[1].split()) if found else ()


def image_fields(images: Sequence[ProcessedImage], salt: str, sent: SentPictures | None) -> dict[str, Any]:
    """Return the fields of a body for its pictures; `sent` is None for a server that does not keep them.

    `salt` becomes part of each image's hash. It holds the version of the weights, so that the server does not reuse an
    image that older weights encoded.
    """
    if not images:
        return {}
    if sent is not None:
        return {"image_data": sent.entries(images, salt)}
    return {
        "image_data": [data_uri(image) for image in images],
        "mm_hashes": [salted_hash(image, salt) for image in images],
    }
