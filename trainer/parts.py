"""What every run is made of, wherever its groups come from, and the model that it leaves."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from agents.recording import Recorder
from agents.renderer import Renderer
from envs.errors import UserError
from envs.spec import EnvSpec
from trainer.checkpoint import Checkpoint
from trainer.config import RunConfig
from trainer.trainer import ModelFacts, Trainer


@dataclass(frozen=True, eq=False)
class Parts:
    """The checked, ready parts of a run.

    `cleanup` ends the processes that were started for it.
    """

    config: RunConfig
    folder: Path
    spec: EnvSpec
    model_path: Path | str
    facts: ModelFacts
    renderer: Renderer
    learner: Trainer
    checkpoint: Checkpoint | None
    cleanup: ExitStack

    def recorder(self) -> Recorder | None:
        """Return what records the run's episodes; None where none is to be recorded."""
        return None

    def notes(self) -> list[str]:
        """Return what is said of the run before it begins."""
        return []

    def closing_notes(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return what is said of it at its end, given its metrics."""
        return []

    def save_model(self, folder: Path) -> None:
        """Write the learner's weights, with everything else of the checkpoint, as a Hugging Face folder."""
        save_model(self.learner, self.renderer, folder)

    def close(self) -> None:
        """End learner processes."""
        self.cleanup.close()


def save_model(learner: Trainer, renderer: Renderer, folder: Path) -> None:
    """Write what `write_model` writes in place of a folder, which is whole at any moment or not there."""
    part = folder.with_name(f"{folder.name}.writing")  # who is cut off leaves no half a model under its name
    shutil.rmtree(part, ignore_errors=True)
    write_model(learner, renderer, part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def write_model(learner: Trainer, renderer: Renderer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a learner's weights in `dtype`, with tokenizer, template and image processor, into a folder.

    Raises:
        UserError: the learner wrote them on another host, into a folder that this one does not see.
        OSError: the disk is full or broken.
    """
    try:
        learner.save(folder, dtype)
        if not (folder / "config.json").exists():
            fix = "give a folder that all hosts see; the weights are there, on rank 0's host"
            raise UserError("--out", "must be shared with the host of learner rank 0", str(folder), fix)
        renderer.save(folder)
    except SafetensorError as error:  # hides what the system said in its text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error
