"""Rolls append-only files back to an earlier size, for a run that resumes from a checkpoint.

Nothing is deleted: the bytes after that size move into a folder `abandoned` beside the file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from envs.errors import UserError

#: The folder, inside a run folder or beside a file, of what a resumed run does not go on from.
ABANDONED = "abandoned"


def rewind(path: Path, size: int) -> Path | None:
    """Cut a file to its first `size` bytes; return the file that now holds the rest, None where there was none.

    A call that was killed can be repeated: the rest is complete on disk, under a name made of the two sizes, before the
    file is cut.

    Example: `rewind(Path("metrics.jsonl"), 512)`, of 700 bytes, returns `abandoned/metrics-512-700.jsonl`.

    Raises:
        UserError: the file is shorter than `size`.
    """
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        fix = "give a copy of the whole run folder"
        raise UserError("--resume", f"must hold a {path.name} of at least {size} bytes", f"{found} in {path}", fix)
    # Most files of a checkpoint that ended well have nothing behind it.
    if found == size:
        return None
    folder = path.parent / ABANDONED
    folder.mkdir(exist_ok=True)
    kept = folder / f"{path.stem}-{size}-{found}{path.suffix}"
    # Two steps, each whole on disk before the next: a kill between them loses no byte.
    being_written = kept.with_suffix(".part")
    with path.open("rb") as source, being_written.open("wb") as target:
        source.seek(size)
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())
    being_written.replace(kept)
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())
    return kept
