"""Reads the text of a file of settings, or of a template, that a user names."""

from __future__ import annotations

import errno
from pathlib import Path

from envs.errors import UserError

#: The largest file: reading one takes seconds.
MAX_BYTES = 2**20


def read_text(path: Path, name: str) -> str:
    """Return the text of a file in UTF-8; errors call it `name`.

    Raises:
        UserError: it is larger than `MAX_BYTES`.
        OSError: it cannot be read, or is a pipe, where reading may wait for ever, or a device.
    """
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UserError(name, f"must have at most {MAX_BYTES} bytes", size, "give a smaller one")
    if not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.read_text(encoding="utf-8")
