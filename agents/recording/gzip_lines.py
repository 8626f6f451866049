"""Files of compressed lines: each line is a gzip member of its own (RFC 1952) and is appended whole.

Any program that reads gzip reads such a file as JSON lines (`zcat episodes.jsonl.gz`). A writer that is killed leaves
part of a line at the end: readers skip it, and the next writer moves it aside. Readers also skip bytes in the middle
that are no gzip, and continue at the next whole line; `num_skipped` counts these places.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from agents.recording.append_log import rewind
from agents.recording.safe_files import MAX_LINE, MAX_VALUES, memory_of, open_regular

#: Compression level. Higher ones take three times as long for at most 7 % fewer bytes.
LEVEL = 2
_BLOCK = 1 << 16
_GZIP = 31  # zlib's number for a gzip header with the largest window
_HEADER = b"\x1f\x8b\x08"
#: How many places behind damage a reader of a file tries for the next line.
MAX_TRIES = 1000
#: How many bytes a reader of a file unpacks of what is no line: broken members, and lines that are too long.
MAX_WASTED = 2**30


class GzipLines:
    """A file to append lines to; each has left this process when `append` returns.

    `notes` says in a sentence each what was wrong with the file before.

    Example::

        file = GzipLines(Path("episodes.jsonl.gz"))
        file.append(b'{"id": "train-0-0"}')
        file.size()     # 52, all of it on disk
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = list[str]()
        whole = 0
        num_lines = 0
        num_damaged = 0
        for line in _scan(path, 0):
            whole = line.end
            num_lines += not line.is_only_damage
            num_damaged += line.follows_damage
        if num_damaged:
            places = f"{num_damaged} place{'s' * (num_damaged > 1)}"
            self.notes.append(f"{path} is damaged at {places}; its {num_lines} whole lines are kept")
        if moved := rewind(path, whole):
            self.notes.append(f"{path} did not end with a whole line; the {moved.stat().st_size} bytes are in {moved}")
        self._file = path.open("ab")

    def append(self, line: bytes) -> None:
        """Write one line, which must hold no line break."""
        # mtime 0: the same episodes give the same bytes, so goldens can be compared.
        self._file.write(gzip.compress(line + b"\n", LEVEL, mtime=0))
        self._file.flush()

    def size(self) -> int:
        """Return the bytes written so far, which are on disk when this returns."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_gzip_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (place in the file behind it, text) of each whole line, beginning at the place `start`.

    Skips damaged bytes, part of a line at the end, lines over `MAX_LINE`, which are never held as a whole, and lines
    over `MAX_VALUES`. Leaves out the rest of a file that wastes `MAX_TRIES` or `MAX_WASTED` on what is skipped.
    """
    return ((line.end, line.text) for line in _scan(path, start) if line.text is not None)


def num_skipped(path: Path) -> int:
    """Return at how many places readers skip damage, which no killed writer leaves, or a line that is too long."""
    return sum(line.num_skipped for line in _scan(path, 0))


@dataclass(frozen=True)
class _Line:
    """A whole line up to the place `end`, without `text` if it is too long; or the damage that follows that place."""

    end: int
    text: bytes | None
    follows_damage: bool = False
    is_only_damage: bool = False

    @property
    def num_skipped(self) -> int:
        return self.follows_damage + (self.text is None)


@dataclass
class _Budget:
    """What a reader of a file may still spend on what is no line: attempts, and bytes unpacked in vain."""

    tries: int = MAX_TRIES
    num_bytes: int = MAX_WASTED

    @property
    def is_spent(self) -> bool:
        return self.tries <= 0 or self.num_bytes <= 0


def _scan(path: Path, start: int) -> Iterator[_Line]:
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        blocks = _Blocks(file)
        place = start
        budget = _Budget()
        while blocks.at(place):
            try:
                line = _line(blocks, place, budget)
                is_damaged = False
            except zlib.error:
                line = None
                is_damaged = True
            if line is None and not budget.is_spent:  # the next line, or part of a line at the end
                line = _next_line(blocks, place + 1, budget)
            if line is None:
                if is_damaged or budget.is_spent:
                    yield _Line(place, None, is_only_damage=True)
                return
            yield line
            place = line.end


class _Blocks:
    """A file that is read in blocks, from any place."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._start = 0
        self._block = memoryview(b"")

    def at(self, place: int, least: int = 1) -> memoryview:
        """Return at least so many bytes from a place on; fewer at the end of the file."""
        if not self._start <= place <= self._start + len(self._block) - least:
            # `pread` has no position to share: the server reads one file for several requests.
            self._block = memoryview(os.pread(self._file.fileno(), _BLOCK, place))
            self._start = place  # only once it is read
        return self._block[place - self._start :]


def _line(blocks: _Blocks, place: int, budget: _Budget, most: float = math.inf) -> _Line | None:
    """Return the line that begins at a place; None where the file ends within it, or it is over `most` bytes.

    What is unpacked and is not the text of a line counts against the budget; when that is spent, the line is None.

    Raises:
        zlib.error: the bytes are no gzip.
    """
    reader = zlib.decompressobj(_GZIP)
    pieces = list[bytes]()
    size = 0
    text = None
    try:
        # In pieces: a member of a few kB may unpack to gigabytes.
        while not reader.eof:
            block = blocks.at(place)
            piece = reader.decompress(block, _BLOCK)
            # The end of the file within a member is part of a line, which may still be written.
            if (not block and not piece) or size > most or size > MAX_LINE + budget.num_bytes:
                return None
            # At the end of the member, both are set.
            place += len(block) - len(reader.unused_data if reader.eof else reader.unconsumed_tail)
            size += len(piece)
            # A line that is too long is read to its end, to find the next, but is not held.
            if size <= MAX_LINE:
                pieces.append(piece)
            else:
                pieces.clear()
        if size <= MAX_LINE and memory_of(whole := b"".join(pieces)) <= MAX_VALUES:
            text = whole
        return _Line(place, text)
    finally:
        if text is None:
            budget.num_bytes -= size


def _next_line(blocks: _Blocks, place: int, budget: _Budget) -> _Line | None:
    """Return the first line that begins at or behind a place, None where there is none or the budget is spent."""
    for header in _headers(blocks, place):
        if budget.is_spent:
            return None
        budget.tries -= 1
        # Bytes of a header stand elsewhere too, by chance, so each place is tried.
        with contextlib.suppress(zlib.error):
            if line := _line(blocks, header, budget, most=MAX_LINE):
                return replace(line, follows_damage=True)
    return None


def _headers(blocks: _Blocks, place: int) -> Iterator[int]:
    """Yield each place, from one on, where a gzip member may begin."""
    while len(block := bytes(blocks.at(place, len(_HEADER)))) >= len(_HEADER):
        found = block.find(_HEADER)
        if found >= 0:
            yield place + found
        # A header may lie across the end of a block, so its last bytes are read again.
        place += found + 1 if found >= 0 else len(block) - len(_HEADER) + 1
