"""Reads a trainer's settings from a command, a script or YAML: the names as the trainer spells them, and texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from envs.config.files import parse_yaml
from envs.errors import UserError, first_line
from trainer.translate.dialect import Given, Value
from trainer.translate.scripts import command_words, downloads

#: The largest file that is read.
MAX_BYTES = 2**18
#: The most values of a YAML file, so that one which repeats itself by aliases is left in time.
MAX_VALUES = 10_000

_OVERRIDE = re.compile(r"[+~]*([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_LAUNCHER = re.compile(r"--(?:num|nproc)[_-](?:processes|per[_-]node)")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=.*", re.DOTALL)


def read_settings(source: str) -> Given:
    """Return the settings in a file, or in the text of a command.

    Example: `read_settings("python train.py --lr 1e-6 --colocate")` is `{"lr": "1e-6", "colocate": "true"}`.

    Raises:
        UserError: the file cannot be read, or nothing in it is a setting.
    """
    file = Path(source)
    if len(source) > 4096 or "\n" in source or not file.is_file():
        if file.suffix in (".sh", ".py", ".yaml", ".yml") and " " not in source:
            raise UserError("SOURCE", "must be a file here, or a command in quotes", source, "check the path")
        return _of_command(source.replace("\\\n", " ").replace("\n", " "), Path())
    text = text_of_file(file)
    if file.suffix in (".yaml", ".yml"):
        return _of_yaml(text, source)
    return _of_command(text, file.parent)


def text_of_file(file: Path) -> str:
    """Return the text of a regular file. Raises `UserError` if there is none, or it is too large."""
    try:
        if not file.is_file():
            raise UserError(str(file), "must be a file", "none", "give a script or YAML")
        if (size := file.stat().st_size) > MAX_BYTES:
            raise UserError(str(file), f"must have at most {MAX_BYTES} bytes", size, "give a script or YAML")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(file), "must be a readable file", first_line(error), "give a script or YAML") from error


def _of_command(text: str, folder: Path) -> Given:
    words = command_words(text)
    given, folders = dict(_pairs(_arguments(words))), downloads(text)
    for file, names in _named_files(words, given):
        if found := next((path for path in (folder / file, file) if path.is_file()), None):
            for name in names:
                del given[name]
            given = {**_of_yaml(text_of_file(found), str(found)), **given}
    if not given:
        raise UserError("SOURCE", "must hold settings", text, "give a script, a command in quotes, or YAML")
    return {name: _from_hub(value, folders) if isinstance(value, str) else value for name, value in given.items()}


def _named_files(words: Sequence[str], given: Given) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the YAML files that a command may name, with the flags that name them."""
    if "config" in given:  # trl grpo --config FILE
        yield Path(str(given["config"])), ("config",)
    if "config_name" in given:  # Hydra's
        place = Path(str(given.get("config_path", ".")))
        yield place / f"{given['config_name']}.yaml", tuple({"config_path", "config_name"} & given.keys())
    for script, name in pairwise(words):  # RLinf's: bash run.sh NAME
        if script.endswith(".sh") and re.fullmatch(r"[\w.-]+", name):
            yield from ((file, ()) for file in sorted(Path(script).parent.rglob(f"{name}.yaml"))[:1])


def _arguments(words: Sequence[str]) -> list[str]:
    """Return the words after the program, with what its launcher says about processes."""
    words = list(dropwhile(_VARIABLE.fullmatch, words))
    programs = [place for place, word in enumerate(words) if _is_program(word)]
    sure = [place for place in programs if words[place] == "-m" or not place or not _takes_value(words[place - 1])]
    program = next(iter(sure[-1:] or programs), -1)
    options = (value for name, value in _pairs(words[: max(program, 0)]) if _LAUNCHER.fullmatch(f"--{name}"))
    return [*(f"--num_processes={value}" for value in options), *words[program + 1 :]]


def _is_program(word: str) -> bool:
    """Return whether a word may be a script, or announces a module."""
    return word == "-m" or (word.endswith((".py", ".sh")) and "=" not in word)


def _takes_value(word: str) -> bool:
    """Return whether the next word may be the value of a flag."""
    return word.startswith("--") and "=" not in word and word != "--"


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
    return [str(item) for item in items] if isinstance(items, list) else value


def _from_hub(value: str, folders: Mapping[str, str]) -> str:
    """Return the hub id in place of a folder that the script downloads, or of the train split in it."""
    for folder, name in folders.items():
        path = PurePosixPath(value)
        if value == folder or (path.parent == PurePosixPath(folder) and path.stem == "train"):
            return name
    return value


# YAML -----------------------------------------------------------------------------------------------------------------


def _of_yaml(text: str, place: str) -> Given:
    tree = parse_yaml(text, place)
    if not isinstance(tree, dict):
        raise UserError(place, "must be YAML with settings", tree, "give the configuration of a run")
    flat = dict(islice(_flat(tree, ""), MAX_VALUES + 1))
    if len(flat) > MAX_VALUES:
        raise UserError(place, f"must have at most {MAX_VALUES} settings", "more", "give the configuration of a run")
    return {
        name: value for name, value in ((name, _resolved(name, value, flat)) for name, value in flat.items()) if value
    }


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


def _resolved(name: str, value: Value, flat: Mapping[str, Value]) -> Value:
    """Return a value with its references to others replaced, `${a.b}`, and the sums that RLinf writes with them."""
    if isinstance(value, list):
        return value
    for _ in range(20):
        match = _REFERENCE.search(value)
        replaced = match and _reference(match[1], name, flat)
        if match is None or not isinstance(replaced, str):
            break
        value = value[: match.start()] + replaced + value[match.end() :]
    return value


_FUNCTIONS: Mapping[str, Callable[[float, float], float]] = {
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "int_div": lambda a, b: a // b,
}


def _reference(content: str, name: str, flat: Mapping[str, Value]) -> Value | None:
    function, is_function, arguments = content.partition(":")
    if is_function and function in _FUNCTIONS:
        try:
            left, right = map(float, arguments.split(","))
            return f"{_FUNCTIONS[function](left, right):g}"
        except (ValueError, ZeroDivisionError):
            return None
    return flat.get(f"{name.rpartition('.')[0]}{content}" if content.startswith(".") else content)
