"""The folder that a run writes into: made once, written by one process at a time, and found again."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envs.errors import UserError
from trainer.config import FolderConfig

#: What lies in it: settings, the environment's registry entry, a line per step, recorded episodes, checkpoints, and the
#: finished model.
CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
EPISODES, CHECKPOINTS, MODEL = "episodes", "checkpoints", "model"
_LOCK = ".lock"
#: How long to wait for a run folder that another process holds.
WAIT_S = 10.0


#: What a full or broken disk is called: no fault of the run, which can go on elsewhere or later.
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def is_disk_fault(error: Exception) -> bool:
    """Return whether an error says that a disk is full or broken."""
    return isinstance(error, OSError) and error.errno in _DISK_FAULTS


def make_folder(config: FolderConfig, label: str, can_resume: bool = True) -> Path:
    """Create the run folder; an existing one is never written into.

    Example: without `--name` and with the label "geo3k-seed0" it is `runs/geo3k-seed0-20260102-030405-4711`.

    Raises:
        UserError: it is there already, or cannot be made.
    """
    name = config.name or f"{label}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = (config.out / name).absolute()  # an environment may change the working directory
    try:
        folder.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        fix = f"choose another name{f', or go on with it: --resume {folder}' if can_resume else ''}"
        raise UserError("--name", "must name a new run folder", str(folder), fix) from None
    except OSError as error:
        raise UserError("--out", "must be writable", str(folder), f"give another folder ({error.strerror})") from error
    return folder


def found_folder(folder: Path) -> Path:
    """Return a run folder's whole path.

    Raises:
        UserError: it is none.
    """
    if not (folder / CONFIG).exists():
        rule = f"must be a run folder, with {CONFIG}"
        raise UserError("--resume", rule, str(folder), "give the folder that the run has printed")
    return folder.absolute()


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Hold a run folder; the system lets go of it when this process ends, however it ends.

    Raises:
        UserError: another process holds it.
    """
    try:
        file = (folder / _LOCK).open("a+")
    except OSError as error:
        raise UserError("--out", "must be writable", str(folder), f"give another folder ({error.strerror})") from error
    with file:
        # Processes that were started by one that was killed may hold it until they notice.
        deadline = time.monotonic() + WAIT_S
        while not _lock(file.fileno()):
            if time.monotonic() > deadline:
                fix = "end that process first"
                raise UserError("--resume", "must not be written by another process", str(folder), fix)
            time.sleep(0.1)
        yield folder


def _lock(handle: int) -> bool:
    """Lock an open file; return False where another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: then nobody can be told apart
        return True
    return True
