"""The model of a checkpoint, written as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from agents.recording.run_files import CONFIG
from agents.rendering.renderer import Renderer
from agents.types import SamplingParams
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


def export(run_folder: Path, step: int | None, to: Path | None, dtype: torch.dtype) -> Path:
    """Write the model of a step's checkpoint, or of the newest whole one; return its folder.

    The folder is `to`, or `model-step-N` in the run folder.

    Raises:
        UserError: there is no such run or checkpoint, the checkpoint is damaged, or the folder cannot be written.
    """
    folder = found_folder(run_folder, "RUN")
    checkpoint = _chosen(folder, step)
    target = to or folder / f"model-step-{checkpoint.step}"
    with _writing(target):  # before anything is loaded
        target.mkdir(parents=True, exist_ok=True)
    run = _settings(folder / CONFIG)
    path = resolve_model(run.model.model)
    # Only the settings that decide the network's parameters matter; it runs in this process, whatever the run used.
    kept = {"lora_rank", "lora_alpha", "lora_targets", "freeze_vision"}
    learner_config = LearnerConfig(**run.learner.model_dump(include=kept), compile="off")
    learner = FSDPLearner(
        empty_model(path), SamplingParams(), run.steps, config=learner_config, path=path, seed=run.seed
    )
    # The optimizer's state is twice the weights, and a model folder has none.
    learner.restore(checkpoint.learner, with_optimizer=False)
    renderer = Renderer.from_checkpoint(path, template_options(run.model))
    with _writing(target):
        write_model(learner, renderer, target, dtype)
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
    # Both kinds of runs write config.yaml; only supervised ones have batches.
    if "batch_size" in (parse_yaml(file.read_text(encoding="utf-8"), str(file)) or ()):
        return validate(SftConfig, read_file(SftConfig, file))
    return read_config(file)


def _chosen(folder: Path, step: int | None) -> Checkpoint:
    """Return the checkpoint of a step, or the newest whole one."""
    steps = found_steps(folder / CHECKPOINTS)
    if step is None:
        found = newest_whole(folder / CHECKPOINTS)
        if found is None:
            raise UserError("RUN", "must have a checkpoint", str(folder / CHECKPOINTS), "train with --save-every")
        return found
    chosen = next((checkpoint for checkpoint in steps if checkpoint.step == step), None)
    if chosen is None:
        existing = ", ".join(str(checkpoint.step) for checkpoint in steps) or "none"
        raise UserError("--step", "must be the step of a checkpoint", step, f"there are: {existing}")
    # Asked for by its number, so another one in its place would be wrong.
    if fault := damage(chosen):
        raise UserError("--step", "must be the step of a whole checkpoint", step, f"give another one ({fault})")
    return chosen
