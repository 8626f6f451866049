"""Writes, checks and finds the checkpoints of a run: folders that are complete or absent.

Each is a folder `step-N`. The learner's ranks write their shards in the background (`torch.distributed.checkpoint`)
into a folder under a temporary name. Once everything is on disk, a manifest with the size and CRC-32 of every file is
added and the folder renamed. A process killed at any moment leaves complete checkpoints and at most a temporary folder,
which the next one deletes.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from envs.config.text_files import MODEL_BYTES, read_text
from envs.errors import UserError
from trainer.config.run import CheckpointConfig
from trainer.learner.dcp_state import reason
from trainer.learner.protocol import CheckpointFailed, Learner

logger = logging.getLogger(__name__)

#: The folder of a checkpoint that the learner's ranks write.
LEARNER = "learner"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = ".writing"
_BLOCK = 1 << 20

#: Gives the files of a checkpoint besides the learner's, by name.
Files = Callable[[], Mapping[str, bytes]]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Example: `Checkpoint(Path("runs/x/checkpoints/step-20"), step=20)`.
    """

    folder: Path
    step: int

    @property
    def learner(self) -> Path:
        """What `Learner.restore` reads."""
        return self.folder / LEARNER

    def read(self, name: str) -> bytes:
        """Return one of the files that were given to `Checkpoints.begin`."""
        return (self.folder / name).read_bytes()


class Checkpoints:
    """Writes the checkpoints of one run, every `config.save_every` steps, and keeps the newest `keep_checkpoints`.

    A checkpoint that cannot be written, for example on a full disk, is logged and deleted; earlier ones are kept, and
    the run continues.

    Example::

        checkpoints = Checkpoints(Path("runs/x/checkpoints"), learner, CheckpointConfig(save_every=10))
        checkpoints.mark_dirty()                                     # step 10 begins to change the weights
        checkpoints.on_step_end(10, lambda: {"state.json": b"{}"})   # and is done: returns once the weights are copied
        checkpoints.close()                                     # one of the last step, where there is none yet
        newest_whole(Path("runs/x/checkpoints")).step    # 10
    """

    def __init__(self, folder: Path, learner: Learner, config: CheckpointConfig) -> None:
        self.folder = folder
        self.learner = learner
        self.config = config
        self.num_failed = 0
        self._writing: int | None = None
        #: The last finished step and the function that gives its files; None while the weights are changing.
        self._stands: tuple[int, Files] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        # Of a process that was killed while it wrote.
        for left in folder.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)
        self.newest_step = max((checkpoint.step for checkpoint in found_steps(folder)), default=None)

    def mark_dirty(self) -> None:
        """Note that the weights begin to change: until `on_step_end` no checkpoint can be written.

        One that is on disk by now becomes whole, so that a learner that is lost in this step does not take it along.
        """
        self.finish(wait=False)
        self._stands = None

    def mark_whole(self, step: int, files: Files) -> None:
        """Note that the weights are those of a step: `close` can write a checkpoint of it."""
        self._stands = step, files

    def on_step_end(self, step: int, files: Files, is_last: bool = False) -> None:
        """Note that a step is done, and begin a checkpoint if one is due."""
        self.mark_whole(step, files)
        every = self.config.save_every
        self.finish(wait=False)
        if every and (step % every == 0 or is_last):
            self.begin(step, files())

    def close(self) -> None:
        """Finish the checkpoint being written, and write one of the last finished step if it has none.

        After an interrupt in the middle of a step nothing is written: the weights may be ahead of the files.
        """
        self.finish()
        if self._stands and self.config.save_every and self._stands[0] != self.newest_step:
            step, files = self._stands
            self.begin(step, files())
            self.finish()

    def begin(self, step: int, files: Mapping[str, bytes]) -> None:
        """Begin to write the current state as that of `step`, once the checkpoint before it is finished."""
        self.finish()
        part = self._part(step)
        try:
            part.mkdir(parents=True)
            for name, content in files.items():
                (part / name).write_bytes(content)
            self.learner.begin_checkpoint(part / LEARNER)
        except (OSError, CheckpointFailed) as error:
            self._give_up(step, error)
        else:
            self._writing = step

    def finish(self, wait: bool = True) -> None:
        """Finish the checkpoint being written, once all ranks have written their part; without `wait`, if they have."""
        step = self._writing
        if step is None:
            return
        try:
            if not self.learner.is_checkpoint_written(wait):
                return
            self._writing = None
            part = self._part(step)
            whole = self.folder / f"step-{step}"
            # Files first, then the manifest, then the name: whoever finds the name finds everything.
            _write_manifest(part, step)
            part.rename(whole)
            _sync(self.folder)
        except (OSError, CheckpointFailed) as error:
            self._writing = None
            self._give_up(step, error)
            return
        self.newest_step = step
        # Not before the new one is whole: until then an old one is the newest.
        for old in found_steps(self.folder)[self.config.keep_checkpoints :]:
            shutil.rmtree(old.folder, ignore_errors=True)

    def _part(self, step: int) -> Path:
        return self.folder / f"step-{step}{_UNFINISHED}"

    def _give_up(self, step: int, error: Exception) -> None:
        shutil.rmtree(self._part(step), ignore_errors=True)
        self.num_failed += 1
        kept = found_steps(self.folder)
        if kept:
            there = f"the newest is that of step {kept[0].step}"
        else:
            there = "there is none yet"
        logger.warning(f"the checkpoint of step {step} could not be written, {there}: {reason(error)} ({self.folder})")


def found_steps(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, the newest first; none of them is read."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [Checkpoint(path, step) for step, path in sorted(found, reverse=True)]


def newest_whole(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint all of whose files are as they were written; None where there is none.

    A damaged one is logged and renamed to `step-N.damaged`.
    """
    for checkpoint in found_steps(folder):
        fault = damage(checkpoint)
        if fault is None:
            return checkpoint
        names = (f"step-{checkpoint.step}.damaged{number or ''}" for number in itertools.count())
        aside = next(path for path in map(folder.joinpath, names) if not path.exists())
        # Some of its files may still be of use to somebody.
        checkpoint.folder.rename(aside)
        logger.warning(f"the checkpoint of step {checkpoint.step} is damaged and skipped: {fault}; it is now {aside}")
    return None


def damage(checkpoint: Checkpoint) -> str | None:
    """Return the fault of a checkpoint's files, or None."""
    try:
        manifest = json.loads(read_text(checkpoint.folder / MANIFEST, MANIFEST, MODEL_BYTES))
        step = manifest["step"]
        written = dict(manifest["files"])
        found = _fingerprints(checkpoint.folder)
    except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST}, or a file that it names, cannot be read ({type(error).__name__})"
    if step != checkpoint.step:
        return f"{MANIFEST} is of step {step}"
    changed = next((name for name in written if found.get(name) != written[name]), None)
    if changed is None:
        return None
    name = Path(changed).name
    return f"{name} has size and CRC-32 {found.get(changed)}, written were {written[changed]}"


def _write_manifest(folder: Path, step: int) -> None:
    """Sync all files to disk, and write the manifest with their fingerprints."""
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
    target = folder / MANIFEST
    text = json.dumps({"step": step, "files": _fingerprints(folder)}, indent=1)
    target.write_text(text, encoding="utf-8")
    _sync(target)
    _sync(folder)


def _fingerprints(folder: Path) -> dict[str, list[int]]:
    """Return size and CRC-32 of every file but the manifest, by its path in the folder."""
    # Regular files alone: to read a pipe may take for ever.
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    # zlib lets other threads run meanwhile.
    with ThreadPoolExecutor() as pool:
        prints = list(pool.map(_fingerprint, paths))
    return {str(path.relative_to(folder)): found for path, found in zip(paths, prints, strict=True)}


def _fingerprint(path: Path) -> list[int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    # A folder cannot be opened in another way.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
