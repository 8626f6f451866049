"""Errors that a user can fix. Every command prints such an error as one line and exits with code 2."""

from __future__ import annotations

import asyncio
import difflib
import reprlib
from collections.abc import Callable, Iterable
from pathlib import PurePath

from envs.safe_text import escape_controls

#: What code of a user may raise and a program must not take for its own end. KeyboardInterrupt is the operator's.
CODE_FAULTS = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
#: Writes out values whose whole text could be endless, such as lists that hold each other.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = 20
_SHORT.maxtuple = 20
_SHORT.maxdict = 20
_SHORT.maxset = 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 400


class UserError(Exception):
    """An input of the user is wrong: the field, the rule that it breaks, the value, and how to fix it.

    Example::

        >>> str(UserError("--max-turns", "must be at least 1", 0, "give 1 for a single-turn episode"))
        '--max-turns: must be at least 1, got 0; give 1 for a single-turn episode'
    """

    def __init__(self, field: str, rule: str, got: object, fix: str) -> None:
        self.field = field
        self.rule = rule
        self.got = got
        self.fix = fix
        text = f"{shortened(field, 200)}: {shortened(rule, 400)}, got {quoted(got, str)}; {shortened(fix, 1000)}"
        super().__init__(escape_controls(" ".join(text.split())))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, object, str]]:
        """Keep all fields when pickled; by default an exception keeps only its message."""
        return type(self), (self.field, self.rule, self.got, self.fix)


def quoted(value: object, scalar: Callable[[object], str] = repr) -> str:
    """Return a value in at most 200 characters: numbers, texts and paths as `scalar` writes them.

    Raises nothing: an integer of over 4,300 digits has no text, and a stranger's class may raise.
    """
    try:
        # `reprlib` would put quotes around a text and cut a path in its middle.
        if isinstance(value, int | float | str | PurePath):
            text = scalar(value)
        else:
            text = _SHORT.repr(value)
        return shortened(text, 200)
    except Exception:
        return f"a value of type {type(value).__name__}"


def shortened(text: str, limit: int) -> str:
    """Return the text with at most `limit` characters.

    >>> shortened("a very long name", 9)
    'a very...'
    """
    if len(text) <= limit:
        return text
    return text[: limit - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message.

    >>> first_line(ValueError("no digits\\nat line 3"))
    'ValueError: no digits'
    """
    lines = str(error).strip().splitlines()
    if lines:
        return f"{type(error).__name__}: {lines[0]}"
    return type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the fix for an unknown name: the nearest known name, or all known names. Leading dashes do not count.

    >>> did_you_mean("geo3", ["geo3k", "calculator"])
    "did you mean 'geo3k'?"
    """
    # difflib would find any two flags near for their dashes.
    bare = {word.lstrip("-"): word for word in sorted(known)}
    near = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    if near:
        return f"did you mean '{bare[near[0]]}'?"
    return f"known: {', '.join(bare.values())}"
