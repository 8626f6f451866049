"""Text of models and environments, made safe to print: nothing in it can steer a terminal or turn a line around."""

from __future__ import annotations

import json
import re
from typing import Any

# Control characters, marks and overrides of writing direction, characters without width, halves of surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Return the text in one line, with what cannot be seen, or does something to the line, written out.

    >>> visible("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(value: Any, width: int = 80, place: int = 0) -> str:
    """Return a JSON value as a person reads it, `width` characters of it at most around the one at `place`.

    >>> shown({"outcome": "ok"})
    '{"outcome": "ok"}'
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    start = max(0, min(place - width // 3, len(text) - width))
    cut = text[start : start + width]
    return f"{'…' if start else ''}{visible(cut)}{'…' if start + width < len(text) else ''}"


def contrast(one: Any, other: Any, width: int = 80) -> tuple[str, str]:
    """Return two JSON values as a person reads them, long ones from where they differ on."""
    texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in (one, other)]
    pairs = enumerate(zip(*texts, strict=False))
    place = next((k for k, (a, b) in pairs if a != b), min(map(len, texts)))
    return shown(one, width, place), shown(other, width, place)
