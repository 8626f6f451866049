"""Reads the `SLIME_SCRIPT_*` environment variables, with which slime's example scripts are configured."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from envs.config.commands import flag_words
from envs.config.settings import FieldPath
from envs.config.sources import ForeignVariables
from envs.errors import UserError

PREFIX = "SLIME_SCRIPT_"

#: Flags by field, or why there are none.
Counterpart = Mapping[FieldPath, str | bool] | str


def _model(name: str) -> Counterpart:
    # The scripts download a bare name from the account of Qwen.
    return {("model", "model"): name if "/" in name or Path(name).is_dir() else f"Qwen/{name}"}


def _num_gpus(count: str) -> Counterpart:
    # Their learner and their servers share all GPUs.
    return {("cluster", "num_gpus"): count, ("engine", "num_servers"): count}


def _backend(name: str) -> Counterpart:
    if name != "megatron":
        return "the learner is FSDP2, as there"
    # The scripts share matrices and tokens among four GPUs.
    return {("cluster", "backend"): name, ("cluster", "tp"): "4", ("cluster", "sp"): True}


def _external_ray(flag: str) -> Counterpart:
    if flag.lower() not in ("", "0", "false"):
        return {("cluster", "ray_address"): "auto"}
    return "Ray is started"


_COUNTERPARTS: Mapping[str, Callable[[str], Counterpart]] = {
    "MODEL_NAME": _model,
    "DATASET_NAME": lambda name: {("data", "data"): name},
    "NUM_GPUS": _num_gpus,
    "TRAIN_BACKEND": _backend,
    "EXTERNAL_RAY": _external_ray,
}


def read_slime_variables(environ: Mapping[str, str]) -> tuple[dict[str, dict[FieldPath, str | bool]], list[str]]:
    """Return the settings of each variable, and a line about each: the flags that it stands for, or why there are none.

    Example: `SLIME_SCRIPT_NUM_GPUS=4` gives `{("cluster", "num_gpus"): "4", ("engine", "num_servers"): "4"}` and the
    line "SLIME_SCRIPT_NUM_GPUS=4: --num-gpus 4 --num-servers 4".

    Raises:
        UserError: no such variable is set.
    """
    settings: dict[str, dict[FieldPath, str | bool]] = {}
    lines: list[str] = []
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX):
            continue
        convert = _COUNTERPARTS.get(name.removeprefix(PREFIX))
        if convert:
            found = convert(text)
        else:
            found = "no setting here does this"
        if isinstance(found, str):
            lines.append(f"{name}={text}: nothing is set; {found}")
            continue
        settings[name] = dict(found)
        words = [word for path, value in found.items() for word in flag_words(path[-1], value)]
        lines.append(f"{name}={text}: {shlex.join(words)}")
    if not lines:
        known = ", ".join(PREFIX + name for name in _COUNTERPARTS)
        raise UserError("--from-slime", f"needs a {PREFIX}* environment variable", "none", f"export one of {known}")
    return settings, lines


SLIME_VARIABLES = ForeignVariables(
    flag="--from-slime",
    description=f"take model, data set, GPUs and Ray from the {PREFIX}* variables of slime's example scripts",
    read=read_slime_variables,
)
