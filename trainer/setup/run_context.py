"""The objects of a prepared run, its start or resume, and the model folder that it writes."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from agents.cli.text import path_text
from agents.model.architectures import ModelFacts
from agents.recording import Recorder
from agents.recording.run_files import CONFIG
from agents.rendering.renderer import Renderer
from agents.types import SamplingParams
from envs.config.files import read_file
from envs.config.settings import changed, validate
from envs.errors import UserError
from envs.safe_text import write_text
from envs.spec import EnvSpec
from trainer.checkpoint.checkpointer import Checkpoint, newest_whole
from trainer.checkpoint.run_dir import CHECKPOINTS, found_folder, locked, make_folder
from trainer.config.run import RunConfig
from trainer.config.sources import RESUME, write_config
from trainer.learner.protocol import Learner
from trainer.setup.components import StartedLearner, start_learner, with_compile_chosen
from trainer.setup.start import Start
from trainer.weight_sync.sync import NoWeightSync, WeightSync

if TYPE_CHECKING:
    from trainer.config.sft import SftConfig
    from trainer.setup.cluster import ClusterRoom

logger = logging.getLogger(__name__)

#: The largest file that is copied from the base model.
MAX_COPIED = 32 * 2**20
_NOT_COPIED = ("chat_template.json", "best.json")


@dataclass(frozen=True, eq=False)
class RunContext:
    """The checked and ready objects of a run; `cleanup` stops the processes that were started for it."""

    config: RunConfig
    folder: Path
    spec: EnvSpec
    model_path: Path | str
    facts: ModelFacts
    renderer: Renderer
    learner: Learner
    weight_sync: WeightSync | NoWeightSync
    checkpoint: Checkpoint | None
    cleanup: ExitStack
    start: Start = field(default_factory=Start, kw_only=True)

    def recorder(self) -> Recorder | None:
        """Return a recorder of the run's episodes; None where they are not recorded."""
        return None

    def notes(self) -> list[str]:
        """Return the messages to print before the first step."""
        return []

    def closing_notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the messages to print at the end, given the metrics of all steps."""
        return []

    def save_model(self, folder: Path, notes: Mapping[str, str] = {}, aside: Path | None = None) -> None:
        """Write weights, tokenizer, template and image processor as a Hugging Face folder, with `notes` as files."""
        save_model(self.learner, self.renderer, folder, notes, aside)

    def close(self) -> None:
        """Stop the processes of learner and servers."""
        self.cleanup.close()

    def abandon(self) -> None:
        """Close a run that has not begun, and remove the folder made for it, unless a server's log is in it."""
        self.close()
        if not self.config.checkpoint.resume and self.start.failure is None:
            remove_run(self.folder)


def save_model(
    learner: Learner, renderer: Renderer, folder: Path, notes: Mapping[str, str] = {}, aside: Path | None = None
) -> None:
    """Replace a model folder by `write_model`'s, with `notes` as further files; it is always complete or absent.

    The old one is deleted, or kept as `aside`.
    """
    part = folder.with_name(f"{folder.name}.writing")  # a killed process leaves no partial model under the final name
    old = folder.with_name(f"{folder.name}.old")
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    write_model(learner, renderer, part)
    for name, text in notes.items():
        write_text(part / name, text)
    if folder.exists() and aside:
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    elif folder.exists():  # moved away first: to delete it takes time
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_model(learner: Learner, renderer: Renderer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a learner's weights in `dtype`, with tokenizer, template and image processor, into a folder.

    Raises:
        UserError: the learner wrote them on another host, into a folder that is not shared.
        OSError: the disk is full or broken.
    """
    try:
        learner.save(folder, dtype)
        # Rank 0 writes on its own host: without a shared folder there is nothing here.
        if not (folder / "config.json").exists():
            fix = "give a folder that all hosts see; the weights are there, on rank 0's host"
            raise UserError("--out", "must be shared with the host of learner rank 0", str(folder), fix)
        renderer.save(folder)
        if renderer.path is not None:
            copy_other_files(renderer.path, folder)
    except SafetensorError as error:  # holds the system's error in its text only
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


def copy_other_files(base: Path, folder: Path) -> None:
    """Copy what a base model's folder has and a saved model lacks, such as `video_preprocessor_config.json`.

    These are regular JSON, text and Jinja files of at most 32 MiB at the top of the folder. Not copied are weights and
    their indices, links out of the folder, the model card and licence of the base, and `chat_template.json`, whose
    template is saved as `chat_template.jinja`.
    """
    root = base.resolve()
    for file in sorted(base.glob("*")):
        target = folder / file.name
        # Never code: a checkpoint may be a stranger's.
        is_named = file.suffix in (".json", ".txt", ".model", ".jinja") and file.name not in _NOT_COPIED
        if not is_named or file.name.endswith(".index.json") or target.exists() or not file.is_file():
            continue
        # The hub's cache links to its blobs, two folders up.
        is_inside = file.resolve().is_relative_to(root if root.parent.name != "snapshots" else root.parent.parent)
        if is_inside and file.stat().st_size <= MAX_COPIED:
            shutil.copyfile(file, target)


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that this process holds, and the checkpoint that the run resumes from, if any."""

    folder: Path
    checkpoint: Checkpoint | None


def open_run(
    config: RunConfig | SftConfig, label: str, cleanup: ExitStack, keeps: Callable[[], bool] = lambda: False
) -> OpenedRun:
    """Make or find the run folder, and hold it until `cleanup` is closed.

    A new folder is named after `label`. If an error closes `cleanup`, a new folder is removed, unless `keeps()`.

    Raises:
        UserError: the folder cannot be used.
    """
    if config.checkpoint.resume:
        # Two processes in one run would write the same files.
        folder = cleanup.enter_context(locked(found_folder(config.checkpoint.resume)))
        return OpenedRun(folder, found_checkpoint(folder))
    # Remembered before the folder is made: only what we made may be removed.
    made = [parent for parent in (config.log.out, *config.log.out.parents) if not parent.exists()]
    folder = make_folder(config.log.out, config.log.name, label)

    def remove(kind: object, error: BaseException | None, trace: object) -> None:
        # A server's log in it says why the start failed.
        if error and not keeps():
            remove_run(folder, made)

    cleanup.push(remove)
    cleanup.enter_context(locked(folder))
    return OpenedRun(folder, None)


def found_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run folder, None where there is none."""
    checkpoint = newest_whole(folder / CHECKPOINTS)
    if checkpoint:
        start = f"resumes after step {checkpoint.step}"
    else:
        start = "starts over: it has no whole checkpoint"
    logger.info(f"the run in {path_text(folder)} {start}")
    return checkpoint


def remove_run(folder: Path, made: Sequence[Path] = ()) -> None:
    """Remove a run folder, and those of the folders `made` for it that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()


def begin_or_resume(
    config: RunConfig | SftConfig,
    plan: RunConfig,
    opened: OpenedRun,
    model_path: Path | str,
    sampling: SamplingParams,
    cleanup: ExitStack,
    room: ClusterRoom | None = None,
) -> StartedLearner:
    """Start the learner where the run's checkpoint left it, if any, and write the configuration into the folder.

    It starts in `room`, if a part of a cluster is reserved. The processes that it takes last until `cleanup` is closed.

    Raises:
        UserError: the processes cannot start, or the checkpoint is of another network.
    """
    learner = start_learner(with_compile_chosen(plan, model_path), model_path, sampling, cleanup, room)
    checkpoint = opened.checkpoint
    if checkpoint:
        learner.learner.restore(checkpoint.learner)
        for change in changed_settings(checkpoint, config):
            logger.info(change)
    # Last: the file says that the folder is that of a run which has begun.
    write_config(config, opened.folder / CONFIG)
    return learner


def changed_settings(checkpoint: Checkpoint, config: RunConfig | SftConfig) -> list[str]:
    """Return the settings that are not those of a run's checkpoint, such as "lr 1e-05 -> 1e-06 from step 3"."""
    old = validate(type(config), read_file(type(config), checkpoint.folder / CONFIG))
    return [
        f"{path[-1]} {before!r} -> {now!r} from step {checkpoint.step + 1}"
        for path, (before, now) in changed(config, old).items()
        if path != RESUME
    ]
