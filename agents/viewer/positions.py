"""Positions of incremental readers: a byte position in a file that grows, and a page's position in a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from agents.recording.safe_files import open_regular

_NUM_BYTES = 64


@dataclass(frozen=True)
class FilePosition:
    """A byte offset in a file, with the last bytes before it.

    A resumed run cuts its files back and appends again, so the offset alone does not show whether the part already read
    is still there. The bytes before the offset do: they hold the checksum of a gzip member.

    Example::

        position = FilePosition.at(path, 512)
        position.is_valid(path)       # True until the file is cut below 512 bytes or has other bytes there
    """

    offset: int = 0
    before: bytes = b""

    @classmethod
    def at(cls, path: Path, offset: int) -> FilePosition:
        """Return the position at an offset."""
        return cls(offset, _bytes_before(path, offset))

    def is_valid(self, path: Path) -> bool:
        """Return whether the file still has the same bytes before the offset."""
        return _bytes_before(path, self.offset) == self.before


def _bytes_before(path: Path, offset: int) -> bytes:
    """Return up to 64 bytes before an offset; fewer if the file is shorter."""
    if offset == 0:
        return b""
    try:
        with open_regular(path) as file:
            file.seek(max(0, offset - _NUM_BYTES))
            return file.read(min(offset, _NUM_BYTES))
    # A file that no step has written yet.
    except FileNotFoundError:
        return b""


@dataclass(frozen=True)
class Cursor:
    """How much of a run a page has: the run's state, and the number of episodes, changes, tokens and metric rows.

    Every answer to the page holds a cursor as text; the page sends it with its next request.

    Example: `str(Cursor(1, 64, 128, 300, 2))` is "1.64.128.300.2".
    """

    state: int
    episodes: int = 0
    changes: int = 0
    tokens: int = 0
    metrics: int = 0

    def is_behind(self, other: Cursor) -> bool:
        """Return whether a page at this cursor can be brought up to the other one by sending what is new."""
        counts = zip(dataclasses.astuple(self)[1:], dataclasses.astuple(other)[1:], strict=True)
        return self.state == other.state and all(mine <= others for mine, others in counts)

    def __str__(self) -> str:
        return ".".join(map(str, dataclasses.astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor that a text stands for; the empty one if the text is not a cursor."""
        parts = text.split(".")
        # From the address, so from anybody: no sign, no other digits, no number of a thousand places.
        if len(parts) == 5 and all(part.isascii() and part.isdigit() and len(part) < 16 for part in parts):
            return cls(*map(int, parts))
        return cls(0)
