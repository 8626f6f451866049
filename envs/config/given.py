"""Holds the objects that Python code gave to this process, such as a reward function of a notebook.

Settings name them as they name any other object: `envs.config.given:NAME`.
"""

from __future__ import annotations

import itertools
from typing import Any


def keep(found: Any) -> str:
    """Keep an object in this module under its own name; return the name.

    A function that a notebook defines again replaces the old one. Of two different objects of one name, such as
    lambdas, both stay, the second as NAME_2.
    """
    name = getattr(found, "__name__", type(found).__name__)
    if not name.isidentifier():  # a lambda
        name = "function"
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    free = next(name for name in names if name not in _OWN and _place(globals().get(name, found)) == _place(found))
    globals()[free] = found
    return free


def _place(found: Any) -> tuple[object, ...]:
    """Return where an object is defined, which a new definition shares; an object made by code has its own place."""
    module = getattr(found, "__module__", None)
    name = getattr(found, "__qualname__", "<locals>")
    return (id(found),) if "<" in name else (module, name)


# A function of a notebook named "keep" must not replace this module's.
_OWN = frozenset(globals())
