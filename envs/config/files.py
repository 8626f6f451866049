"""Configuration files: reads settings from YAML that is nested like the tree of models, and writes such files.

Every scalar keeps its text in the file, and is parsed as a flag's value is: `lr: 1e-6` is a number, and `compile: off`
is the word. An empty value (`data:`) or `null` empties a setting.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from envs.config.settings import (
    FieldPath,
    Setting,
    Settings,
    is_tuple,
    leaves,
    section_of,
    summary_of,
    takes_one,
    takes_references,
    values_of,
    words_of,
)
from envs.config.text_files import read_text
from envs.config.yaml_loader import UniqueKeyLoader, load_yaml
from envs.errors import UserError, did_you_mean

#: Texts that need no quotes in any YAML reader, and words that would not be a text without quotes.
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)
OTHER_THAN_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


class _Loader(UniqueKeyLoader):
    """YAML whose scalars are texts, or None for null. A repeated key in a mapping is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"))] for first in ("~", "n", "N", "")
    }


def parse_yaml(text: str, place: str) -> Any:
    """Return the content of YAML, its scalars as texts. Raises `UserError` if it is no YAML."""
    return load_yaml(text, place, _Loader)


def read_file(model: type[BaseModel], file: Path, name: str = "") -> Settings:
    """Return the settings of a file. Errors and notes call it `name`, by default its path.

    Example: `optim: {lr: 1e-6}` gives `{("optim", "lr"): Setting("1e-6", "mine.yaml", "optim.lr")}`.

    Raises:
        UserError: the file cannot be read, or a key is unknown or in the wrong section.
    """
    try:
        text = read_text(file, name or str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(name or str(file), "must be a readable file", reason, "give an existing YAML file") from error
    name = name or str(file)
    return dict(_settings(model, model, parse_yaml(text, name), name, ()))


def _settings(
    root: type[BaseModel], model: type[BaseModel], tree: Any, file: str, path: FieldPath
) -> Iterator[tuple[FieldPath, Setting]]:
    """Yield the settings of a section, or of the whole file."""
    place = f"{file} {'.'.join(path)}".strip()
    if tree is None:  # every line of the section is commented out
        return
    if not isinstance(tree, dict):
        fix = f"write {' or '.join(list(model.model_fields)[:2])} under it"
        raise UserError(place, "must be a section with settings under it", tree, fix)
    for name, value in tree.items():
        here = (*path, str(name))
        place = f"{file} {'.'.join(here)}"
        if name not in model.model_fields:
            raise _unknown(root, model, str(name), place, path)
        field = model.model_fields[name]
        if section := section_of(field):
            yield from _settings(root, section, value, file, here)
            continue
        if is_tuple(field) and not isinstance(value, list) and value not in (None, "") and not takes_one(field):
            raise UserError(place, "must be a list", value, f"write {name}: [{value}]")
        if isinstance(value, dict | bytes) or (isinstance(value, list) and not is_tuple(field)):
            raise UserError(place, "must be one value", value, "put it in quotes if it is a text")
        yield here, Setting(value, file, ".".join(here))


def _unknown(root: type[BaseModel], model: type[BaseModel], name: str, place: str, path: FieldPath) -> UserError:
    """Return the error for an unknown key: the section that it belongs to, or the most similar key."""
    section = ".".join(path)
    # The same name under another section is the most likely mistake, as files of other trainers are flat.
    for own in (".".join(own[:-1]) for own, _ in leaves(root) if own[-1] == name):
        got = f"it under {section}" if section else "it outside of all sections"
        if own:
            return UserError(place, f"{name} belongs under {own}", got, f"write {own}: {{{name}: ...}}")
        return UserError(place, f"{name} belongs to no section", got, f"write {name}: ... at the start of a line")
    kind = f"a setting of {section}" if section else "a section or setting"
    return UserError(place, f"is not {kind}", name, did_you_mean(name, model.model_fields))


def dump(config: BaseModel, settings: Settings | None = None, leave_out: Collection[FieldPath] = ()) -> str:
    """Return a configuration as YAML that `read_file` reads back, each field under its description.

    A value that is not the default has a comment with the default, and with its source if `settings` has it.
    """
    values = {path: value for path, value in values_of(config).items() if path not in leave_out}
    return "\n".join(_lines(config, values, settings or {}, ())).strip() + "\n"


def _lines(config: BaseModel, values: dict[FieldPath, Any], settings: Settings, path: FieldPath) -> Iterator[str]:
    """Yield the lines of a section: first its own fields, then its sections."""
    pad = "  " * len(path)
    for name, field in type(config).model_fields.items():
        here = (*path, name)
        if here in values:
            yield from _comment(_description(field), pad)
            yield f"{pad}{name}: {text_of(values[here])}{_note(field, values[here], settings.get(here))}"
    for name, value in config:
        if isinstance(value, BaseModel):
            yield ""
            yield from _comment(summary_of(type(value)), pad)
            yield f"{pad}{name}:"
            yield from _lines(value, values, settings, (*path, name))


def _comment(text: str, pad: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ", break_on_hyphens=False)


def _description(field: FieldInfo) -> str:
    words = words_of(field.annotation) + ["module:NAME of your own"] * takes_references(field.annotation)
    if words:
        return f"{field.description} (one of {', '.join(words)})"
    return field.description or ""


def _note(field: FieldInfo, value: Any, setting: Setting | None) -> str:
    """Return the comment after a value; empty for the default."""
    if not field.is_required() and value == field.get_default():
        return ""
    notes = [] if field.is_required() else [f"default: {text_of(field.get_default())}"]
    notes += [f"from {setting.source}"] if setting else []
    if notes:
        return f"  # {'; '.join(notes)}"
    return ""


def text_of(value: Any) -> str:
    """Return a value as YAML, on one line."""
    if value is None or isinstance(value, int):  # bool included
        # JSON's null, true and numbers are YAML's.
        return json.dumps(value)
    if isinstance(value, float):  # 1.0e-06: YAML 1.1 reads 1e-06 as a text
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    if isinstance(value, tuple):
        return f"[{', '.join(text_of(item) for item in value)}]"
    text = str(value)
    if PLAIN.fullmatch(text) and text.lower() not in OTHER_THAN_TEXT:
        return text
    # In double quotes it stays on one line, whatever characters it holds.
    return yaml.safe_dump(text, default_style='"', width=float("inf"), allow_unicode=True).strip("\n")
