"""Sources of the trainer's settings, and the `config.yaml` of a run: written, read, and checked on resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from envs.config.files import dump, read_file
from envs.config.settings import FieldPath, changed, flag_of, is_under, leaves, validate, with_absolute_paths
from envs.config.sources import PREFIX, Sources
from envs.errors import UserError
from envs.safe_text import write_text
from trainer.config.other_trainers import no_counterpart, other_names
from trainer.config.rollout import API_KEY_VARIABLE
from trainer.config.run import RunConfig

C = TypeVar("C", bound=BaseModel)

RESUME: FieldPath = ("checkpoint", "resume")
STAGES: FieldPath = ("stages",)
REPLAY: FieldPath = (*STAGES, "replay_rollouts")
#: Fields whose value may be a file or folder, or a hub id.
_PATHS = ("model", "data", "eval_data")

#: Ready configurations that `--config` finds by name.
RECIPES = Path(__file__).with_name("recipes")

#: What training on a recorded run takes from its settings: numbers and words that the learner computes with, and names
#: of its layers. Never a path, an address, a command or a module: the run may be a stranger's.
INHERITED: tuple[FieldPath, ...] = (
    ("steps",),
    ("seed",),
    ("env", "max_new_tokens"),
    ("model", "dtype"),
    ("model", "context_length"),
    *(path for path, _ in leaves(RunConfig) if path[0] == "rollout" and path[-1] not in ("sampler", "group_filter")),
    ("optim",),
    ("learner",),
    ("algorithm",),
)

#: What `python -m trainer.*` reads besides flags.
SOURCES = Sources(
    ready=RECIPES,
    resume=RESUME,
    inherit=REPLAY,
    inherited=INHERITED,
    shared=RunConfig,
    other_names=other_names,
    no_counterpart=no_counterpart,
    secrets=(API_KEY_VARIABLE,),
)

#: Its checkpoints are its own; those of Megatron are read under any layout.
BACKEND: FieldPath = ("cluster", "backend")
#: Sections and fields that must stay the same when a run is resumed. All others may change.
FIXED: tuple[FieldPath, ...] = (
    ("seed",),
    ("env",),
    ("data",),
    ("model",),
    ("rollout", "problems_per_step"),
    ("rollout", "group_size"),
    ("rollout", "top_k"),
    ("evaluation", "tools"),
    BACKEND,
    ("learner", "lora_rank"),
    ("learner", "lora_alpha"),
    ("learner", "lora_targets"),
    ("learner", "freeze_vision"),
    ("log", "out"),
    ("log", "name"),
)


def with_whole_paths(config: C) -> C:
    """Return the configuration with absolute paths, also where model and data are files or folders here.

    So a run can be resumed, and its model exported, from another folder.
    """
    config = with_absolute_paths(config)
    changes = dict[str, Any]()
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            changes[name] = with_whole_paths(value)
        elif name in _PATHS and value:
            changes[name] = _whole(value)
    return config.model_copy(update={name: value for name, value in changes.items() if value != getattr(config, name)})


def _whole(value: Any) -> Any:
    if value != "starter" and Path(value).exists():
        return type(value)(Path(value).absolute())
    return value


def write_config(config: BaseModel, path: Path) -> None:
    """Write a run's configuration as `--print-config` shows it, without `--resume`."""
    part = path.with_suffix(".part")  # a process killed while writing leaves the old file
    write_text(part, dump(config, leave_out={RESUME}))
    part.replace(path)


def read_config(path: Path) -> RunConfig:
    """Return the configuration that `write_config` wrote.

    Raises:
        UserError: a key or value is wrong, or the file was cut, which would give defaults in place of the run's values.
    """
    settings = read_file(RunConfig, path)
    *_, (last, _) = leaves(RunConfig)
    if last not in settings:
        fix = "take the file from a copy of the run folder"
        raise UserError(str(path), f"must be whole, to {'.'.join(last)}", "an earlier end", fix)
    return validate(RunConfig, settings)


def check_resumable(config: C, base: C, fixed: Sequence[FieldPath] = FIXED) -> None:
    """Raise `UserError` if `config` differs from the run's configuration `base` in a section or field of `fixed`.

    Example: `check_resumable(RunConfig(seed=1), RunConfig())` raises "--seed: must stay as in the run, which has 0,
    got 1; leave it out of flags, files and TRUETURN_SEED, or begin a new run"; `steps=80` is allowed.
    """
    fields = dict(leaves(type(config)))
    for path, (old, new) in changed(config, base).items():
        if is_under(path, fixed):
            rule = f"must stay as in the run, which has {_shown(old)}"
            fix = f"leave it out of flags, files and {PREFIX}{path[-1].upper()}, or begin a new run"
            if path == BACKEND:
                fix += " from this one's weights, --model RUN"
            raise UserError(flag_of(path[-1], fields[path]), rule, _shown(new), fix)


def _shown(value: object) -> object:
    if value in (None, "", ()):
        return "nothing"
    return value
