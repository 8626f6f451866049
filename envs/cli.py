"""Command lines from configuration models: a pydantic tree and argv in, a validated model out.

Every field of every section is one flag, `--max-turns` for `max_turns`; a required field is a positional argument.
Every error is one line that names the flag or argument.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from envs.errors import UserError, did_you_mean

M = TypeVar("M", bound=BaseModel)


class _Parser(argparse.ArgumentParser):
    """Raises `UserError` where argparse would print usage and exit."""

    argv: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        flag, _, rule = message.removeprefix("argument ").partition(":")
        raise UserError(flag.strip(), (rule or "is wrong").strip(), " ".join(self.argv), "see --help")


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield every field of the tree that is not itself a section, with its path."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, (*path, name))
        else:
            yield (*path, name), field


def parse(model: type[M], argv: Sequence[str] | None, prog: str, description: str) -> M:
    """Return the model that the flags describe. Raises `UserError` on unknown flags and broken rules."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    flags: dict[str, tuple[str, ...]] = {}
    for path, field in leaves(model):
        flag = _flag(path[-1], field)
        assert flag not in flags, f"two fields are called {flag}"
        flags[flag] = path
        _add(parser, flag, field)
    parser.argv = sys.argv[1:] if argv is None else argv
    known, unknown = parser.parse_known_args(parser.argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        raise UserError(flag, "is no flag of this command", unknown[0], _instead(model, flag, flags, vars(known)))
    given = {path: value for path in flags.values() if (value := vars(known)[path[-1]]) is not None}
    tree: dict[str, Any] = {}
    for path, value in given.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        name = next(str(part) for part in reversed(first["loc"]) if isinstance(part, str))
        field = next(field for path, field in leaves(model) if path[-1] == name)
        rule = first["msg"].replace("Input should be", "must be").replace("Value error, ", "")
        got = "nothing" if first["type"] == "missing" else first["input"]
        raise UserError(
            _flag(name, field), rule[:1].lower() + rule[1:], got, f"see --help ({field.description})"
        ) from None


def _instead(model: type[BaseModel], word: str, flags: Collection[str], given: Mapping[str, Any]) -> str:
    """Return what to write in place of a word that no flag takes."""
    fields = [(path[-1], field) for path, field in leaves(model)]
    fix = did_you_mean(word, flags)
    if fix.startswith("did"):
        return fix
    if word.startswith("-"):  # what followed an unknown flag may have been taken for the argument
        value = next((given[name] for name, field in fields if field.is_required()), None)
        return f"write {value} without {word}" if value is not None else fix
    return f"write --env {word}" if "--env" in flags and given["env"] is None else fix


def _flag(name: str, field: FieldInfo) -> str:
    return name.upper() if field.is_required() else "--" + name.replace("_", "-")


def _add(parser: argparse.ArgumentParser, flag: str, field: FieldInfo) -> None:
    if field.is_required():
        parser.add_argument(flag.lower(), metavar=flag, nargs="?", help=field.description)
        return
    default = field.get_default()
    text = f"{field.description}{_notes(field)}".replace("%", "%%")
    if field.annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif isinstance(default, tuple):
        parser.add_argument(flag, action="append", metavar="VALUE", default=None, help=text)
    else:
        parser.add_argument(flag, metavar="VALUE", default=None, help=text)


def _notes(field: FieldInfo) -> str:
    """Return in brackets what the help says besides a field's description."""
    default, words = field.get_default(), _words(field.annotation)
    notes = [f"one of {', '.join(words)}"] if words else []
    if isinstance(default, tuple):
        notes.append("give it again for more")
    if default not in ("", (), None):
        notes.append(f"default: {default}")
    elif "empty:" not in (field.description or ""):  # which says what that means
        notes.append("default: empty")
    return f" ({'; '.join(notes)})" if notes else ""


def _words(annotation: Any) -> list[str]:
    """Return the words of a `Literal`, or of a union of such, maybe with None."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation) if word is not None]
    if get_origin(annotation) not in (Union, UnionType):
        return []
    parts = [_words(part) for part in get_args(annotation) if part is not type(None)]
    return [word for part in parts for word in part] if all(parts) else []


def exit_code(main: Callable[[], int]) -> int:
    """Run a command; print a user's error as one line and return 2 for it, 130 where it was interrupted."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # where there was nothing to save yet
        print("interrupted", file=sys.stderr)
        return 130
