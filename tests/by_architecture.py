"""What tests over all architectures share: which of them `make test` runs, and checkpoints that are made on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from agents.model.architectures import ARCHITECTURES
from tests.tiny_models import MODEL_TYPES

VISION_TYPES = tuple(name for name in MODEL_TYPES if ARCHITECTURES[name].vision)
TEXT_TYPES = tuple(name for name in MODEL_TYPES if not ARCHITECTURES[name].vision)
#: What `make test` runs of a suite that takes long: a mixture with images and DeepStack, and a text network.
QUICK_TYPES = ("qwen3_vl_moe", "qwen3")

Value = TypeVar("Value")


def all_but_two_slow(model_types: Sequence[str] = MODEL_TYPES) -> list[Any]:
    """Return the parameters of a test that takes long: every architecture, of which `make test` runs two."""
    return [pytest.param(name, marks=[] if name in QUICK_TYPES else [pytest.mark.slow]) for name in model_types]


class OnDemand(dict[str, Value]):
    """Makes each value when it is first asked for, so that a selection of tests makes only what it needs.

    Example: `OnDemand(lambda name: Case.write(folder / name, name))["llama"]` writes one checkpoint.
    """

    def __init__(self, make: Callable[[str], Value]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Value:
        self[name] = self.make(name)
        return self[name]
