"""Environments by id: registry files come in, checked `EnvSpec`s that import their code on demand go out.

An entry names its Python objects as "module:ATTRIBUTE". Nothing is imported until a `load` method is called::

    my_env:
      entry_point: my_package.my_env          # build_env(sample, args) -> Env; ":build_env" is the default
      description: one line for the list of environments
      dataset: my_package.my_env:MySamples    # optional: (split, size, seed) -> SampleSource, used without --data
      system_prompt: my_package.my_env:PROMPT # optional: a string, goes before every prompt
      max_turns: 3
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envs.env import Env
from envs.errors import UserError, did_you_mean
from envs.types import Sample, SampleSource

PACKAGED = Path(__file__).with_name("registry.yaml")

_REFERENCE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
_ENTRY_POINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?$"
_REFERENCE_FIX = "write module:ATTRIBUTE, such as my_env:build_env"


@dataclass(frozen=True)
class EnvArgs:
    """What `build_env` gets besides its sample: the agent loop's limit of model turns, for the environment's texts."""

    max_turns: int


class BuildEnv(Protocol):
    """The entry point of an environment: a new episode for a sample."""

    def __call__(self, sample: Sample, args: EnvArgs) -> Env: ...


class MakeSamples(Protocol):
    """The built-in data set of an environment; the same arguments give the same samples."""

    def __call__(self, split: str, size: int, seed: int) -> SampleSource: ...


class EnvSpec(BaseModel):
    """One environment of the registry.

    Example::

        spec = get_spec("geo3k")
        samples = spec.load_dataset("train", size=64, seed=0)
        env = spec.load()(samples[0], EnvArgs(spec.max_turns))
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(min_length=1)
    entry_point: str = Field(pattern=_ENTRY_POINT)
    description: str
    dataset: str | None = Field(default=None, pattern=_REFERENCE)
    system_prompt: str | None = Field(default=None, pattern=_REFERENCE)
    max_turns: int = Field(ge=1)

    def load(self) -> BuildEnv:
        """Import the entry point and return its `build_env`.

        Raises:
            UserError: the module does not import (names the module and the cause), or has no such callable.
        """
        reference = self.entry_point if ":" in self.entry_point else f"{self.entry_point}:build_env"
        return self._resolve_callable("entry_point", reference)

    def load_dataset(self, split: str, size: int, seed: int) -> SampleSource:
        """Return `size` samples of the built-in data set.

        Raises:
            UserError: the entry names no data set, or one that does not import.
        """
        if self.dataset is None:
            fix = "name a data set with --data, or add `dataset` to the entry"
            raise UserError(f"environment '{self.id}'", "must have a built-in data set to run without one", "none", fix)
        make_samples: MakeSamples = self._resolve_callable("dataset", self.dataset)
        return make_samples(split=split, size=size, seed=seed)

    def load_system_prompt(self) -> str | None:
        """Return the text of the system prompt, None if the entry names none."""
        if self.system_prompt is None:
            return None
        text = self._resolve("system_prompt", self.system_prompt)
        if not isinstance(text, str):
            field = f"environment '{self.id}' system_prompt"
            raise UserError(field, f"'{self.system_prompt}' must be a string", type(text).__name__, "name a string")
        return text

    def _resolve_callable(self, field: str, reference: str) -> Any:
        found = self._resolve(field, reference)
        if not callable(found):
            rule = f"'{reference}' must be callable"
            raise UserError(f"environment '{self.id}' {field}", rule, type(found).__name__, "name a function or class")
        return found

    def _resolve(self, field: str, reference: str) -> object:
        """Import the module of "module:ATTRIBUTE" and return the attribute."""
        field = f"environment '{self.id}' {field}"
        module_name, _, attribute = reference.partition(":")
        try:
            module = importlib.import_module(module_name)
        # The module is the user's code, which may raise anything.
        except Exception as error:
            raise UserError(
                field, f"'{module_name}' must import", _cause(error), _import_fix(error, module_name)
            ) from error
        names = vars(module)
        if attribute not in names:
            public = [name for name in names if not name.startswith("_")]
            raise UserError(field, f"'{module_name}' must define it", attribute, did_you_mean(attribute, public))
        return names[attribute]


def load_registry(*overlays: Path) -> Mapping[str, EnvSpec]:
    """Return the packaged environments and those of the overlay files; a later file replaces an entry of the same id.

    Example::

        load_registry(Path("registry.yaml"))["my_env"].max_turns      # 3

    Raises:
        UserError: a file is missing or no YAML, or an entry has an unknown key, a missing one or a wrong value.
    """
    specs = {spec.id: spec for file in (PACKAGED, *overlays) for spec in _read_file(file)}
    return MappingProxyType(specs)


def get_spec(env_id: str, *overlays: Path) -> EnvSpec:
    """Return the environment of that id.

    Raises:
        UserError: there is none, or a registry file is wrong (see `load_registry`).
    """
    registry = load_registry(*overlays)
    if env_id not in registry:
        raise UserError("environment", "must be in the registry", env_id, did_you_mean(env_id, registry))
    return registry[env_id]


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice in one mapping is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read_file(file: Path) -> list[EnvSpec]:
    try:
        # A subclass of the safe loader: it builds plain values only.
        entries = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(
            str(file), "must be a readable registry file", error.strerror, "give an existing file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = str(file) if mark is None else f"{file} line {mark.line + 1}"
        got = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise UserError(where, "must be YAML", got, "mend the line") from error
    if entries is None:
        return []
    if not isinstance(entries, dict):
        raise UserError(str(file), "must map environment ids to entries", type(entries).__name__, "write my_env: {...}")
    return [_parse_entry(file, env_id, entry) for env_id, entry in entries.items()]


def _parse_entry(file: Path, env_id: object, entry: object) -> EnvSpec:
    where = f"{file} entry '{env_id}'"
    if not isinstance(env_id, str):
        raise UserError(where, "must have a text as its id", type(env_id).__name__, f'write "{env_id}": in quotes')
    known = sorted(set(EnvSpec.model_fields) - {"id"})
    if not isinstance(entry, dict):
        raise UserError(where, "must be a mapping", type(entry).__name__, f"give the keys {', '.join(known)}")
    for key in entry:
        if key not in known:
            raise UserError(where, "must have known keys only", key, did_you_mean(str(key), known))
    try:
        return EnvSpec.model_validate({"id": env_id, **entry})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise UserError(f"{where} {name}", "is required", "nothing", "add it") from error
        fix = _REFERENCE_FIX if first["type"] == "string_pattern_mismatch" else "mend the value"
        raise UserError(f"{where} {name}", first["msg"].lower(), first["input"], fix) from error


def _cause(error: Exception) -> str:
    """An import error in one line, with the place in the user's code that raised it."""
    # The first frame is ours, importlib's say nothing of the cause.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _import_fix(error: Exception, module_name: str) -> str:
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return "mend the module"
    if module_name == error.name or module_name.startswith(f"{error.name}."):
        return "check the spelling, install it, or put its folder on PYTHONPATH"
    return f"install '{error.name}', which the module imports"
