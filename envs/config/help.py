"""The text of `--help` about one setting: what kind of value its flag takes, its range, and its default."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import astuple
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from envs.config.files import text_of
from envs.config.settings import is_tuple, takes_references, words_of

#: A longer list of choices stands in the description: argparse does not wrap the line of a flag and its value.
MAX_CHOICES_CHARS = 60

_SIGNS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}


class Formatter(argparse.HelpFormatter):
    """Fills the width of the terminal, and keeps a flag in one piece at the end of a line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def metavar_of(annotation: Any) -> str:
    """Return the name of the value that a flag takes: INT, FLOAT, PATH, TEXT, or the choices.

    >>> metavar_of(int | None), metavar_of(tuple[Path, ...]), metavar_of(Literal["hf", "sglang"])
    ('INT', 'PATH', '{hf,sglang}')
    """
    words = words_of(annotation) + ["MODULE:NAME"] * takes_references(annotation)
    if words:
        choices = f"{{{','.join(words)}}}" if len(words) > 1 else words[0]
        if len(choices) <= MAX_CHOICES_CHARS:
            return choices
        return "NAME"
    # `int | None` and `tuple[Path, ...]` take an INT and a PATH.
    kinds = [kind for kind in get_args(annotation) if kind not in (NoneType, ...)]
    return {int: "INT", float: "FLOAT", Path: "PATH"}.get(kinds[0] if kinds else annotation, "TEXT")


def help_of(field: FieldInfo) -> str:
    """Return the description of a setting, then its range, whether its flag can be repeated, and its default.

    Example: "problems per training step (>=1; default: 8)".
    """
    text = field.description or ""
    default = field.default
    if field.is_required():
        return text
    words = words_of(field.annotation) + ["MODULE:NAME of your own"] * takes_references(field.annotation)
    notes = [f"one of {', '.join(words)}"] if metavar_of(field.annotation) == "NAME" else []
    notes += [", ".join(bounds)] if (bounds := _bounds(field)) else []
    notes += ["repeat for more"] if is_tuple(field) else []
    if default not in ("", (), None):
        notes.append(f"default: {', '.join(map(str, default)) if isinstance(default, tuple) else text_of(default)}")
    elif "empty:" not in text:  # otherwise the description says what empty means
        notes.append("default: empty")
    if notes:
        return f"{text} ({'; '.join(notes)})"
    return text


def _bounds(field: FieldInfo) -> list[str]:
    """Return the range that pydantic checks, such as [">=0", "<1"]."""
    return [f"{_SIGNS[type(rule)]}{astuple(rule)[0]}" for rule in field.metadata if type(rule) in _SIGNS]
