"""What an environment puts into a message or an info, as JSON can hold it: nothing raises, nothing is lost unseen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 32
MAX_BITS = 4096
MAX_CHARS = 10_000


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return the value as JSON can hold it; what it cannot, or what nests too deeply, becomes text. Never raises.

    >>> plain({"score": float("nan"), 3: (1, 2)})
    {'score': 'nan', '3': [1, 2]}
    """
    if depth and isinstance(value, Mapping):
        return {_text(key): plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    if type(value) is int and value.bit_length() > MAX_BITS:
        return _text(hex(value))
    if type(value) is float and not math.isfinite(value):
        return repr(value)
    return value if value is None or type(value) in (bool, int, float, str) else _text(value)


def is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether JSON holds the value as it is, a tuple being as good as a list."""
    if isinstance(value, Mapping):
        return bool(depth) and all(type(key) is str and is_plain(item, depth - 1) for key, item in value.items())
    if isinstance(value, list | tuple):
        return bool(depth) and all(is_plain(item, depth - 1) for item in value)
    if type(value) is int:
        return value.bit_length() <= MAX_BITS
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (bool, str)


def _text(value: Any) -> str:
    try:
        return str.__str__(value) if isinstance(value, str) else repr(value)[:MAX_CHARS]
    except Exception:  # a `__repr__` of somebody else, or a value that nests too deeply for it
        return f"<{type(value).__name__} that cannot be shown>"
