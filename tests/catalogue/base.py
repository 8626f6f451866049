"""The sound environment that faulty ones are made of, and the row that says what is wrong with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envs import Sample, ToolEnv, tool
from envs.spec import EnvSpec

PRICES = {"apple": 3, "pear": 4, "plum": 7}
Step = tuple[dict[str, Any], bool, dict[str, Any]]
#: Limits for environments that hang.
SHORT = {"reset_timeout_s": 1.0, "step_timeout_s": 1.0}


@dataclass(frozen=True)
class Row:
    """One environment: its fault in a sentence, and the check that must tell it in a text with `word`.

    `check` is "error" where the entry or the data cannot be used at all. A remark is told by a check that passes.
    `keys` are those of the registry entry.
    """

    env: type
    fault: str
    check: str
    word: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    is_remark: bool = False

    @property
    def name(self) -> str:
        """The class of the environment."""
        return self.env.__name__

    @property
    def spec(self) -> EnvSpec:
        """The registry entry."""
        entry = {
            "id": self.name.lower(),
            "description": "catalogue",
            "max_turns": 3,
            "entry_point": f"{self.env.__module__}:{self.name}",
            "dataset": f"{__name__}:samples",
        }
        return EnvSpec.model_validate({**entry, **self.keys})


class Sound(ToolEnv):
    """What does a fruit cost? A tool tells it."""

    @tool
    def price(self, fruit: str) -> Any:
        """Return the price of a fruit."""
        return PRICES.get(fruit, "There is no such fruit.")


def samples(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place) for place in range(size)]


def make_sample(place: int, **changes: Any) -> Sample:
    """Return a sample with some of its fields replaced."""
    fruit = [*PRICES][place % 3]
    prompt = ({"role": "user", "content": f"What does one {fruit} cost?"},)
    fields = {"id": f"price-{place}", "prompt": prompt, "label": str(PRICES[fruit]), "metadata": {"fruit": fruit}}
    return Sample(**{**fields, **changes})
