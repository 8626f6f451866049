"""Holds the objects that Python code gave to this process, such as a reward function of a notebook.

Settings name them as they name any other object: `envs.config.given:NAME`.
"""

from __future__ import annotations

import itertools
from typing import Any


def keep(found: Any) -> str:
    """Keep an object in this module under its own name; return the name.

    A function that a notebook defines again replaces the old one. Two different objects of one name both stay, the
    second as NAME_2.
    """
    name = getattr(found, "__name__", type(found).__name__)
    if not name.isidentifier():  # a lambda
        name = "function"
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    free = next(name for name in names if name not in _OWN and _is_free(name, found))
    globals()[free] = found
    return free


def _is_free(name: str, found: Any) -> bool:
    """Return whether a name has no object, this one, or an earlier definition of it at the top of the same module."""
    old = globals().get(name)
    if old is None or old is found:
        return True
    places = [(getattr(each, "__module__", None), getattr(each, "__qualname__", "<locals>")) for each in (found, old)]
    return places[0] == places[1] and "<" not in places[0][1]


_OWN = frozenset(globals())
