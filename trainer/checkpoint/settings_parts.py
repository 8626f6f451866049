"""The settings of each part of a run: a resume may change some, so the steps before it had others.

`settings/from-step-3.yaml` in the run folder holds from step 3 until the next such file; `config.yaml` is the newest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from envs.config.files import read_file, text_of
from envs.config.settings import FieldPath, changed, validate
from trainer.config.sources import RESUME, write_config

FOLDER = "settings"
_NAME = re.compile(r"from-step-(\d{1,9})\.yaml")

C = TypeVar("C", bound=BaseModel)


@dataclass(frozen=True)
class SettingsPart:
    """A file of settings, and the first step that had them."""

    first_step: int
    file: Path

    def read(self, model: type[C]) -> C:
        """Return the settings. Raises `UserError` where the file is not one of them."""
        return validate(model, read_file(model, self.file))


def found_parts(run: Path) -> list[SettingsPart]:
    """Return the parts of a run in the order of their steps; none for a run of an earlier version."""
    files = [(match, path) for path in (run / FOLDER).glob("*") if (match := _NAME.fullmatch(path.name))]
    return sorted((SettingsPart(int(match[1]), path) for match, path in files), key=lambda part: part.first_step)


def parts_until(run: Path, step: int) -> list[SettingsPart]:
    """Return the parts that have begun by a step, the first in any case; none where `config.yaml` holds for all."""
    parts = found_parts(run)
    if len(parts) > 1:
        return [part for part in parts if part.first_step <= max(step, 1)]
    return []


def part_file(run: Path, first_step: int) -> Path:
    """Return the file of the settings that hold from a step on."""
    return run / FOLDER / f"from-step-{first_step}.yaml"


def keep_settings(run: Path, step: int, config: BaseModel) -> list[str]:
    """Keep the settings of a run that goes on after `step`; return what it changes: "lr 1e-05 -> 1e-06 from step 3".

    Parts that begin later are removed, because their steps are taken again.
    """
    found = found_parts(run)
    before = [part for part in found if part.first_step <= step]
    for part in found[len(before) :]:
        part.file.unlink()
    if before:
        changes = settings_changes(before[-1].read(type(config)), config)
    else:
        changes = {}
    if changes or not before:
        file = part_file(run, step + 1)
        file.parent.mkdir(exist_ok=True)
        write_config(config, file)
    return [f"{path[-1]} {_shown(old)} -> {_shown(new)} from step {step + 1}" for path, (old, new) in changes.items()]


def settings_changes(old: BaseModel, new: BaseModel) -> dict[FieldPath, tuple[Any, Any]]:
    """Return the settings in which two parts of a run differ."""
    return {path: pair for path, pair in changed(new, old).items() if path != RESUME}


def history(run: Path, step: int, config: C) -> Sequence[tuple[int, C]]:
    """Return the settings of a run by the first step that had them, up to `step`; `config` where none are kept."""
    return [(part.first_step, part.read(type(config))) for part in parts_until(run, step)] or [(1, config)]


def _shown(value: object) -> str:
    if value in (None, "", ()):
        return "nothing"
    if isinstance(value, float):
        return str(value)
    return text_of(value)
