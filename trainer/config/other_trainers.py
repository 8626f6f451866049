"""What other trainers call the settings of ours: `other_trainers.yaml`, read when it is first asked for.

An unknown flag of theirs is answered with ours, and `trainer.translate` translates their commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

#: A row of the table: the name of ours, or how the value converts.
Row = str | Mapping[str, Any]


@dataclass(frozen=True)
class Trainer:
    """The settings of one trainer.

    `defaults` are its own where ours are not the same, `always` what every run of it does, by our names. `formulas` are
    parts of those in the rows. `backend` is the setting that names Megatron. With `are_flags` it spells `--some-flag`.
    """

    settings: Mapping[str, Row]
    defaults: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, str] = field(default_factory=dict)
    formulas: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    are_flags: bool = False

    def row(self, name: str) -> Row:
        """Return the row of a setting: its own, or that of the first pattern that fits."""
        patterns = (pattern for pattern in self.settings if "*" in pattern and fnmatchcase(name, pattern))
        # A pattern stands for settings of a section that all have the same answer.
        return self.settings.get(name) or self.settings.get(next(patterns, "")) or {"lost": "no setting here does this"}

    def spelt(self, name: str) -> str:
        """Return a setting's name as its users write it."""
        if self.are_flags:
            return f"--{name.replace('_', '-')}"
        return name

    def names(self) -> dict[str, str]:
        """Return the name of ours for each setting that has one."""
        rows = self.settings.items()
        # Rows that set several of ours name the one to answer an unknown flag with.
        own = {name: row if isinstance(row, str) else row.get("to", "") for name, row in rows}
        return {name: to for name, to in own.items() if to}


@cache
def _table() -> Mapping[str, Any]:
    # Read late: only an unknown flag or a translation needs it.
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@cache
def other_trainers() -> Mapping[str, Trainer]:
    """Return the trainers by name."""
    return {name: Trainer(**entry) for name, entry in _table()["trainers"].items()}


def other_names() -> Mapping[str, Mapping[str, str]]:
    """Return, for each trainer, the name of ours for each of its settings."""
    return {name: trainer.names() for name, trainer in other_trainers().items()}


def no_counterpart() -> Mapping[str, str]:
    """Return what is so here instead of settings that have no counterpart."""
    return _table()["no_counterpart"]
