"""Writes `trueturn/keywords.py`, the settings of each call for editors: `python -m tests.keywords`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

import trueturn as tt
from agents.recording.selection import SelectionConfig
from agents.replay import ReplayConfig
from agents.replaying.fork import ForkConfig
from envs.config.settings import leaves
from envs.spec import EnvSpec
from tests.paths import ROOT
from trainer.config.evaluation import EvaluateConfig
from trainer.config.inputs import DataConfig, EnvConfig
from trainer.config.run import RunConfig
from trueturn.arguments import ELSEWHERE
from trueturn.environment import ENTRY_KEYS

FILE = ROOT / "trueturn" / "keywords.py"

HEAD = '''"""The settings of each call, so that editors complete them and type checkers know their names.

Their values are checked when they are given.

Written by `python -m tests.keywords` from the configuration of the commands.
"""

from __future__ import annotations

from typing import Any, TypedDict
'''


@dataclass(frozen=True)
class Base:
    """A class whose fields others inherit."""

    name: str
    fields: Sequence[str]


NO_BASE = Base("TypedDict", [])


def settings_of(call: Callable[..., Any], *models: type[BaseModel]) -> list[str]:
    """Return the name of every setting of a call."""
    own = inspect.signature(call).parameters.keys() | getattr(call, ELSEWHERE) | {"env"}
    found = dict.fromkeys(path[-1] for model in models for path, _ in leaves(model))
    return [name for name in found if name not in own]


def classes() -> Iterator[str]:
    """Yield the code of a class for each call; what two calls share stands in their base."""
    train = settings_of(tt.train, RunConfig)
    evaluate = settings_of(tt.evaluate, EvaluateConfig)
    rollout = settings_of(tt.rollout, EvaluateConfig)
    view = settings_of(tt.view, SelectionConfig)
    entry = [name for name in settings_of(tt.env, EnvSpec) if name in ENTRY_KEYS]
    environment = ["seed", *settings_of(tt.env, EnvConfig, DataConfig)]
    played = Base("PlayKeywords", [name for name in evaluate if name in rollout])
    running = Base("RunKeywords", [name for name in train if name in played.fields])
    common = Base("EnvironmentKeywords", [name for name in environment if name in running.fields])
    shown = Base("ViewKeywords", view)
    yield typed_dict(common.name, "Environment and problems.", common.fields)
    about = "`tt.env`; those of its own are for classes and functions."
    yield typed_dict("EnvKeywords", about, list(dict.fromkeys(environment + entry)), common)
    yield typed_dict(running.name, "What training shares with `tt.rollout` and `tt.evaluate`.", running.fields, common)
    yield typed_dict("TrainKeywords", "`tt.train` and `tt.TrainConfig`.", train, running)
    yield typed_dict(played.name, "What `tt.rollout` and `tt.evaluate` share.", played.fields, running)
    yield typed_dict("RolloutKeywords", "`tt.rollout`.", rollout, played)
    yield typed_dict("EvaluateKeywords", "`tt.evaluate`.", evaluate, played)
    yield typed_dict(shown.name, "`tt.view`.", shown.fields)
    yield typed_dict("ReplayKeywords", "`tt.replay`.", settings_of(tt.replay, ReplayConfig), shown)
    yield typed_dict("ForkKeywords", "`tt.fork`.", settings_of(tt.fork, ForkConfig))


def typed_dict(name: str, about: str, fields: Sequence[str], base: Base = NO_BASE) -> str:
    """Return the code of a class with the fields that its base has not."""
    lines = [f"    {field}: Any" for field in fields if field not in base.fields]
    return "\n".join([f"class {name}({base.name}, total=False):", f'    """{about}"""', "", *lines])


def module() -> str:
    """Return the code of the module."""
    code = "\n\n\n".join([HEAD, *classes()])
    command = [sys.executable, "-m", "ruff", "format", f"--stdin-filename={FILE}", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    FILE.write_text(module(), encoding="utf-8")
