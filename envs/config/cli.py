"""Command lines: turns the arguments of a command into a validated configuration, a tree of pydantic models.

Every field of every section is one flag, `--max-turns` for `max_turns`. A required field is a positional argument, and
a required tuple takes several. `--help` shows each section as a group.
A command with `Sources` also reads files and environment variables; flags override both. Every error is one line that
names where the value came from: flag, argument, variable, or file and key.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import faulthandler
import io
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from envs.config.files import dump
from envs.config.help import Formatter, help_of, metavar_of
from envs.config.settings import (
    FieldPath,
    Setting,
    Settings,
    flag_of,
    has_flag,
    is_tuple,
    leaves,
    section_of,
    summary_of,
    validate,
)
from envs.config.sources import PREFIX, Sources
from envs.errors import UserError, did_you_mean
from envs.safe_text import guard_streams

M = TypeVar("M", bound=BaseModel)

#: How `trueturn` starts a sub-command: as `sys.argv[0]` of it, such as "trueturn run".
PROGRAM = "trueturn "

#: What the extra `train` of pyproject.toml installs besides what environments need.
TRAIN_PACKAGES = frozenset({"accelerate", "matplotlib", "safetensors", "tokenizers", "torch", "transformers"})

#: The most flags that an error lists; with more of them it points to --help.
MAX_LISTED = 20


#: What people write after a switch, which takes no value.
_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})

#: Shows every flag of a command whose --help shows the first ones alone.
HELP_ALL = "--help-all"


class _Parser(argparse.ArgumentParser):
    """Raises `UserError` where argparse would print usage and exit."""

    argv: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        flag, _, rule = message.removeprefix("argument ").partition(":")
        raise UserError(flag.strip(), (rule or "is wrong").strip(), " ".join(self.argv), "see --help")

    def check_switches(self) -> None:
        """Raise `UserError` where a switch has a value: argparse would take it for an argument of the command."""
        switches = {flag: action for action in self._actions if action.nargs == 0 for flag in action.option_strings}
        for word, following in zip_longest(self.argv, self.argv[1:], fillvalue=""):
            flag, equals, value = word.partition("=")
            # A following word may also be an argument of the command, such as the id of an environment.
            if flag in switches and (equals or following.lower() in _BOOLEAN_WORDS):
                fix = f"write {' or '.join(switches[flag].option_strings)} alone"
                raise UserError(flag, "takes no value", value if equals else following, fix)


class _Once(argparse.Action):
    """Refuses a flag that is given twice, where argparse would take the last value in silence."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            got = f"{before}, then {values or option_string}"
            raise UserError(option_string, "must be given once", got, "leave one of them out")
        super().__call__(parser, namespace, values, option_string)


class _OneValue(_Once, argparse._StoreAction):
    """The value of a flag."""


class _Switch(_Once, argparse.BooleanOptionalAction):
    """A pair of flags, `--record` and `--no-record`."""


def parse(
    model: type[M],
    argv: Sequence[str] | None,
    prog: str,
    description: str,
    layers: Sources | None = None,
    first: Collection[str] = (),
) -> M:
    """Return the configuration that the flags give and, with `layers`, the files and environment variables below them.

    `--print-config` prints the resolved configuration and exits. With `first`, names of settings, `--help` shows these
    alone and `--help-all` all. Help calls the command `prog`, or by the name of
    `trueturn`'s sub-command where it runs as that.

    Raises:
        UserError: a flag, key or variable is unknown, or a value breaks a rule.
    """
    # Help and errors then show the command as it was typed.
    if argv is None and sys.argv[0].startswith(PROGRAM):
        prog = sys.argv[0]
    words = sys.argv[1:] if argv is None else argv
    parser = _parser(model, prog, description, layers, () if HELP_ALL in words else first)
    if first:
        parser.add_argument(HELP_ALL, action="help", help="show all flags and exit")
    parser.argv = words
    parser.check_switches()
    # Several arguments may stand between flags; argparse reads a single one there without help.
    takes_several = any(field.is_required() and is_tuple(field) for _, field in leaves(model))
    found, unknown = (parser.parse_known_intermixed_args if takes_several else parser.parse_known_args)(words)
    known = vars(found)
    flags = {flag_of(path[-1], field): path for path, field in leaves(model) if has_flag(field)}
    if unknown:
        flag = unknown[0].split("=")[0]
        others = ["--config", "--print-config"] if layers else []
        others += [HELP_ALL] if first else []
        fix = (layers and layers.translated(model, flag)) or _instead(model, flag, (*flags, *others), known)
        raise UserError(flag, "is no flag of this command", unknown[0], fix)
    settings: Settings = {
        path: Setting(value, flag) for flag, path in flags.items() if (value := known[path[-1]]) not in (None, [])
    }
    if not layers:
        return validate(model, settings)
    # From the lowest layer to the highest; `|` keeps the right side.
    below = layers.read_files(model, known["config"] or ())
    settings = below | layers.read_variables(model, os.environ) | settings
    # Read last, because any layer above may name the run folder, and lowest in rank.
    settings = layers.read_base(model, settings) | settings
    config = validate(model, settings)
    if known["print_config"]:
        print(dump(config, settings), end="")
        raise SystemExit(0)
    return config


def _instead(model: type[BaseModel], word: str, flags: Collection[str], given: Mapping[str, Any]) -> str:
    """Return the fix for a word that is no flag and belongs to none."""
    fields = [(path[-1], field) for path, field in leaves(model)]
    if (fix := did_you_mean(word, flags)).startswith("did"):
        return fix
    help_flag = HELP_ALL if HELP_ALL in flags else "--help"
    if len(flags) > MAX_LISTED:
        fix = f"{help_flag} lists all flags"
    if word.startswith("-"):  # argparse may have read the value of an unknown flag as the argument
        value = next((given[name] for name, field in fields if field.is_required()), None)
        if value is not None:
            return f"write {value} without {word}"
        return fix
    if "--env" in flags and given["env"] is None:
        return f"write --env {word}"
    return f"write the flag that it belongs to before it; {fix}"


def _parser(
    model: type[BaseModel], prog: str, description: str, layers: Sources | None, shown: Collection[str]
) -> _Parser:
    """Return the parser of a command, whose help shows these settings, or all if there are none."""
    # argparse would write all flags into the usage line, over a hundred.
    arguments = [flag_of(path[-1], field) for path, field in leaves(model) if field.is_required()]
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, "[FLAGS]", *arguments]),
        description=description,
        allow_abbrev=False,
        formatter_class=Formatter,
    )
    _add_section(parser, model, shown or {path[-1] for path, _ in leaves(model)})
    if layers:
        names = ", ".join(file.stem for file in sorted(layers.ready.glob("*.yaml")))
        parser.add_argument(
            "--config",
            action="append",
            metavar="FILE",
            help=f"YAML file of settings, or the name of a ready configuration; flags and {PREFIX}* variables "
            f"override it (ready: {names}; repeat for more, later files override earlier ones)",
        )
        parser.add_argument(
            "--print-config",
            action="store_true",
            help="print all settings as YAML, with where they come from, and exit",
        )
        parser.epilog = (
            "The groups are the sections of a --config file. As an environment variable, --some-flag is "
            f"{PREFIX}SOME_FLAG. Settings without a flag stand in files and variables; --print-config shows all."
        )
    return parser


def _add_section(
    parser: argparse.ArgumentParser, model: type[BaseModel], shown: Collection[str], path: FieldPath = ()
) -> None:
    """Add the flags of a section as a group under its docstring, then those of the sections in it."""
    has_shown = any(name in shown for name in model.model_fields)
    if path:
        group = parser.add_argument_group(".".join(path), summary_of(model) if has_shown else None)
    else:
        group = parser
    for name, field in model.model_fields.items():
        if section := section_of(field):
            _add_section(parser, section, shown, (*path, name))
        elif has_flag(field):
            _add(group, flag_of(name, field), field, name in shown)


def _add(group: argparse._ActionsContainer, flag: str, field: FieldInfo, is_shown: bool) -> None:
    text = help_of(field).replace("%", "%%") if is_shown else argparse.SUPPRESS
    if field.is_required():
        # Not "+" or none: a missing argument is an error of `validate`, which names it and its description.
        nargs = "*" if is_tuple(field) else "?"
        group.add_argument(flag.lower(), metavar=flag, nargs=nargs, help=text)
    elif field.annotation in (bool, bool | None):
        # No default of argparse: only a flag that was given overrides the layers below.
        group.add_argument(flag, action=_Switch, default=None, help=text)
    else:
        action = "append" if is_tuple(field) else _OneValue
        group.add_argument(flag, action=action, metavar=metavar_of(field.annotation), default=None, help=text)


#: How long code that runs at exit may take, in seconds, until it is named.
END_S = 15.0
STDERR = 2


def exit_code(main: Callable[[], int]) -> int:
    """Run a command and return its exit code: 2 after a user's error, printed as one line, and 130 after Ctrl-C.

    Whatever the command prints is escaped, to the end of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a text of anyone may hold what the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    guard_streams()
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        # Any other module is missing in code of a user or of ours, whose traceback is wanted.
        if (package := (error.name or "").partition(".")[0]) not in TRAIN_PACKAGES:
            raise
        missing = UserError("installation", f"must have {package} for this", "none", "pip install 'trueturn[train]'")
        print(f"error: {missing}", file=sys.stderr)
        return 2
    except OSError as error:  # any command, at any place, may be the first to look at a path
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"error: {UserError('path', 'is too long', str(error.filename), 'give a shorter one')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there was anything to save
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        # What was registered last runs first: it names the code that keeps the process, if a user's code at exit hangs.
        with contextlib.suppress(OSError):
            os.fstat(STDERR)  # closed by the shell, as in `2>&-`
            atexit.register(faulthandler.dump_traceback_later, END_S, file=STDERR)
