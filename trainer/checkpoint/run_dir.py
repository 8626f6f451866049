"""The run folder: created once, locked by one process at a time, found again by `--resume`."""

from __future__ import annotations

import fcntl
import itertools
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agents.recording.run_files import CONFIG
from envs.config.commands import flag_words
from envs.errors import UserError
from envs.safe_text import well_formed

#: In it, besides the files of `agents.recording.run_files`: registry entry, episodes, checkpoints, finished model, the
#: model with the best held-out accuracy.
ENVIRONMENT = "environment.json"
EPISODES = "episodes"
CHECKPOINTS = "checkpoints"
MODEL = "model"
BEST = "best"
_LOCK = ".lock"
#: Tells runs apart that one process begins in one second.
_numbers = itertools.count()
#: How long to wait for a run folder that another process holds.
WAIT_S = 10.0


def default_name(label: str) -> str:
    """Return the name of a run that is given none, such as "geo3k-seed0-20260102-030405-4711"."""
    return f"{label}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def new_folder(out: Path, name: str, can_resume: bool = True) -> Path:
    """Return the path of a run folder that is not there yet; an empty name stands for a default one.

    Raises:
        UserError: it is there already, cannot be made, or is not in `--out`.
    """
    folder = (out / (name or default_name("run"))).absolute()  # an environment may change the working directory
    if out.absolute() not in Path(os.path.normpath(folder)).parents:
        fix = "give a name without '..', and the folder as --out"
        raise UserError("--name", f"must name a folder in --out {out}", name, fix)
    if well_formed(str(folder)) != str(folder):
        fix = "tokenizers cannot be saved there; give another folder"
        raise UserError("--out", "must be a path in UTF-8", str(folder), fix)
    if os.path.lexists(folder):
        fix = "choose another name"
        if can_resume:
            fix += f", or resume it: {shlex.join(flag_words('resume', folder))}"
        raise UserError("--name", "must name a new run folder", str(folder), fix)
    above = next(parent for parent in folder.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise UserError("--out", "must be writable", str(folder), f"give another folder ({above} is none)")
    return folder


def make_folder(out: Path, name: str, label: str, can_resume: bool = True) -> Path:
    """Create the run folder; an existing one is never written into. Raises as `new_folder` does.

    Example: without `--name` and with the label "geo3k-seed0" it is `runs/geo3k-seed0-20260102-030405-4711`.
    """
    name = name or f"{default_name(label)}-{next(_numbers)}".removesuffix("-0")
    folder = new_folder(out, name, can_resume)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError("--out", "must be writable", str(folder), f"give another folder ({error.strerror})") from error
    return folder


def found_folder(folder: Path, flag: str = "--resume") -> Path:
    """Return the absolute path of the run folder that a flag names.

    Raises:
        UserError: the folder is not that of a run.
    """
    if not (folder / CONFIG).exists():
        rule = f"must be a run folder, with {CONFIG}"
        raise UserError(flag, rule, folder, "give the folder that the run has printed")
    return folder.absolute()


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Lock a run folder; the system releases the lock when this process ends, however it ends.

    Raises:
        UserError: another process holds it.
    """
    try:
        file = (folder / _LOCK).open("a+")
    except OSError as error:
        raise UserError("--out", "must be writable", str(folder), f"give another folder ({error.strerror})") from error
    with file:
        # Children of a killed process may hold the lock until they notice.
        deadline = time.monotonic() + WAIT_S
        while not _lock(file.fileno()):
            if time.monotonic() > deadline:
                fix = "stop that process first"
                raise UserError("--resume", "must not be written by another process", str(folder), fix)
            time.sleep(0.1)
        # The lock belongs to the open file, which a process that an environment forks would keep open after this one.
        os.register_at_fork(after_in_child=file.close)
        yield folder


def _lock(handle: int) -> bool:
    """Lock an open file; return False where another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
