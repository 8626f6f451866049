"""Writes `trueturn/keywords.py`, the settings of each call for editors: `python -m tests.keywords`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import trueturn as tt
from agents.recording.selection import SelectionConfig
from agents.replay import ReplayConfig
from agents.replaying.fork import ForkConfig
from envs.config.plugins import Plugin
from envs.config.settings import leaves
from envs.spec import EnvSpec
from tests.paths import ROOT
from trainer.config.evaluation import EvaluateConfig
from trainer.config.inputs import DataConfig, EnvConfig
from trainer.config.run import RunConfig
from trueturn.arguments import ELSEWHERE
from trueturn.environment import ENTRY_KEYS
from trueturn.settings import ROWS

FILE = ROOT / "trueturn" / "keywords.py"

HEAD = '''"""The settings of each call with their types, so that editors complete them and type checkers know them.

Written by `python -m tests.keywords` from the configuration of the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from envs.datasets.rows import Rows
from trueturn.settings import HasFolder

#: A file, a folder, or what has one, such as a run.
Place = str | Path | HasFolder
#: An object of yours, or where it stands: module:NAME.
Code = str | Callable[..., Any]
'''


@dataclass(frozen=True)
class Base:
    """A class whose fields others inherit."""

    name: str
    fields: Mapping[str, str]


NO_BASE = Base("TypedDict", {})


def settings_of(call: Callable[..., Any], *models: type[BaseModel]) -> dict[str, str]:
    """Return name and type of every setting of a call."""
    own = inspect.signature(call).parameters.keys() | getattr(call, ELSEWHERE)
    found = {path[-1]: field for model in models for path, field in leaves(model)}
    return {name: type_of(name, field) for name, field in found.items() if name not in own and name != "env"}


def type_of(name: str, field: FieldInfo) -> str:
    if name in ROWS:
        return "Rows | str | Path"
    if name == "model":
        return "Place"
    if name == "dataset":
        return "Code | None"
    return written(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)


def written(annotation: Any) -> str:
    """Return a type as Python code takes it: one value for a list of one, a path as text, an object for its name."""
    parts = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        return "Code" if any(isinstance(rule, Plugin) for rule in parts[1:]) else written(parts[0])
    if origin is tuple:
        return f"{written(parts[0])} | Sequence[{written(parts[0])}]"
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(written(part) for part in parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"Literal[{', '.join(repr(str(word.value)) for word in annotation)}]"
    if parts:
        return str(annotation).replace("collections.abc.", "").replace("typing.", "")
    return {Path: "Place", NoneType: "None"}.get(annotation, annotation.__name__)


def classes() -> Iterator[str]:
    """Yield the code of a class for each call; what two calls share stands in their base."""
    train = settings_of(tt.train, RunConfig)
    evaluate = settings_of(tt.evaluate, EvaluateConfig)
    rollout = settings_of(tt.rollout, EvaluateConfig)
    view = settings_of(tt.view, SelectionConfig)
    entry = {name: kind for name, kind in settings_of(tt.env, EnvSpec).items() if name in ENTRY_KEYS}
    environment = {"seed": train["seed"], **settings_of(tt.env, EnvConfig, DataConfig)}
    played = Base("PlayKeywords", {name: kind for name, kind in evaluate.items() if name in rollout})
    running = Base("RunKeywords", {name: kind for name, kind in train.items() if name in played.fields})
    common = Base("EnvironmentKeywords", {name: kind for name, kind in environment.items() if name in running.fields})
    shown = Base("ViewKeywords", view)
    yield typed_dict(common.name, "Environment and problems.", common.fields)
    about = "`tt.env`; those of its own are for classes and functions."
    yield typed_dict("EnvKeywords", about, environment | entry, common)
    yield typed_dict(running.name, "What training shares with `tt.rollout` and `tt.evaluate`.", running.fields, common)
    yield typed_dict("TrainKeywords", "`tt.train` and `tt.TrainConfig`.", train, running)
    yield typed_dict(played.name, "What `tt.rollout` and `tt.evaluate` share.", played.fields, running)
    yield typed_dict("RolloutKeywords", "`tt.rollout`.", rollout, played)
    yield typed_dict("EvaluateKeywords", "`tt.evaluate`.", evaluate, played)
    yield typed_dict(shown.name, "`tt.view`.", shown.fields)
    yield typed_dict("ReplayKeywords", "`tt.replay`.", settings_of(tt.replay, ReplayConfig), shown)
    yield typed_dict("ForkKeywords", "`tt.fork`.", settings_of(tt.fork, ForkConfig))


def typed_dict(name: str, about: str, fields: Mapping[str, str], base: Base = NO_BASE) -> str:
    """Return the code of a class with the fields that its base has not."""
    lines = [f"    {field}: {kind}" for field, kind in fields.items() if field not in base.fields]
    return "\n".join([f"class {name}({base.name}, total=False):", f'    """{about}"""', "", *lines])


def module() -> str:
    """Return the code of the module."""
    code = "\n\n\n".join([HEAD, *classes()])
    command = [sys.executable, "-m", "ruff", "format", f"--stdin-filename={FILE}", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    FILE.write_text(module(), encoding="utf-8")
