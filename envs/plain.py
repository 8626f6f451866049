"""Copies what an environment returns into plain values, where it runs and its time limit acts.

Whoever keeps, compares, prints or records such a copy later runs no code of the environment: no `__repr__` that never
returns, no mapping without an end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from envs.types import well_formed

MAX_DEPTH = 32
MAX_CHARS = 10_000
#: The most values in one entry of an info, a message or the schemas of tools.
MAX_VALUES = 200_000
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
#: Packages whose objects are copied as they are, because their methods end.
_KNOWN = ("numpy", "PIL", "torch", "datetime", "decimal", "fractions", "pathlib", "uuid")


def plain(value: Any) -> Any:
    """Return a copy in plain types, which later changes do not reach; a foreign object becomes its text.

    A value that holds more than `MAX_VALUES` others becomes a text that says so: it may have no end, or a few lists
    that hold each other may stand for billions.

    >>> plain({"score": 0.5, "parts": (1, [Path])})
    {'score': 0.5, 'parts': (1, ["<class 'pathlib.Path'>"])}
    """
    try:
        return _plain(value, MAX_DEPTH, iter(range(MAX_VALUES)))
    except _TooManyValues:
        return f"(more than {MAX_VALUES} values)"


class _TooManyValues(Exception):
    """The value holds more than `MAX_VALUES` others."""


def shown(value: Any) -> str:
    """Return a value as text, at most `MAX_CHARS` characters of a `repr`; it never raises.

    Half of a surrogate pair, which JSON readers reject, becomes U+FFFD.
    """
    try:
        if isinstance(value, set | frozenset):  # in an order that is the same in every process
            return f"{{{', '.join(sorted(map(repr, value)))}}}"[:MAX_CHARS]
        return well_formed(str.__str__(value) if isinstance(value, str) else repr(value)[:MAX_CHARS])
    except Exception:  # a foreign `__repr__` raises what it likes; or the value nests too deeply for it
        return f"<{type(value).__name__} that cannot be shown>"


def _plain(value: Any, depth: int, counter: Iterator[int]) -> Any:
    if next(counter, None) is None:
        raise _TooManyValues
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth and isinstance(value, Mapping):
        return {_key(key): _plain(item, depth - 1, counter) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        parts = [_plain(item, depth - 1, counter) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if kind in (set, frozenset) and all(type(item) in _SCALARS for item in value):
        return kind(value)
    if kind.__module__.partition(".")[0] in _KNOWN and not getattr(getattr(value, "dtype", None), "hasobject", False):
        try:
            return copy.deepcopy(value)
        except Exception:  # such as a picture whose file was closed
            return shown(value)
    return shown(value)


def _key(key: Any) -> Any:
    return key if type(key) in _SCALARS else shown(key)
