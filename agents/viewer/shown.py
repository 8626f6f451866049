"""Text of a model or an environment as a terminal shows it: whole or cut, on its lines or on one."""

from __future__ import annotations

import re

from agents.visible import visible

#: Of a longer text the beginning and the end are shown.
MAX_SHOWN, MAX_END = 4000, 1000
_LINE = re.compile(r"[^\n\t]+")


def visible_lines(text: str) -> str:
    r"""Return the text with what cannot be seen, or does something to a line, written out; lines and tabs stay.

    >>> visible_lines("\x1b]0;title\x07\n\u202egnp.exe caf\xe9")
    '\\x1b]0;title\\x07\n\\u202egnp.exe café'
    """
    return _LINE.sub(lambda found: visible(found[0]), text)


def one_line(text: str, length: int) -> str:
    """Return the text on one line of at most so many characters, "..." for what is left out."""
    text = visible(text[: length + 1])
    return text if len(text) <= length else text[: length - 3] + "..."


def counted(number: int, noun: str) -> str:
    """Return a number of things: "1 turn", "2 turns"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cut(text: str, full: bool) -> str:
    """Return the text as it is shown; unless all of it is wanted, a word stands for the middle of a long one."""
    if full or len(text) <= MAX_SHOWN:
        return visible_lines(text)
    note = f"[... {len(text) - MAX_SHOWN:,} characters more; --full shows them ...]"
    return f"{visible_lines(text[: MAX_SHOWN - MAX_END])}\n{note}\n{visible_lines(text[-MAX_END:])}"
