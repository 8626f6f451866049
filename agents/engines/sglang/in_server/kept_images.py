"""Keeps the patches of images in shared memory, under the key that the client gives them.

A server reads an image in one process (SGLang's tokenizer manager) and encodes it in another (its scheduler), which
also keeps encoded images. So the patches stay where they were cut, in anonymous shared memory, and the scheduler gets
an `ImageAddress`: it maps the memory, and reads it only when it has to encode the image.
"""

from __future__ import annotations

import asyncio
import base64
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from agents.engines.sglang.images import HELLO, MARK, PROTOCOL, image_key

#: Bytes of images to keep, unless more are in use: those of the last `IN_USE_S` seconds are.
MAX_BYTES = 2 * 2**30
IN_USE_S = 60.0
#: Bytes before the patches, which hold the key.
HEADER = 64

Grid = tuple[int, int, int]
#: Cuts a PNG into patches; returns them and their grid.
Cut = Callable[[bytes], tuple[torch.Tensor, Grid]]


@dataclass(frozen=True)
class ImageAddress:
    """Where an image is: the process and file descriptor of its memory, and the form of its patches.

    Example: `ImageAddress("5f...", pid=31, fd=12, shape=(80, 1536), dtype="bfloat16", grid_thw=(1, 8, 10))`.
    """

    key: str
    pid: int
    fd: int
    shape: tuple[int, ...]
    dtype: str
    grid_thw: Grid


def keep_image(key: str, patches_PN: torch.Tensor, grid_thw: Grid) -> ImageAddress:
    """Copy patches into new shared memory. It lives until its descriptor is closed and nobody has it mapped."""
    # Memory without a name is freed with its last process, also where that is killed.
    fd = os.memfd_create(f"{MARK}-{key}", os.MFD_CLOEXEC)
    os.ftruncate(fd, HEADER + patches_PN.nbytes)
    memory = mmap.mmap(fd, 0)
    memory[: len(key)] = key.encode()
    torch.frombuffer(memory, dtype=patches_PN.dtype, offset=HEADER).copy_(patches_PN.flatten())
    dtype = str(patches_PN.dtype).removeprefix("torch.")
    return ImageAddress(key, os.getpid(), fd, tuple(patches_PN.shape), dtype, grid_thw)


def map_image(address: ImageAddress) -> torch.Tensor:
    """Return the patches that another process keeps, without copying them.

    Raises:
        LookupError: the memory is not that of the image any more.
    """
    try:
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY)
        try:
            memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise LookupError(f"image {address.key} is gone: {error}") from error
    # The number of a closed descriptor is given to the next file.
    if memory[: len(address.key)] != address.key.encode():
        raise LookupError(f"image {address.key} was replaced by another")
    return torch.frombuffer(memory, dtype=getattr(torch, address.dtype), offset=HEADER).view(address.shape)


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
        raise ImageError(PROTOCOL)
    parts = [entry.removeprefix(f"{MARK}:").split(":", 2) for entry in entries]
    if any(len(part) < 2 for part in parts):
        raise ImageError(f"an entry must be {MARK}:KEY:HASH or {MARK}:KEY:HASH:PNG")
    return [ImageEntry(*part) for part in parts]


@dataclass
class _Image:
    """An image that came: where it is, or will be once it is cut."""

    address: asyncio.Future[ImageAddress]
    used_at: float = 0.0


class KeptImages:
    """The images of one server.

    Example::

        kept = KeptImages(cut)
        addresses = await kept.addresses([ImageEntry(key, hash, png)])   # cut and kept
        addresses = await kept.addresses([ImageEntry(key, hash)])        # found
        await kept.addresses([ImageEntry("0", hash)])                    # ImageError: trueturn-image misses 0
    """

    def __init__(self, cut: Cut, max_bytes: int = MAX_BYTES) -> None:
        self._cut = cut
        self._max_bytes = max_bytes
        self._images: OrderedDict[str, _Image] = OrderedDict()  # the one used last at the end
        self._num_bytes = 0
        # One thread: Transformers' processors are not safe in two.
        self._thread = ThreadPoolExecutor(1, "images")

    async def addresses(self, entries: Sequence[ImageEntry]) -> list[ImageAddress]:
        """Return where the images are, in order, once they are cut.

        Raises:
            ImageError: images are missing, which it names, or cannot be read.
        """
        found = [self._find(entry) for entry in entries]
        missing = [entry.key for entry, image in zip(entries, found, strict=True) if image is None]
        if missing:
            raise ImageError(f"{MARK} misses {' '.join(missing)}")
        # A request that is cancelled must not cancel what others wait for.
        return [await asyncio.shield(image.address) for image in found if image]

    def _find(self, entry: ImageEntry) -> _Image | None:
        """Return the record of an image, and begin to cut it if it has just come; None where it never came."""
        image = self._images.get(entry.key)
        if image is None:
            if not entry.png:
                return None
            address = asyncio.get_running_loop().run_in_executor(self._thread, self._keep, entry)
            image = self._images[entry.key] = _Image(address)
            address.add_done_callback(lambda done: self._finish(entry.key, done))
        self._images.move_to_end(entry.key)
        image.used_at = time.monotonic()
        return image

    def _keep(self, entry: ImageEntry) -> ImageAddress:
        try:
            file = base64.b64decode(entry.png, validate=True)
            if image_key(file) != entry.key:
                raise ValueError("it is not the one of this key")
            return keep_image(entry.key, *self._cut(file))
        except Exception as error:  # whatever the image is: the request fails, not the server
            raise ImageError(f"image {entry.key} cannot be read: {type(error).__name__} {error}") from error

    def _finish(self, key: str, done: asyncio.Future[ImageAddress]) -> None:
        if done.exception():
            del self._images[key]  # the next request may bring it whole
            return
        self._num_bytes += os.fstat(done.result().fd).st_size
        self._evict()

    def _evict(self) -> None:
        """Drop the images that were not used for longest while there are too many bytes, but none in use."""
        while self._num_bytes > self._max_bytes:
            key, image = next(iter(self._images.items()))
            if not image.address.done() or image.used_at > time.monotonic() - IN_USE_S:
                return
            del self._images[key]
            fd = image.address.result().fd
            self._num_bytes -= os.fstat(fd).st_size
            os.close(fd)
