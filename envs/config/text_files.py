"""Reads the text of a file that a user names."""

from __future__ import annotations

import errno
from pathlib import Path


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8. A pipe, where reading may wait for ever, or a device raises `OSError`."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.read_text(encoding="utf-8")
