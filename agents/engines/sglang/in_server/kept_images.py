"""Keeps images in shared memory, as levels or patches, under the key that the client gives them.

A server reads an image in one process (SGLang's tokenizer manager) and encodes it in another (its scheduler), which
also keeps encoded images. So the image stays where it was read, in anonymous shared memory, and the scheduler gets
a `ImageAddress`: it maps the memory, and reads it only when it has to encode the image.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import math
import mmap
import os
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from agents.engines.sglang.images import HELLO, MARK, PROTOCOL, image_key

#: Bytes of images to keep, unless more are in use: those of the last `IN_USE_S` seconds are.
MAX_BYTES = 2 * 2**30
IN_USE_S = 60.0
#: Images that are read at once.
MAX_THREADS = 8
#: How long to wait for an image that another request brings.
WAIT_S = 5.0
#: Bytes before the image, which hold the key.
HEADER = 64

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class ImageAddress:
    """Where an image is: the process and file descriptor of its memory, and the form of its levels or patches.

    Example: `ImageAddress("5f...", pid=31, fd=12, shape=(80, 768), dtype="uint8", grid_thw=(1, 8, 10))`.
    """

    key: str
    pid: int
    fd: int
    shape: tuple[int, int]
    dtype: str
    grid_thw: Grid

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return HEADER + self.shape[0] * self.shape[1] * getattr(torch, self.dtype).itemsize


#: Makes the memory of an image, by shape and type.
Allocate = Callable[[tuple[int, int], torch.dtype], torch.Tensor]
#: Writes a PNG into memory of the second argument, which it asks for once, and returns the grid of its patches.
Read = Callable[[bytes, Allocate], Grid]


def keep_image(key: str, png: bytes, read: Read) -> ImageAddress:
    """Read an image into new shared memory. It lives until its descriptor is closed and nobody has it mapped."""
    fd = os.memfd_create(f"{MARK}-{key}", os.MFD_CLOEXEC)
    made: list[torch.Tensor] = []

    def allocate(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        os.ftruncate(fd, HEADER + math.prod(shape) * dtype.itemsize)
        memory = mmap.mmap(fd, 0)
        memory[: len(key)] = key.encode()
        made.append(torch.frombuffer(memory, dtype=dtype, offset=HEADER).view(shape))
        return made[0]

    try:
        grid_thw = read(png, allocate)
        (kept_PN,) = made
    except BaseException:
        os.close(fd)
        raise
    rows, columns = kept_PN.shape
    return ImageAddress(key, os.getpid(), fd, (rows, columns), str(kept_PN.dtype).split(".")[1], grid_thw)


_MAPPED: weakref.WeakValueDictionary[tuple[int, str], torch.Tensor] = weakref.WeakValueDictionary()


def map_image(address: ImageAddress) -> torch.Tensor:
    """Return an image that another process keeps, without copying it; one mapping for all who ask.

    Raises:
        LookupError: the memory is not that of the image any more.
    """
    if (found := _MAPPED.get((address.pid, address.key))) is not None:
        return found
    try:
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY)
        try:
            memory = mmap.mmap(fd, address.num_bytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise LookupError(f"image {address.key} is gone: {error}") from error
    if memory[: len(address.key)] != address.key.encode():
        raise LookupError(f"image {address.key} was replaced by another")
    kept_PN = torch.frombuffer(memory, dtype=getattr(torch, address.dtype), offset=HEADER).view(address.shape)
    _MAPPED[address.pid, address.key] = kept_PN
    return kept_PN


@functools.cache
def can_share() -> bool:
    """Return whether another process of this user can map our memory; a hardened system may not let it."""
    if sys.platform != "linux":
        return False

    def read(_: bytes, allocate: Allocate) -> Grid:
        allocate((1, 1), torch.float32)
        return 1, 1, 1

    address = keep_image("0", b"", read)
    try:
        path = f"/proc/{address.pid}/fd/{address.fd}"
        return subprocess.run(["head", "-c", "1", path], capture_output=True, check=False).stdout == b"0"
    except OSError:
        return False
    finally:
        os.close(address.fd)


class ImageError(ValueError):
    """The answer to a request whose images cannot be read. (SGLang answers a `ValueError` with status 400.)"""


@dataclass(frozen=True)
class ImageEntry:
    """An image of a request: its key, the hash that its encoding is kept under, and its PNG unless it came before."""

    key: str
    hash: str
    png: str = ""


def image_entries(image_data: Sequence[object] | None) -> list[ImageEntry] | None:
    """Return the images of a request; None where they came in another way.

    Raises:
        ImageError: an entry is malformed; or it is the answer to a client that asks for the protocol.
    """
    entries = [entry for entry in image_data or () if isinstance(entry, str) and entry.startswith(MARK)]
    if not entries or len(entries) != len(image_data or ()):
        return None
    if HELLO in entries:
        raise ImageError(PROTOCOL if can_share() else "images cannot be kept: no shared memory")
    parts = [entry.removeprefix(f"{MARK}:").split(":", 2) for entry in entries]
    if any(len(part) < 2 for part in parts):
        raise ImageError(f"an entry must be {MARK}:KEY:HASH or {MARK}:KEY:HASH:PNG")
    return [ImageEntry(*part) for part in parts]


@dataclass(eq=False)
class _Image:
    """An image that was asked for: where it is, or will be once it has come and is read."""

    address: asyncio.Future[ImageAddress]
    is_here: bool = False
    used_at: float = 0.0


class KeptImages:
    """The images of one server.

    `read` runs in threads, for several images at a time.

    Example::

        kept = KeptImages(read)
        addresses = await kept.addresses([ImageEntry(key, hash, png)])   # read and kept
        addresses = await kept.addresses([ImageEntry(key, hash)])        # found
        await kept.addresses([ImageEntry("0", hash)])                    # ImageError: trueturn-image misses 0
    """

    def __init__(self, read: Read, max_bytes: int = MAX_BYTES) -> None:
        self._read = read
        self._max_bytes = max_bytes
        self._images: OrderedDict[str, _Image] = OrderedDict()  # the one used last at the end
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(MAX_THREADS, "images")

    async def addresses(self, entries: Sequence[ImageEntry]) -> list[ImageAddress]:
        """Return where the images are, in order. Waits a moment for those that other requests bring.

        Raises:
            ImageError: images are missing, which it names, or cannot be read.
        """
        asked = [self._image(entry.key, entry.png) for entry in entries]
        waiting = [image.address for image in asked if not image.address.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=WAIT_S)
        while reading := [image.address for image in asked if image.is_here and not image.address.done()]:
            await asyncio.wait(reading)
        missing = {entry.key: image for entry, image in zip(entries, asked, strict=True) if not image.is_here}
        for key, image in missing.items():  # nothing is kept of what nobody brings
            if self._images.get(key) is image:
                del self._images[key]
        if missing:
            raise ImageError(f"{MARK} misses {' '.join(missing)}")
        return [image.address.result() for image in asked]

    def _image(self, key: str, png: str) -> _Image:
        """Return the record of an image, and begin to read it if it has just come."""
        loop = asyncio.get_running_loop()
        image = self._images.setdefault(key, _Image(loop.create_future()))
        self._images.move_to_end(key)
        image.used_at = time.monotonic()
        if png and not image.is_here:
            image.is_here = True
            reading = loop.run_in_executor(self._threads, self._keep, key, png)
            reading.add_done_callback(lambda done: self._finish(key, image, done))
        return image

    def _keep(self, key: str, png: str) -> ImageAddress:
        try:
            file = base64.b64decode(png, validate=True)
            if image_key(file) != key:
                raise ValueError("it is not the one of this key")
            return keep_image(key, file, self._read)
        except Exception as error:  # whatever the image is: the request fails, not the server
            raise ImageError(f"image {key} cannot be read: {type(error).__name__} {error}") from error

    def _finish(self, key: str, image: _Image, done: asyncio.Future[ImageAddress]) -> None:
        if error := done.exception():
            del self._images[key]  # the next request may bring it whole
            image.address.set_exception(error)
            image.address.exception()  # noted, should nobody wait any more
            return
        image.address.set_result(done.result())
        self._num_bytes += done.result().num_bytes
        self._evict()

    def _evict(self) -> None:
        """Drop the images that were not used for longest while there are too many bytes, but none in use."""
        while self._num_bytes > self._max_bytes:
            key, image = next(iter(self._images.items()))
            is_being_read = image.is_here and not image.address.done()
            if is_being_read or image.used_at > time.monotonic() - IN_USE_S:
                return
            del self._images[key]
            if image.address.done():  # else nobody has brought it
                self._num_bytes -= image.address.result().num_bytes
                os.close(image.address.result().fd)
