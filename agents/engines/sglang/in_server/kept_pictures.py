"""Keeps pictures in shared memory, as levels or patches, under the key that the client gives them.

A server reads a picture in one process (SGLang's tokenizer manager) and encodes it in another (its scheduler), which
also keeps encoded pictures. So the picture stays where it was read, in anonymous shared memory, and the scheduler gets
a `PictureAddress`: it maps the memory, and reads it only when it has to encode the picture.
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

from agents.engines.sglang.pictures import HELLO, MARK, PROTOCOL, picture_key

#: Bytes of pictures to keep, unless more are in use: those of the last `IN_USE_S` seconds are.
MAX_BYTES = 2 * 2**30
IN_USE_S = 60.0
#: Pictures that are read at once.
MAX_THREADS = 8
#: How long to wait for a picture that another request brings.
WAIT_S = 5.0
#: Bytes before the picture, which hold the key.
HEADER = 64

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class PictureAddress:
    """Where a picture is: the process and file descriptor of its memory, and the form of its levels or patches.

    Example: `PictureAddress("5f...", pid=31, fd=12, shape=(80, 768), dtype="uint8", grid_thw=(1, 8, 10))`.
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


#: Makes the memory of a picture, by shape and type.
Allocate = Callable[[tuple[int, int], torch.dtype], torch.Tensor]
#: Writes a PNG into memory of the second argument, which it asks for once, and returns the grid of its patches.
Read = Callable[[bytes, Allocate], Grid]


def keep_picture(key: str, png: bytes, read: Read) -> PictureAddress:
    """Read a picture into new shared memory. It lives until its descriptor is closed and nobody has it mapped."""
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
    return PictureAddress(key, os.getpid(), fd, (rows, columns), str(kept_PN.dtype).split(".")[1], grid_thw)


_MAPPED: weakref.WeakValueDictionary[tuple[int, str], torch.Tensor] = weakref.WeakValueDictionary()


def map_picture(address: PictureAddress) -> torch.Tensor:
    """Return a picture that another process keeps, without copying it; one mapping for all who ask.

    Raises:
        LookupError: the memory is not that of the picture any more.
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
        raise LookupError(f"picture {address.key} is gone: {error}") from error
    if memory[: len(address.key)] != address.key.encode():
        raise LookupError(f"picture {address.key} was replaced by another")
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

    address = keep_picture("0", b"", read)
    try:
        path = f"/proc/{address.pid}/fd/{address.fd}"
        return subprocess.run(["head", "-c", "1", path], capture_output=True, check=False).stdout == b"0"
    except OSError:
        return False
    finally:
        os.close(address.fd)


class PictureError(ValueError):
    """The answer to a request whose pictures cannot be read. (SGLang answers a `ValueError` with status 400.)"""


@dataclass(frozen=True)
class PictureEntry:
    """A picture of a request: its key, the hash that its encoding is kept under, and its PNG unless it came before."""

    key: str
    hash: str
    png: str = ""


def picture_entries(image_data: Sequence[object] | None) -> list[PictureEntry] | None:
    """Return the pictures of a request; None where they came in another way.

    Raises:
        PictureError: an entry is malformed; or it is the answer to a client that asks for the protocol.
    """
    entries = [entry for entry in image_data or () if isinstance(entry, str) and entry.startswith(MARK)]
    if not entries or len(entries) != len(image_data or ()):
        return None
    if HELLO in entries:
        raise PictureError(PROTOCOL if can_share() else "pictures cannot be kept: no shared memory")
    parts = [entry.removeprefix(f"{MARK}:").split(":", 2) for entry in entries]
    if any(len(part) < 2 for part in parts):
        raise PictureError(f"an entry must be {MARK}:KEY:HASH or {MARK}:KEY:HASH:PNG")
    return [PictureEntry(*part) for part in parts]


@dataclass(eq=False)
class _Picture:
    """A picture that was asked for: where it is, or will be once it has come and is read."""

    address: asyncio.Future[PictureAddress]
    is_here: bool = False
    used_at: float = 0.0


class KeptPictures:
    """The pictures of one server.

    `read` runs in threads, for several pictures at a time.

    Example::

        kept = KeptPictures(read)
        addresses = await kept.addresses([PictureEntry(key, hash, png)])   # read and kept
        addresses = await kept.addresses([PictureEntry(key, hash)])        # found
        await kept.addresses([PictureEntry("0", hash)])                    # PictureError: trueturn-picture misses 0
    """

    def __init__(self, read: Read, max_bytes: int = MAX_BYTES) -> None:
        self._read = read
        self._max_bytes = max_bytes
        self._pictures: OrderedDict[str, _Picture] = OrderedDict()  # the one used last at the end
        self._num_bytes = 0
        self._threads = ThreadPoolExecutor(MAX_THREADS, "pictures")

    async def addresses(self, entries: Sequence[PictureEntry]) -> list[PictureAddress]:
        """Return where the pictures are, in order. Waits a moment for those that other requests bring.

        Raises:
            PictureError: pictures are missing, which it names, or cannot be read.
        """
        asked = [self._picture(entry.key, entry.png) for entry in entries]
        waiting = [picture.address for picture in asked if not picture.address.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=WAIT_S)
        while reading := [picture.address for picture in asked if picture.is_here and not picture.address.done()]:
            await asyncio.wait(reading)
        missing = {entry.key: picture for entry, picture in zip(entries, asked, strict=True) if not picture.is_here}
        for key, picture in missing.items():  # nothing is kept of what nobody brings
            if self._pictures.get(key) is picture:
                del self._pictures[key]
        if missing:
            raise PictureError(f"{MARK} misses {' '.join(missing)}")
        return [picture.address.result() for picture in asked]

    def _picture(self, key: str, png: str) -> _Picture:
        """Return the record of a picture, and begin to read it if it has just come."""
        loop = asyncio.get_running_loop()
        picture = self._pictures.setdefault(key, _Picture(loop.create_future()))
        self._pictures.move_to_end(key)
        picture.used_at = time.monotonic()
        if png and not picture.is_here:
            picture.is_here = True
            reading = loop.run_in_executor(self._threads, self._keep, key, png)
            reading.add_done_callback(lambda done: self._finish(key, picture, done))
        return picture

    def _keep(self, key: str, png: str) -> PictureAddress:
        try:
            file = base64.b64decode(png, validate=True)
            if picture_key(file) != key:
                raise ValueError("it is not the one of this key")
            return keep_picture(key, file, self._read)
        except Exception as error:  # whatever the picture is: the request fails, not the server
            raise PictureError(f"picture {key} cannot be read: {type(error).__name__} {error}") from error

    def _finish(self, key: str, picture: _Picture, done: asyncio.Future[PictureAddress]) -> None:
        if error := done.exception():
            del self._pictures[key]  # the next request may bring it whole
            picture.address.set_exception(error)
            picture.address.exception()  # noted, should nobody wait any more
            return
        picture.address.set_result(done.result())
        self._num_bytes += done.result().num_bytes
        self._evict()

    def _evict(self) -> None:
        """Drop the pictures that were not used for longest while there are too many bytes, but none in use."""
        while self._num_bytes > self._max_bytes:
            key, picture = next(iter(self._pictures.items()))
            is_being_read = picture.is_here and not picture.address.done()
            if is_being_read or picture.used_at > time.monotonic() - IN_USE_S:
                return
            del self._pictures[key]
            if picture.address.done():  # else nobody has brought it
                self._num_bytes -= picture.address.result().num_bytes
                os.close(picture.address.result().fd)
