"""The objects of a prepared run, its start or resume, and the model folder that it writes."""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from envs.errors import UserError
from envs.spec import EnvSpec
from trainer.checkpoint.checkpointer import Checkpoint, newest_whole
from trainer.checkpoint.run_dir import CHECKPOINTS, found_folder, locked, make_folder
from trainer.config.learner import LearnerPlan
from trainer.config.run import RunConfig
from trainer.config.sources import write_config
from trainer.learner.protocol import Learner
from trainer.setup.components import StartedLearner, start_learner
from trainer.weight_sync.sync import NoWeightSync, WeightSync

if TYPE_CHECKING:
    from trainer.config.sft import SftConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RunContext:
    """The checked and ready objects of a run; `cleanup` stops the processes started for it."""

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

    def recorder(self) -> Recorder | None:
        """Return a recorder of the run's episodes; None where they are not recorded."""
        return None

    def notes(self) -> list[str]:
        """Return the messages to print before the first step."""
        return []

    def closing_notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the messages to print at the end, given the metrics of all steps."""
        return []

    def save_model(self, folder: Path, notes: Mapping[str, str] = {}) -> None:
        """Write weights, tokenizer, template and image processor as a Hugging Face folder, with `notes` as files."""
        save_model(self.learner, self.renderer, folder, notes)

    def close(self) -> None:
        """Stop learner processes."""
        self.cleanup.close()


def save_model(learner: Learner, renderer: Renderer, folder: Path, notes: Mapping[str, str] = {}) -> None:
    """Replace a model folder by `write_model`'s, with `notes` as further files; it is always complete or absent."""
    part = folder.with_name(f"{folder.name}.writing")  # a killed process leaves no partial model under the final name
    old = folder.with_name(f"{folder.name}.old")
    for left in (part, old):
        shutil.rmtree(left, ignore_errors=True)
    write_model(learner, renderer, part)
    for name, text in notes.items():
        (part / name).write_text(text, encoding="utf-8")
    if folder.exists():  # moved away first: to delete it takes time
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
        if not (folder / "config.json").exists():
            fix = "give a folder that all hosts see; the weights are there, on rank 0's host"
            raise UserError("--out", "must be shared with the host of learner rank 0", str(folder), fix)
        renderer.save(folder)
    except SafetensorError as error:  # holds the system's error in its text only
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


def begin_or_resume(
    config: RunConfig | SftConfig,
    plan: LearnerPlan,
    label: str,
    model_path: Path | str,
    sampling: SamplingParams,
    cleanup: ExitStack,
) -> tuple[StartedLearner, Path, Checkpoint | None]:
    """Start the learner and make or find the run folder; return both, and the checkpoint that the run resumes from.

    A new folder is named after `label`, and holds the configuration. Folder lock and processes last until `cleanup` is
    closed.

    Raises:
        UserError: the processes cannot start, the folder cannot be used, or the checkpoint is of another network.
    """
    folder, checkpoint = None, None
    if config.checkpoint.resume:
        folder = cleanup.enter_context(locked(found_folder(config.checkpoint.resume)))
        checkpoint = found_checkpoint(folder)
    learner = start_learner(plan, model_path, sampling, cleanup)
    if folder and checkpoint:
        learner.learner.restore(checkpoint.learner)
        for line in changed_settings(checkpoint, folder / CONFIG):
            logger.warning(f"{CONFIG} is not as at step {checkpoint.step}: {line} (edited, or damaged?)")
    if folder is None:  # last, so that a run that cannot start leaves nothing behind
        folder = cleanup.enter_context(locked(make_folder(config.log, label)))
    write_config(config, folder / CONFIG)
    return learner, folder, checkpoint


def changed_settings(checkpoint: Checkpoint, file: Path) -> list[str]:
    """Return the lines of a run's settings that are not those of its checkpoint: "lr: 5.0e-05 -> lr: 3.0e-05"."""
    if not (checkpoint.folder / CONFIG).exists():  # of an earlier version
        return []
    texts = checkpoint.read(CONFIG).decode(), file.read_text(encoding="utf-8")
    lines = ([line.partition("  #")[0].strip() for line in text.splitlines()] for text in texts)
    old, new = ([line for line in several if not line.startswith("#")] for several in lines)
    if len(old) != len(new):
        return [f"{len(old)} lines -> {len(new)}"]
    return [f"{before} -> {now}" for before, now in zip(old, new, strict=True) if before != now]


def found_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run folder, None where there is none."""
    checkpoint = newest_whole(folder / CHECKPOINTS)
    start = f"resumes after step {checkpoint.step}" if checkpoint else "starts over: it has no whole checkpoint"
    logger.info(f"the run in {path_text(folder)} {start}")
    return checkpoint
