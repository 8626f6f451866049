"""Settings of a tree of pydantic models: values with their sources, mostly texts, that `validate` turns into the model.

A section is a model inside the tree. A layer of settings is what one source gives: flags, variables or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from envs.config.plugins import Plugin
from envs.errors import UserError

M = TypeVar("M", bound=BaseModel)

#: The `json_schema_extra` of a field that files and environment variables alone set.
NO_FLAG: JsonDict = {"flag": False}

#: The path of a field in the tree of sections: ("optim", "lr").
FieldPath = tuple[str, ...]


class Section(BaseModel):
    """Base of a section of settings: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Setting:
    """A value and its source.

    Example: `Setting("-1", "mine.yaml", "optim.lr").place` is "mine.yaml optim.lr".
    """

    value: Any
    source: str
    key: str = ""

    @property
    def place(self) -> str:
        """The source as errors name it."""
        return f"{self.source} {self.key}".strip()


#: The settings of a layer, or of several layers merged with `|`.
Settings = dict[FieldPath, Setting]


def leaves(model: type[BaseModel], path: FieldPath = ()) -> Iterator[tuple[FieldPath, FieldInfo]]:
    """Yield every field of the tree with its path; sections are not fields."""
    for name, field in model.model_fields.items():
        if section := section_of(field):
            yield from leaves(section, (*path, name))
        else:
            yield (*path, name), field


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section; None for other fields."""
    annotation = field.annotation
    # `list[int]` is no type for `issubclass`, which raises.
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def is_under(path: FieldPath, places: Iterable[FieldPath]) -> bool:
    """Return whether a field is one of these places, or stands in a section among them."""
    return any(path[: len(place)] == place for place in places)


def summary_of(section: type[BaseModel]) -> str:
    """Return the first line of a section's docstring."""
    return (section.__doc__ or "").strip().partition("\n")[0]


def is_tuple(field: FieldInfo) -> bool:
    """Return whether a field holds a list of values."""
    return get_origin(field.annotation) is tuple


def takes_references(annotation: Any) -> bool:
    """Return whether a field's value may name an object of the user, alone, in a tuple or in a union."""
    if get_origin(annotation) is Annotated:
        return any(isinstance(each, Plugin) for each in get_args(annotation))
    return any(map(takes_references, get_args(annotation)))


def takes_code(field: FieldInfo) -> bool:
    """Return whether a field names an object of the user, or several."""
    return takes_references(field.annotation) or any(isinstance(rule, Plugin) for rule in field.metadata)


def words_of(annotation: Any) -> list[str]:
    """Return the words of a `Literal` or an enum, of a tuple of it, or of a union of it with None or others."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(word.value) for word in annotation]
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation) if word is not None]
    if get_origin(annotation) is tuple:
        return words_of(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, UnionType):
        return []
    # None is written as an empty value, and a reference as what it names.
    kinds = [part for part in get_args(annotation) if part is not type(None) and not takes_references(part)]
    parts = [words_of(part) for part in kinds]
    # A union with a kind of free text, such as float, has no complete list of words.
    if all(parts):
        return [word for part in parts for word in part]
    return []


#: The rule of a list of which a file, a variable or Python code may give the only item by itself.
ONE_OR_MORE = BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)


def takes_one(field: FieldInfo) -> bool:
    """Return whether the only item of a list may stand without one."""
    return ONE_OR_MORE in field.metadata


def has_flag(field: FieldInfo) -> bool:
    """Return whether a command line can give a field."""
    return field.json_schema_extra != NO_FLAG


def flag_of(name: str, field: FieldInfo) -> str:
    """Return the name of a field on the command line, `--max-turns`, or `ENV` for a required `env`; else its own."""
    if not has_flag(field):
        return name
    if field.is_required():
        return name.upper()
    return "--" + name.replace("_", "-")


def values_of(config: BaseModel, path: FieldPath = ()) -> dict[FieldPath, Any]:
    """Return the value of every field of a tree by its path."""
    values: dict[FieldPath, Any] = {}
    for name, value in config:
        values |= values_of(value, (*path, name)) if isinstance(value, BaseModel) else {(*path, name): value}
    return values


def changed(config: BaseModel, base: BaseModel) -> dict[FieldPath, tuple[Any, Any]]:
    """Return the fields in which two configurations of one model differ, with the values in `base` and in `config`.

    Example: `changed(RunConfig(steps=80), RunConfig())` is `{("steps",): (50, 80)}`.
    """
    old = values_of(base)
    return {path: (old[path], value) for path, value in values_of(config).items() if value != old[path]}


def validate(model: type[M], settings: Settings) -> M:
    """Return the model with these settings, and with defaults for all other fields.

    Raises:
        UserError: a value breaks a rule. The error names the source of the value.
    """
    fields = dict(leaves(model))
    tree = dict[str, Any]()
    for path, setting in settings.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = _emptied(fields[path], setting.value)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        # pydantic names one error for each kind of a union: all of one field are one rule.
        first, *others = error.errors()
        # The place of an error may lead further, into a tuple or a union of the field.
        path = next((p for p in fields if p == first["loc"][: len(p)]), ())
        same = [first, *(each for each in others if path and each["loc"][: len(path)] == path)]
        rules = [each["msg"].replace("Input should be", "must be").replace("Value error, ", "") for each in same]
        rules[1:] = [rule.removeprefix("must be ") for rule in rules[1:]]
        rule = ", or ".join(dict.fromkeys(rules))  # of a union, the rule of each kind
        if not path:  # a rule over several fields
            raise UserError("settings", rule[:1].lower() + rule[1:], first["input"], "see --help") from None
        flag = flag_of(path[-1], fields[path])
        if first["type"] == "missing" or first["input"] in ("", None):
            got = "nothing"
        else:
            got = first["input"]
        place = settings.get(path, Setting(None, flag)).place
        fix = f"see --help ({fields[path].description})"
        raise UserError(place, rule[:1].lower() + rule[1:], got, fix) from None


def with_absolute_paths(config: M) -> M:
    """Return the configuration with absolute paths: code of an environment may change the working directory."""

    def absolute(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return with_absolute_paths(value)
        if isinstance(value, tuple):
            return tuple(map(absolute, value))
        if isinstance(value, Path):
            return value.absolute()
        return value

    changes = {name: new for name, value in config if (new := absolute(value)) != value}
    return config.model_copy(update=changes)  # the other fields stay as set or not set as they were


def _emptied(field: FieldInfo, value: Any) -> Any:
    """Return the meaning of an empty value: None if the field allows it, no items for a list, else the empty text."""
    # What a shell, a file and a variable give for nothing.
    if value in ("", None, [""], []):
        if type(None) in get_args(field.annotation):
            return None
        if is_tuple(field):
            return ()
        return ""
    return value
