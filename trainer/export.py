"""Write a checkpoint's model as a Hugging Face folder, with adapters merged: `python -m trainer.export runs/x`.

It reads the run's settings, its checkpoint and the model that the run started from. It needs no GPU and no data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from agents.recording.run_files import CONFIG
from agents.rendering.renderer import Renderer
from agents.types import SamplingParams
from envs.config.cli import exit_code, parse
from envs.config.files import parse_yaml, read_file
from envs.config.settings import validate
from envs.errors import UserError
from trainer.checkpoint.checkpointer import Checkpoint, damage, found_steps, newest_whole
from trainer.checkpoint.run_dir import CHECKPOINTS, found_folder
from trainer.config.learner import LearnerConfig
from trainer.config.run import RunConfig
from trainer.config.sft import SftConfig
from trainer.config.sources import read_config
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.weights_io import empty_model
from trainer.setup.model_source import resolve_model, template_options
from trainer.setup.run_context import write_model


class ExportConfig(BaseModel):
    """Which checkpoint to export, and where to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path = Field(description="run folder")
    step: int | None = Field(default=None, ge=0, description="checkpoint of this step; empty: the newest whole one")
    to: Path | None = Field(default=None, description="folder to write; empty: model-step-N in the run folder")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="dtype of the written weights")


def export(config: ExportConfig) -> Path:
    """Write the model; return its folder.

    Raises:
        UserError: there is no such run or checkpoint, the checkpoint is damaged, or the folder cannot be written.
    """
    folder = found_folder(config.run, "RUN")
    checkpoint = _chosen(folder, config.step)
    target = config.to or folder / f"model-step-{checkpoint.step}"
    with _writing(target):  # before anything is loaded
        target.mkdir(parents=True, exist_ok=True)
    run = _settings(folder / CONFIG)
    path = resolve_model(run.model.model)
    # Only the settings that decide the network's parameters matter; it runs in this process, whatever the run used.
    learner_config = LearnerConfig(
        lora_rank=run.learner.lora_rank,
        lora_alpha=run.learner.lora_alpha,
        lora_targets=run.learner.lora_targets,
        freeze_vision=run.learner.freeze_vision,
        compile="off",
    )
    learner = FSDPLearner(
        empty_model(path), SamplingParams(), run.steps, config=learner_config, path=path, seed=run.seed
    )
    learner.restore(checkpoint.learner, with_optimizer=False)
    renderer = Renderer.from_checkpoint(path, template_options(run.model))
    with _writing(target):
        write_model(learner, renderer, target, getattr(torch, config.dtype))
    return target


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turn the system's errors into the user's."""
    try:
        yield
    except OSError as error:
        fix = f"give another folder, with room ({error.strerror or error})"
        raise UserError("--to", "must be a folder that can be written", target, fix) from error


def _settings(file: Path) -> RunConfig | SftConfig:
    """Return the settings of a run folder, of reinforcement or of supervised training."""
    if "batch_size" in (parse_yaml(file.read_text(encoding="utf-8"), str(file)) or ()):
        return validate(SftConfig, read_file(SftConfig, file))
    return read_config(file)


def _chosen(folder: Path, step: int | None) -> Checkpoint:
    """Return the checkpoint of a step, or the newest whole one."""
    steps = found_steps(folder / CHECKPOINTS)
    if step is None:
        found = newest_whole(folder / CHECKPOINTS, lambda text: print(text, file=sys.stderr))
        if found is None:
            raise UserError("RUN", "must have a checkpoint", str(folder / CHECKPOINTS), "train with --save-every")
        return found
    chosen = next((checkpoint for checkpoint in steps if checkpoint.step == step), None)
    if chosen is None:
        existing = ", ".join(str(checkpoint.step) for checkpoint in steps) or "none"
        raise UserError("--step", "must be the step of a checkpoint", step, f"there are: {existing}")
    if fault := damage(chosen):
        raise UserError("--step", "must be the step of a whole checkpoint", step, f"give another one ({fault})")
    return chosen


def run(argv: Sequence[str] | None) -> int:
    """Parse the flags, write the model and print its folder."""
    config = parse(ExportConfig, argv, "python -m trainer.export", "Write the model of a checkpoint.")
    print(export(config))
    return 0


def main() -> int:
    """Run the command line."""
    return exit_code(lambda: run(None))


if __name__ == "__main__":
    sys.exit(main())
