"""The layers of the trainer's commands, and the configuration that a run keeps and is resumed with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from envs.config_file import dump, read_file
from envs.errors import UserError
from envs.layers import Layers
from envs.settings import FieldPath, changed, flag_of, leaves, validate
from trainer.config import RunConfig

C = TypeVar("C", bound=BaseModel)

RESUME: FieldPath = ("checkpoint", "resume")
SIDES: FieldPath = ("sides",)
REPLAY: FieldPath = (*SIDES, "replay_rollouts")
#: Fields that may name files or folders, besides hub ids.
_PATHS = ("model", "data", "eval_data", "registry", "replay_rollouts")

#: What `python -m trainer.*` reads besides flags.
LAYERS = Layers(
    ready=Path(__file__).with_name("configs"),
    base=RESUME,
    like=REPLAY,
    own=(SIDES, ("log",), RESUME),
    shared=RunConfig,
)

#: What a run is: sections and fields that stay as they are when it is resumed. All else may change.
FIXED: tuple[FieldPath, ...] = (
    ("seed",),
    ("env",),
    ("data",),
    ("model",),
    ("rollout", "problems_per_step"),
    ("rollout", "group_size"),
    ("learner", "lora_rank"),
    ("learner", "lora_alpha"),
    ("learner", "lora_targets"),
    ("learner", "freeze_vision"),
    ("log", "out"),
    ("log", "name"),
)


def with_whole_paths(config: C) -> C:
    """Return a configuration whose model, data and registries are absolute where they are files or folders here: so a
    run can be resumed, and its model exported, from another folder.
    """
    changes: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            changes[name] = with_whole_paths(value)
        elif name in _PATHS and value:
            changes[name] = tuple(map(_whole, value)) if isinstance(value, tuple) else _whole(value)
    return config.model_copy(update={name: value for name, value in changes.items() if value != getattr(config, name)})


def _whole(value: Any) -> Any:
    return type(value)(Path(value).absolute()) if value != "starter" and Path(value).exists() else value


def write_config(config: BaseModel, path: Path) -> None:
    """Write a run's configuration as `--print-config` shows it, without what the run itself was resumed from."""
    part = path.with_suffix(".part")  # who is killed meanwhile leaves the one before
    part.write_text(dump(config, leave_out={RESUME}), encoding="utf-8")
    part.replace(path)


def read_config(path: Path) -> RunConfig:
    """Return the configuration that `write_config` wrote. Raises `UserError` where a key or value is wrong."""
    return validate(RunConfig, read_file(RunConfig, path))


def check_resumable(config: C, base: C, fixed: Sequence[FieldPath] = FIXED) -> None:
    """Raise `UserError` where `config` would make another run of the one with the configuration `base`.

    `fixed` are the sections and fields that stay as they are.

    Example: `check_resumable(RunConfig(seed=1), RunConfig())` raises "--seed: must stay as in the run, which has 0,
    got 1; leave it out of flags, files and TRUETURN_SEED, or begin a new run"; with `steps=80` nothing is raised.
    """
    fields = dict(leaves(type(config)))
    for path, (old, new) in changed(config, base).items():
        if any(path[: len(stays)] == stays for stays in fixed):
            rule = f"must stay as in the run, which has {_shown(old)}"
            fix = f"leave it out of flags, files and {LAYERS.prefix}{path[-1].upper()}, or begin a new run"
            raise UserError(flag_of(path[-1], fields[path]), rule, _shown(new), fix)


def _shown(value: object) -> object:
    return "nothing" if value in (None, "", ()) else value
