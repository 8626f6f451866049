"""Settings of a tree of pydantic models: what each layer gives, as text mostly, in; one validated model out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from envs.errors import UserError

M = TypeVar("M", bound=BaseModel)

#: Where a field stands in the tree of sections: ("optim", "lr").
FieldPath = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """A value, and what gave it.

    Example: `Setting("-1", "mine.yaml", "optim.lr").place` is "mine.yaml optim.lr".
    """

    value: Any
    source: str
    key: str = ""

    @property
    def place(self) -> str:
        """What an error about the value names."""
        return f"{self.source} {self.key}".strip()


#: What a layer gives, or several that were put on one another with `|`.
Settings = dict[FieldPath, Setting]


def leaves(model: type[BaseModel], path: FieldPath = ()) -> Iterator[tuple[FieldPath, FieldInfo]]:
    """Yield every field of the tree that is not itself a section, with its path."""
    for name, field in model.model_fields.items():
        if section := section_of(field):
            yield from leaves(section, (*path, name))
        else:
            yield (*path, name), field


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section of its own."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def is_tuple(field: FieldInfo) -> bool:
    """Return whether a field holds a list of values."""
    return get_origin(field.annotation) is tuple


def words_of(annotation: Any) -> list[str]:
    """Return the words of a `Literal`, or of a union or a tuple of such, maybe with None."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation) if word is not None]
    if get_origin(annotation) is tuple:
        return words_of(get_args(annotation)[0])
    if get_origin(annotation) not in (Union, UnionType):
        return []
    parts = [words_of(part) for part in get_args(annotation) if part is not type(None)]
    return [word for part in parts for word in part] if all(parts) else []


def flag_of(name: str, field: FieldInfo) -> str:
    """Return what stands for a field on the command line: `--max-turns`, or `ENV` for a required `env`."""
    return name.upper() if field.is_required() else "--" + name.replace("_", "-")


def values_of(config: BaseModel, path: FieldPath = ()) -> dict[FieldPath, Any]:
    """Return the value of every field of a tree that is not itself a section."""
    values: dict[FieldPath, Any] = {}
    for name, value in config:
        values |= values_of(value, (*path, name)) if isinstance(value, BaseModel) else {(*path, name): value}
    return values


def changed(config: BaseModel, base: BaseModel) -> dict[FieldPath, tuple[Any, Any]]:
    """Return the fields in which two configurations of one model differ, each with its value in base and in config.

    Example: `changed(RunConfig(steps=80), RunConfig())` is `{("steps",): (50, 80)}`.
    """
    old = values_of(base)
    return {path: (old[path], value) for path, value in values_of(config).items() if value != old[path]}


def validate(model: type[M], settings: Settings) -> M:
    """Return the model with these settings, and its defaults for what none of them gives.

    Raises:
        UserError: a value breaks a rule; names what gave it.
    """
    fields, tree = dict(leaves(model)), dict[str, Any]()
    for path, setting in settings.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = _emptied(fields[path], setting.value)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        rule = first["msg"].replace("Input should be", "must be").replace("Value error, ", "")
        path = next((p for p in fields if p == first["loc"][: len(p)]), ())
        if not path:  # a rule over several fields
            raise UserError("settings", rule[:1].lower() + rule[1:], first["input"], "see --help") from None
        flag = flag_of(path[-1], fields[path])
        got = "nothing" if first["type"] == "missing" or first["input"] in ("", None) else first["input"]
        place = settings.get(path, Setting(None, flag)).place
        fix = f"see --help ({fields[path].description})"
        raise UserError(place, rule[:1].lower() + rule[1:], got, fix) from None


def _emptied(field: FieldInfo, value: Any) -> Any:
    """Return what an empty value stands for: None where a field may be that, no items for a list."""
    if value in ("", None, [""], []):
        return None if type(None) in get_args(field.annotation) else () if is_tuple(field) else ""
    return value
