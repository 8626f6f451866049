"""Reads the text of a file of settings, of a template or of a model that a user names."""

from __future__ import annotations

import errno
from pathlib import Path

from envs.errors import UserError

#: The largest file that people write: to parse one takes seconds.
MAX_BYTES = 2**20
#: The largest JSON file of a model: the index of a thousand experts' weights has 20 MiB.
MODEL_BYTES = 2**27


def read_text(path: Path, name: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file in UTF-8; errors call it `name`.

    Raises:
        UserError: it is larger than `max_bytes`.
        OSError: it cannot be read, or is a pipe, where reading may wait for ever, or a device.
    """
    if (size := path.stat().st_size) > max_bytes:
        raise UserError(name, f"must have at most {max_bytes} bytes", size, "give a smaller one")
    if not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.read_text(encoding="utf-8")
