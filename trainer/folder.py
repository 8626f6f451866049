"""The folder that a run writes into: made once, written by one process at a time, and found again."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envs.errors import UserError
from trainer.config import LogConfig

#: What lies in it: settings, a line per step, recorded episodes, checkpoints, and the finished model.
CONFIG, METRICS, EPISODES, CHECKPOINTS, MODEL = "config.yaml", "metrics.jsonl", "episodes", "checkpoints", "model"
_LOCK = ".lock"


def make_folder(config: LogConfig, label: str) -> Path:
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
        fix = f"choose another name, or go on with it: --resume {folder}"
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
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "end that process first"
            raise UserError("--resume", "must not be written by another process", str(folder), fix) from None
        except OSError:  # a file system without locks: then nobody can be told apart
            pass
        yield folder
