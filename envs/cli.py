"""Command lines from configuration models: a pydantic tree and argv in, a validated model out.

Every field of every section is one flag, `--max-turns` for `max_turns`; a required field is a positional argument, or
several where it is a tuple.
A command with `Layers` reads files and environment variables below its flags. Every error is one line that names what
gave the value: flag, argument, variable, or file and key.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from envs.config_file import dump
from envs.errors import UserError, did_you_mean
from envs.layers import Layers
from envs.settings import FieldPath, Setting, Settings, flag_of, is_tuple, leaves, validate, words_of

M = TypeVar("M", bound=BaseModel)


class _Parser(argparse.ArgumentParser):
    """Raises `UserError` where argparse would print usage and exit."""

    argv: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        flag, _, rule = message.removeprefix("argument ").partition(":")
        raise UserError(flag.strip(), (rule or "is wrong").strip(), " ".join(self.argv), "see --help")


def parse(model: type[M], argv: Sequence[str] | None, prog: str, description: str, layers: Layers | None = None) -> M:
    """Return the model that flags describe and, with `layers`, files and environment variables under them.

    Prints the resolved configuration and exits where `--print-config` asks for it.

    Raises:
        UserError: a flag, key or variable is unknown, or a value breaks a rule.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    flags: dict[str, FieldPath] = {}
    for path, field in leaves(model):
        flag = flag_of(path[-1], field)
        assert flag not in flags, f"two fields are called {flag}"
        flags[flag] = path
        _add(parser, flag, field)
    if layers:
        _add_files(parser, layers)
    parser.argv = sys.argv[1:] if argv is None else argv
    is_open = any(field.is_required() and is_tuple(field) for _, field in leaves(model))
    read = parser.parse_known_intermixed_args if is_open else parser.parse_known_args
    found, unknown = read(parser.argv)
    known = vars(found)
    if unknown:
        flag = unknown[0].split("=")[0]
        others = ("--config", "--print-config") if layers else ()
        raise UserError(flag, "is no flag of this command", unknown[0], _instead(model, flag, (*flags, *others), known))
    settings: Settings = {
        path: Setting(value, flag) for flag, path in flags.items() if (value := known[path[-1]]) not in (None, [])
    }
    if layers:
        files = layers.read_files(model, known["config"] or ())
        settings = files | layers.read_variables(model, os.environ) | settings
        settings = layers.read_base(model, settings) | settings
    config = validate(model, settings)
    if layers and known["print_config"]:
        print(dump(config, settings), end="")
        raise SystemExit(0)
    return config


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


def _add_files(parser: argparse.ArgumentParser, layers: Layers) -> None:
    """Add the flags that are no settings."""
    names = ", ".join(file.stem for file in sorted(layers.ready.glob("*.yaml")))
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help=f"YAML file of settings, or a ready configuration; flags and {layers.prefix}* variables go before it, and "
        f"a later file before an earlier one (ready: {names}; give it again for more)",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as YAML, with where they come from, and exit"
    )


def _add(parser: argparse.ArgumentParser, flag: str, field: FieldInfo) -> None:
    if field.is_required():
        nargs = "*" if is_tuple(field) else "?"
        parser.add_argument(flag.lower(), metavar=flag, nargs=nargs, help=field.description)
        return
    text = f"{field.description}{_notes(field)}".replace("%", "%%")
    if field.annotation in (bool, bool | None):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif is_tuple(field):
        parser.add_argument(flag, action="append", metavar="VALUE", default=None, help=text)
    else:
        parser.add_argument(flag, metavar="VALUE", default=None, help=text)


def _notes(field: FieldInfo) -> str:
    """Return in brackets what the help says besides a field's description."""
    default, words = field.get_default(), words_of(field.annotation)
    notes = [f"one of {', '.join(words)}"] if words else []
    if is_tuple(field):
        notes.append("give it again for more")
    if default not in ("", (), None):
        notes.append(f"default: {default}")
    elif "empty:" not in (field.description or ""):  # which says what that means
        notes.append("default: empty")
    return f" ({'; '.join(notes)})" if notes else ""


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
