"""Turns the keywords of a call into the configuration that the command of the same name has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from pydantic import BaseModel

from envs.config.plugins import give
from envs.config.settings import Setting, Settings, changed, is_tuple, leaves, takes_code, validate
from envs.config.sources import Sources
from envs.errors import UserError, did_you_mean
from envs.spec import ENV_REWARD
from trainer.config.sources import with_whole_paths
from trueturn import rewards

M = TypeVar("M", bound=BaseModel)

#: A longer list of known names is not shown.
MAX_FIX = 400
#: Settings that name a data set, which may be a list of rows.
ROWS = ("data", "eval_data")


@runtime_checkable
class HasFolder(Protocol):
    """What has a folder with recorded episodes or a model: a `Run` or a `Rollout`."""

    @property
    def folder(self) -> Path: ...


def folder_of(recorded: HasFolder | str | Path) -> str:
    """Return the folder of recorded episodes."""
    return str(recorded if isinstance(recorded, str | Path) else recorded.folder)


def config_of(
    model: type[M], sources: Sources | None, settings: Mapping[str, Any], base: M | str | Path | None = None
) -> M:
    """Return the configuration with these settings over those of `base`: a configuration, or what `--config` takes.

    A function or class is as good as its name: `advantage=my_function`. Environment variables are not read.

    Raises:
        UserError: there is no such setting, or a value breaks a rule; the error names the keyword.
    """
    fields = {path[-1]: (path, field) for path, field in leaves(model)}
    layer: Settings = {}
    if isinstance(base, str | Path) and sources:
        layer = sources.read_files(model, [str(base)])
    elif isinstance(base, BaseModel):
        layer = {path: Setting(value, "config") for path, (_, value) in changed(base, model()).items()}
    for name, value in settings.items():
        if name not in fields:
            fix = (sources.translated(model, name) if sources else "") or did_you_mean(name, fields)
            if len(fix) > MAX_FIX:
                fix = "see help(trueturn.keywords)"
            raise UserError(f"{name}=", "is no setting of this call", value, fix)
        path, field = fields[name]
        takes_objects = takes_code(field) or name in ROWS
        layer[path] = Setting(_plain(value, takes_objects, is_tuple(field)), f"{name}=")
    layer = (sources.read_base(model, layer) if sources else {}) | layer
    return with_whole_paths(validate(model, layer))


def _plain(value: Any, takes_objects: bool, is_list: bool) -> Any:
    """Return a value as a file of settings could hold it, an object by a reference."""
    if is_list and value is not None:
        if isinstance(value, list | tuple):
            items = value
        else:
            items = [value]
        return [_plain(item, takes_objects, False) for item in items]
    if isinstance(value, Path) or (isinstance(value, HasFolder) and not takes_objects):
        return folder_of(value)  # of a run, as a model or to resume
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    if takes_objects:
        return give(value)
    return value


def weighted_rewards(functions: Sequence[Any] | Callable[..., Any] | str, weights: Sequence[float] | None) -> list[str]:
    """Return reward functions, or a single one, with their weights as `--reward` names them.

    Raises:
        UserError: there are more or fewer weights than functions.
    """
    if isinstance(functions, str) or callable(functions):
        functions = [functions]
    if weights is None:
        given = [1.0] * len(functions)
    else:
        given = list(weights)
    if len(given) != len(functions):
        rule = f"must have a weight for each of {len(functions)} functions"
        raise UserError("reward_weights=", rule, given, "give as many, or leave them out: all are 1 then")
    return [f"{_reference(function)}@{float(weight)!r}" for function, weight in zip(functions, given, strict=True)]


def _reference(function: Any) -> str:
    if isinstance(function, str):
        return function
    if function is rewards.answer:
        return ENV_REWARD
    return give(function)
