"""What an environment puts into a message or an info, as JSON can hold it: nothing raises, nothing is lost unseen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image

from envs.types import well_formed

MAX_DEPTH = 32
MAX_BITS = 63
MAX_CHARS = 10_000


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return the value as JSON can hold it; what it cannot, or what nests too deeply, becomes text. Never raises.

    Half of a surrogate pair, which JSON readers refuse, becomes U+FFFD.

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
    return value if value is None or type(value) in (bool, int, float) else _text(value)


def plain_message(message: Mapping[str, Any], name_picture: Callable[[Image.Image], str]) -> dict[str, Any]:
    """Return a chat message as it is recorded: its pictures as the names that `name_picture` gives them.

    >>> plain_message({"role": "tool", "content": [{"type": "image", "image": picture}]}, lambda image: "images/1.png")
    {'role': 'tool', 'content': [{'type': 'image', 'image': 'images/1.png'}]}
    """

    def part(value: object) -> object:
        if isinstance(value, Mapping) and isinstance(value.get("image"), Image.Image):
            return {**value, "image": name_picture(value["image"])}
        return value

    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [part(each) for each in content]
    return plain({**message, "content": content})


def is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether JSON holds the value as it is, a tuple being as good as a list."""
    if isinstance(value, Mapping):
        return bool(depth) and all(
            type(key) is str and is_plain(key) and is_plain(item, depth - 1) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return bool(depth) and all(is_plain(item, depth - 1) for item in value)
    if type(value) is int:
        return value.bit_length() <= MAX_BITS
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is str:
        return well_formed(value) == value
    return value is None or type(value) is bool


def _text(value: Any) -> str:
    try:
        if isinstance(value, set | frozenset):  # in an order that is the same in every process
            return f"{{{', '.join(sorted(map(repr, value)))}}}"[:MAX_CHARS]
        return well_formed(str.__str__(value) if isinstance(value, str) else repr(value)[:MAX_CHARS])
    except Exception:  # a `__repr__` of somebody else, or a value that nests too deeply for it
        return f"<{type(value).__name__} that cannot be shown>"
