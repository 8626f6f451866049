"""JSON that a browser can parse: without NaN and infinity, and without half-written lines."""

from __future__ import annotations

import json
import math
from typing import Any

JSON = dict[str, Any]


def dump(value: object) -> bytes:
    """Return compact JSON in ASCII."""
    # ASCII: half of a surrogate pair cannot be sent, but its escape can.
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def read_object(line: bytes) -> JSON | None:
    """Return a JSON object with NaN and infinity replaced by None; None if the line is not a JSON object."""
    try:
        found = json.loads(line)
        if isinstance(found, dict):
            return finite(found)
        return None
    except (ValueError, RecursionError):  # half-written, damaged, or nested too deeply to be shown
        return None


def finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinity replaced by None."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
