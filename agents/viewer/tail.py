"""Where a reader of an appended file stands, and whether the file still is the one that it has read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MARK = 64


@dataclass(frozen=True)
class Tail:
    """A place in a file, and the last bytes before it.

    A resumed run takes its files back and writes on, so a place alone says little: the bytes before it, the checksum of
    a gzip member among them, say whether what was read still stands there.

    Example::

        tail = Tail.at(path, 512)
        tail.stands(path)       # True, until somebody cuts the file below 512 bytes or writes others there
    """

    place: int = 0
    mark: bytes = b""

    @classmethod
    def at(cls, path: Path, place: int) -> Tail:
        """Return the place with the bytes before it."""
        return cls(place, _before(path, place))

    def stands(self, path: Path) -> bool:
        """Return whether the file still has these bytes before the place."""
        return _before(path, self.place) == self.mark


def _before(path: Path, place: int) -> bytes:
    """Return up to 64 bytes before a place; fewer where the file is shorter."""
    if place == 0 or not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, place - _MARK))
        return file.read(min(place, _MARK))


def read_lines(path: Path, place: int) -> tuple[list[bytes], int]:
    """Return the whole lines from a place on, and the place behind them."""
    if not path.exists():
        return [], place
    with path.open("rb") as file:
        file.seek(place)
        content = file.read()
    whole = content.rfind(b"\n") + 1
    return content[:whole].splitlines(), place + whole
