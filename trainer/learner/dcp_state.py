"""Saves and restores the learner's state with `torch.distributed.checkpoint` (DCP), so that a run resumes exactly.

Any number of ranks can read the folder. It holds the trained weights only: frozen weights are in the checkpoint that
the run started from. There is no state of random generators: nothing in a step draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from agents.model.policy import PolicyModel
from envs.errors import UserError
from trainer.learner.protocol import CheckpointFailed

_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
_STEPS = "steps_done"


class StateWriter:
    """Writes states in the background, one at a time.

    The ranks plan the write over a separate process group, because the learner uses the default group meanwhile.

    Example::

        writer = StateWriter()
        writer.begin(trained_state(model, optimizer, steps_done=10), Path("runs/x/checkpoints/part/learner"))
        writer.is_written(wait=True)    # True
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._saving: Future[Any] | None = None

    def begin(self, state: dict[str, Any], folder: Path) -> None:
        """Copy a state to host memory and start writing it; every rank must call it."""
        with suppress(CheckpointFailed):  # of a state that another rank could not write, and gave up
            self.is_written(wait=True)
        if self._group is None:
            # What is written is on the CPU by then.
            group: Any = dist.new_group(backend="gloo")
            self._group = group
        answer: Any = async_save(state, checkpoint_id=folder, process_group=self._group)
        self._saving = answer

    def is_written(self, wait: bool) -> bool:
        """Return whether all ranks have written their part; with `wait`, wait until they have.

        Raises:
            CheckpointFailed: a rank could not write; the message says why.
        """
        saving = self._saving
        if saving is None or not (wait or saving.done()):
            return saving is None
        self._saving = None
        try:
            saving.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointFailed(reason(error)) from error
        return True


def trained_state(model: PolicyModel, optimizer: torch.optim.Optimizer, steps_done: int) -> dict[str, Any]:
    """Return the state. It holds the learner's own tensors, which must not change until they have been copied."""
    return {
        "model": get_model_state_dict(model, options=_TRAINED),
        "optimizer": _optimizer_state(model, optimizer),
        _STEPS: torch.tensor(steps_done),
    }


def _optimizer_state(model: PolicyModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, and leave the optimizer as it is.

    Torch takes a step with zero gradients to read the state of an optimizer that has none yet. That step would count:
    the next one would be corrected for it, and move the weights by 0.73 of what it should.
    """
    is_new = not optimizer.state
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_TRAINED)  # type: ignore[assignment]
    if is_new:
        optimizer.state.clear()
        state["state"] = {}
    return state


def restore(folder: Path, model: PolicyModel, optimizer: torch.optim.Optimizer | None) -> int:
    """Fill the network, and the optimizer if one is given, from a folder; return the number of steps done.

    Every rank must call it. The number of ranks may differ from the one that wrote the folder: DCP cuts new shards.

    Raises:
        UserError: the folder holds another network, or other adapters.
    """
    reader = FileSystemReader(folder)
    names = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_TRAINED), _STEPS: torch.tensor(0)}
    wanted = {f"model.{name}" for name in state["model"]}
    # In one of the two alone: another network, other adapters, or other frozen weights.
    if missing := wanted ^ {name for name in names if name.startswith("model.")}:
        rule = "must hold the network, and the adapters of it, that this run trains"
        fix = "leave --model, --freeze-vision and --lora-* as they were"
        raise UserError("--resume", rule, f"{sorted(missing)[0].removeprefix('model.')} in one alone", fix)
    if optimizer is not None:
        state["optimizer"] = _moments(model, optimizer, names)
    load(state, storage_reader=reader)  # in place: into the network's and the optimizer's own tensors
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            if name not in state["optimizer"]["state"]:
                # Torch made zeros to be filled; AdamW would count their steps.
                optimizer.state.pop(parameter, None)
    return int(state[_STEPS])


def _moments(model: PolicyModel, optimizer: torch.optim.Optimizer, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer state to fill: that of the parameters which have a state in the checkpoint.

    A parameter that never had a gradient has no state, for instance the vision tower in a run without images.
    """
    state = get_optimizer_state_dict(model, optimizer, options=_TRAINED)
    every: dict[str, Any] = state["state"]  # type: ignore[assignment]
    kept = {name: moments for name, moments in every.items() if f"optimizer.state.{name}.exp_avg" in names}
    return {**state, "state": kept}


def reason(error: BaseException) -> str:
    """Return the operating system's reason in short, for instance "No space left on device"."""
    if isinstance(error, CheckpointException):
        return next((reason(cause) for cause, _ in error.failures.values()), type(error).__name__)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "unexpected pos" in str(error):  # what torch.save says where its file could not be written to the end
        return "the file could not be written to its end: the disk is full, or files have a largest size"
    lines = str(error).strip().splitlines()
    return next((line for line in reversed(lines) if "No space left" in line), lines[-1] if lines else repr(error))
