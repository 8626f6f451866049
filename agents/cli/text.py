"""Shortens text of models and environments for the terminal, and writes values as people read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agents.rollout.stream import first_difference
from envs.safe_text import escape_controls

#: Code of an environment may change the working directory later.
_BEGUN_IN = Path.cwd()


def one_line(text: str, length: int) -> str:
    """Return the text on one line of at most `length` characters; a longer text is cut and ends with "..."."""
    # Cut first: escaping a text of megabytes takes long. One more character shows that it is longer.
    text = escape_controls(text[: length + 1])
    if len(text) <= length:
        return text
    return text[: length - 3] + "..."


def excerpt(value: Any, width: int = 80, place: int = 0) -> str:
    """Return at most `width` characters of a JSON value, around the one at `place`, escaped.

    >>> excerpt({"outcome": "ok"})
    '{"outcome": "ok"}'
    """
    text = _text(value)
    # A third before the difference, two thirds after it: what follows explains more.
    start = max(0, min(place - width // 3, len(text) - width))
    cut = text[start : start + width]
    return f"{'…' if start else ''}{escape_controls(cut)}{'…' if start + width < len(text) else ''}"


def excerpt_pair(one: Any, other: Any, width: int = 80) -> tuple[str, str]:
    """Return `excerpt` of two JSON values, around the place where they first differ."""
    place = first_difference(_text(one), _text(other))
    return excerpt(one, width, place), excerpt(other, width, place)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 turn", "2 turns"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def path_text(path: Path) -> str:
    """Return a path as people read it: from the directory where the program began, if it is below that."""
    return str(path.relative_to(_BEGUN_IN) if path.is_relative_to(_BEGUN_IN) else path)
