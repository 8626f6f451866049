"""Reads another trainer's settings from the flags of a command, or from YAML: names as the trainer spells them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from envs.config.files import parse_yaml
from envs.config.text_files import read_text
from envs.errors import UserError, first_line
from trainer.translate.conversion import Given, Value

#: The largest file that is read, and the most values of it: one may repeat itself by aliases.
MAX_BYTES = 2**18
MAX_VALUES = 10_000

_OVERRIDE = re.compile(r"[+~]*([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([^${}:]*)\}")
#: What RLinf computes with references.
_SUM = re.compile(r"\$\{(subtract|multiply|int_div):\s*(\d+),\s*(\d+)\}")
#: A variable that is set for the command alone.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=.*", re.DOTALL)


def read_settings(source: str) -> Given:
    """Return the settings in a YAML file, or in the text of a command.

    Example: `read_settings("train.py --lr 1e-6 --colocate")` is `{"lr": "1e-6", "colocate": "true"}`.

    Raises:
        UserError: the file cannot be read, or nothing in it is a setting.
    """
    if source.endswith((".yaml", ".yml")) and "\n" not in source and " " not in source:
        file = Path(source)
        if not file.is_file():
            raise UserError("SOURCE", "must be a file here, or a command in quotes", source, "check the path")
        try:
            return _of_yaml(read_text(file, source, MAX_BYTES), source)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(source, "must be a readable file", first_line(error), "give the YAML of a run") from error
    if source.endswith((".sh", ".py")) and " " not in source:
        raise UserError(
            "SOURCE", "must be YAML or a command in quotes", source, "give the flags that the script passes"
        )
    try:
        # A command is copied with its line breaks.
        words = shlex.split(source.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError("SOURCE", "must be a command of a shell", source, f"close the quotes ({error})") from error
    # The last one wins, as in a command line.
    given = dict(_pairs([word for word in words if not _VARIABLE.fullmatch(word)]))
    if not given:
        raise UserError("SOURCE", "must hold settings", source, "give a command in quotes, or YAML")
    return given


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, Value]]:
    """Yield name and value of each flag and override; a flag without a value is "true"."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            values = [value] if has_value else []
            while not has_value and place < len(words) and not _starts_setting(words[place]):
                values.append(words[place])
                place += 1
            yield name.replace("-", "_"), _listed(values[0], name) if len(values) == 1 else values or "true"
        elif match := _OVERRIDE.fullmatch(word):
            yield match[1], _listed(match[2], match[1])


def _starts_setting(word: str) -> bool:
    return word.startswith("--") or _OVERRIDE.fullmatch(word) is not None


def _listed(value: str, place: str) -> Value:
    """Return the items of a list that is written in brackets."""
    if not value.startswith("["):
        return value
    items = parse_yaml(value, place)
    if isinstance(items, list):
        return [str(item) for item in items]
    return value


def _of_yaml(text: str, place: str) -> Given:
    tree = parse_yaml(text, place)
    if not isinstance(tree, dict):
        raise UserError(place, "must be YAML with settings", tree, "give the configuration of a run")
    # Aliases let a small file hold more values than memory.
    flat = dict(islice(_flat(tree, ""), MAX_VALUES + 1))
    if len(flat) > MAX_VALUES:
        raise UserError(place, f"must have at most {MAX_VALUES} settings", "more", "give the configuration of a run")
    resolved = {name: _resolved(value, flat) for name, value in flat.items()}
    return {name: value for name, value in resolved.items() if value}


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Value]]:
    """Yield every value with its dotted name; empty values are left out."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list):
            yield name, [item for item in value if isinstance(item, str)]
        elif value is not None:
            yield name, str(value)


def _resolved(value: Value, flat: Mapping[str, Value]) -> Value:
    """Return a value with its references to others, `${a.b}`, replaced; a few of them may follow each other."""
    if isinstance(value, list):
        return value
    # A reference to itself would never end.
    for _ in range(5):
        value = _REFERENCE.sub(lambda match: str(flat.get(match[1], match[0])), value)[:1000]
        value = _SUM.sub(_computed, value)
    return value


def _computed(match: re.Match[str]) -> str:
    left = int(match[2])
    right = int(match[3])
    results = {"subtract": left - right, "multiply": left * right, "int_div": left // max(1, right)}
    return str(results[match[1]])
