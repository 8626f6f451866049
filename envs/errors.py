"""Errors that a user can mend. Every command prints one as a single line and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user gave is wrong: which field, which rule it breaks, what was got, how to mend it.

    Example::

        >>> str(UserError("--max-turns", "must be at least 1", 0, "give 1 for a single-turn episode"))
        '--max-turns: must be at least 1, got 0; give 1 for a single-turn episode'
    """

    def __init__(self, field: str, rule: str, got: object, fix: str) -> None:
        self.field, self.rule, self.got, self.fix = field, rule, got, fix
        shown = str(got) if isinstance(got, int | float | str) else repr(got)
        shown = shown if len(shown) <= 200 else shown[:197] + "..."
        super().__init__(" ".join(f"{field}: {rule}, got {shown}; {fix}".split()))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, object, str]]:
        """Travel between processes whole: an exception is pickled by its message alone otherwise."""
        return type(self), (self.field, self.rule, self.got, self.fix)


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of what it says.

    >>> first_line(ValueError("no digits\\nat line 3"))
    'ValueError: no digits'
    """
    return f"{type(error).__name__}: {error}".split("\n")[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the fix part of an unknown-name error: the nearest known name, or all of them.

    >>> did_you_mean("geo3", ["geo3k", "calculator"])
    "did you mean 'geo3k'?"
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
