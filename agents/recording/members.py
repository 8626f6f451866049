"""Files of gzip members, one a line: appended to a whole member at a time, and read up to the last whole one.

Any program that reads gzip reads such a file as JSON lines (`zcat episodes.jsonl.gz`). Who is killed while writing
leaves part of a member at the end, which a reader passes over and the next writer moves aside.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from agents.appended import rewind

#: Of compression: higher ones take three times as long for 7 % fewer bytes, or less.
LEVEL = 2
_BLOCK = 1 << 20
_GZIP = 31  # what zlib calls a gzip header with the largest window


class MemberFile:
    """A file that members are appended to; each is out of this process when `append` returns.

    Example::

        file = MemberFile(Path("episodes.jsonl.gz"))
        file.append(b'{"id": "train-0-0"}')
        file.size()     # 52, all of it on disk
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and path.stat().st_size > (whole := whole_size(path)):
            rewind(path, whole)
        self._file = path.open("ab")

    def append(self, line: bytes) -> None:
        """Write one line, which must hold no line break."""
        self._file.write(gzip.compress(line + b"\n", LEVEL, mtime=0))
        self._file.flush()

    def size(self) -> int:
        """Return the bytes written so far, which are on disk when this returns."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_members(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield each whole member from a place on: where it ends in the file, and its text.

    What is no gzip ends the reading, as the part of a member at the end does.
    """
    with contextlib.suppress(zlib.error):
        yield from _members(path, start)


def is_damaged(path: Path) -> bool:
    """Return whether the reading ends at something that no killed process leaves behind."""
    try:
        for _ in _members(path, 0):
            pass
    except zlib.error:
        return True
    return False


def _members(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        reader, pieces, end, rest = zlib.decompressobj(_GZIP), [], start, b""
        while block := rest or file.read(_BLOCK):
            pieces.append(reader.decompress(block))
            rest = reader.unused_data
            if reader.eof:
                end = file.tell() - len(rest)
                yield end, b"".join(pieces)
                reader, pieces = zlib.decompressobj(_GZIP), []


def whole_size(path: Path) -> int:
    """Return where the last whole member of a file ends."""
    return max((end for end, _ in read_members(path)), default=0)
