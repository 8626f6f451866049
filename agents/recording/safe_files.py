"""Opens files of a recording, which may be a stranger's: regular files only, never more of one than fits in memory."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from envs.errors import UserError

#: The longest line of a recording; one of a million tokens takes about 20 MiB.
MAX_LINE = 32 * 2**20
#: The most memory that the values of one line may take; those of a million tokens take about 220 MiB.
MAX_VALUES = 256 * 2**20
#: The largest file that is read as a whole: a manifest, a summary.
MAX_FILE = 4 * 2**20
#: At most so many bytes of memory for a value that begins with, or follows, one of these characters.
_COSTS = {b"{": 200, b"[": 64, b",": 64, b":": 64}
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it.

    Raises:
        UserError: it is no regular file. A link could lead to a secret, which a page would then carry to others; a pipe
            or a device may never end.
        OSError: there is no such file, or it cannot be read.
    """
    _check_kind(path, path.lstat().st_mode)
    # O_NOFOLLOW: a link may have come since; O_NONBLOCK: opening a pipe waits for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(path, os.fstat(handle).st_mode)  # it may have been replaced since
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in _KINDS if test(mode)), "another file")
        raise UserError(str(path), "must be a regular file", kind, "put the file itself in its place")


def check_real_folder(folder: Path) -> None:
    """Raise `UserError` if a folder inside a recording is a link, which could lead to anyone's files."""
    if folder.is_symlink():
        raise UserError(str(folder), "must be a real folder", "a symbolic link", "put the folder itself in its place")


def memory_of(text: bytes) -> int:
    """Return a bound of the bytes that a JSON text takes as Python values: 32 MiB of `{},` would take 800 MiB."""
    return len(text) + sum(cost * text.count(mark) for mark, cost in _COSTS.items())


def read_regular(path: Path, most: int = MAX_FILE) -> bytes:
    """Return the content of a file.

    Raises:
        UserError: it is no regular file, or larger than `most` bytes.
        OSError: there is no such file, or it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UserError(str(path), f"must have at most {most} bytes", size, "take a recording as it was written")
        # Not to the end: a file that grows while it is read could fill the memory.
        return file.read(size)


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (place behind it, text) of each whole line of a plain file, beginning at the place `start`.

    A file that is missing has no lines. Raises `UserError` for a line over `MAX_LINE` or `MAX_VALUES`, and like
    `open_regular`.
    """
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        file.seek(start)
        # One more byte than allowed tells a line that is too long from one that is just as long.
        while (line := file.readline(MAX_LINE + 1)).endswith(b"\n"):
            if memory_of(line) > MAX_VALUES:
                break
            start += len(line)
            yield start, line[:-1]
        if line.endswith(b"\n") or len(line) > MAX_LINE:
            rule = f"must have lines of at most {MAX_LINE} bytes, whose values take at most {MAX_VALUES}"
            fix = "take a recording as it was written"
            raise UserError(str(path), rule, f"a longer one at byte {start}", fix)
