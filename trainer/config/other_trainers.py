"""What other trainers call the settings of ours: `other_trainers.yaml`, read when an unknown flag is first given."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def _table() -> Mapping[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def other_names() -> Mapping[str, Mapping[str, str]]:
    """Return, for each trainer, the name of ours for each of its settings."""
    return _table()["names"]


def no_counterpart() -> Mapping[str, str]:
    """Return what is so here instead of settings that have no counterpart."""
    return _table()["no_counterpart"]
