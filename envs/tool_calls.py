r"""Tool calls in a model's text (Hermes form, as Qwen writes it): text comes in, a call, an error or None goes out.

The form is ``<tool_call>{"name": "calc_score", "arguments": {"answer": "68"}}</tool_call>``. Nothing that a model can
write raises here, and the time is linear in the text.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MAX_DEPTH = 32
# How many opening tags inside the JSON strings of one call are looked through; a bound keeps the time linear.
MAX_QUOTED_TAGS = 8

_BARE_CALL = re.compile(r'\{\s*+"(?:name|function)"')
_NOT_SPACE = re.compile(r"\S")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')


@dataclass(frozen=True)
class ToolCall:
    """A call the model made: ``ToolCall(name="calc_score", arguments={"answer": "68"})``."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolCallError:
    """A call that cannot be made; `reason` is one short sentence for the model: ``The JSON ends too early.``"""

    reason: str


_TOO_DEEP = ToolCallError("The JSON is nested too deeply.")
_BAD_ESCAPE = ToolCallError(r"Bad JSON: write \\ for a backslash.")


def parse_tool_call(text: str) -> ToolCall | ToolCallError | None:
    r"""Return the last tool call of a turn, why it is none, or None where no call was attempted.

    Any opening or closing tag is an attempt. The last opening tag counts, its closing tag may be missing, and what
    follows a complete JSON value is ignored. Without tags, a JSON object with name and arguments that ends the text is
    a call too. ``{"function": {...}}`` around the call and arguments as a JSON string are accepted, and so is the
    single backslash of ``"\sqrt{2}"``, which JSON forbids.

    >>> parse_tool_call('Check. <tool_call>{"name": "calc_score", "arguments": {"answer": "68"}}</tool_call>')
    ToolCall(name='calc_score', arguments={'answer': '68'})
    >>> parse_tool_call('<tool_call>{"name": 5}</tool_call>')
    ToolCallError(reason='"name" must be a string.')
    >>> parse_tool_call("The answer is 68.") is None
    True
    """
    if OPEN in text:
        value = _decode_last_block(text)
        if value is _BAD_ESCAPE:
            value = _decode_last_block(_double_lone_backslashes(text))
        return _interpret(value)
    bare = _find_bare_call(text)
    if bare is not None:
        return _interpret(bare[1])
    return ToolCallError("The opening tag is missing.") if CLOSE in text else None


def outside_tool_calls(text: str) -> str:
    """Return what the model wrote before its first call and after its last one; the whole text where there is none.

    A call that is not closed reaches to the end.

    >>> outside_tool_calls("So 68. <tool_call>{}</tool_call> Done.")
    'So 68.  Done.'
    """
    start = text.find(OPEN)
    if start < 0:
        bare = _find_bare_call(text)
        return text if bare is None else text[: bare[0]]
    end = text.rfind(CLOSE)
    return text[:start] + (text[end + len(CLOSE) :] if end > text.rfind(OPEN) else "")


def _decode_last_block(text: str) -> Any:
    """Decode the JSON after the last opening tag, or after an earlier one if a string of that call holds the last."""
    last_tag = tag = text.rfind(OPEN)
    value, _ = _decode(text, tag + len(OPEN))
    if isinstance(value, dict):
        return value
    for _ in range(MAX_QUOTED_TAGS):
        tag = text.rfind(OPEN, 0, tag)
        if tag < 0:
            break
        enclosing, end = _decode(text, tag + len(OPEN))
        if end > last_tag:
            return enclosing
    return value


def _find_bare_call(text: str) -> tuple[int, dict[str, Any]] | None:
    """Return (start, object) of a call without opening tag that ends the text."""
    body = text.rstrip().removesuffix(CLOSE).rstrip()
    if not body.endswith("}"):
        return None
    # The last two, for the inner object of {"function": {"name": ...}} looks like a call as well.
    starts = [match.start() for match in _BARE_CALL.finditer(body)][-2:]
    first = len(body) - len(body.lstrip())
    for start in reversed([first, *starts]):
        source = body[start:]
        value, end = _decode(source, 0)
        if value is _BAD_ESCAPE:
            source = _double_lone_backslashes(source)
            value, end = _decode(source, 0)
        call = _unwrap(value) if isinstance(value, dict) else {}
        if end == len(source) and "name" in call and "arguments" in call:
            return start, value
    return None


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Return (value, end) of the JSON value that starts at or after `start`, or (ToolCallError, start)."""
    match = _NOT_SPACE.search(text, start)
    if match is None or text.startswith(CLOSE, match.start()):
        return ToolCallError("The call is empty."), start
    try:
        return _DECODER.raw_decode(text, match.start())
    except RecursionError:
        return _TOO_DEEP, start
    except json.JSONDecodeError as error:
        if error.msg.startswith("Invalid \\"):
            return _BAD_ESCAPE, start
        cut = error.pos >= len(text) or text.startswith(CLOSE, error.pos) or error.msg.startswith("Unterminated")
        return ToolCallError("The JSON ends too early." if cut else f"Bad JSON: {error.msg}."), start
    except ValueError:
        return ToolCallError("A number is out of range."), start


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(digits)
    return value


# JSON has no NaN or Infinity; a string may hold line breaks, as models write them.
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)


def _double_lone_backslashes(text: str) -> str:
    return _ESCAPE.sub(lambda match: match.group() if match.group(1) else r"\\", text)


def _unwrap(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function")
    return inner if "name" not in call and isinstance(inner, dict) else call


def _interpret(value: Any) -> ToolCall | ToolCallError:
    """Check the shape of a decoded call."""
    if isinstance(value, ToolCallError):
        return value
    if not isinstance(value, dict):
        return ToolCallError("The call must be a JSON object.")
    value = _unwrap(value)
    name, arguments = value.get("name"), value.get("arguments")
    if "name" not in value:
        return ToolCallError('"name" is missing.')
    if not isinstance(name, str):
        return ToolCallError('"name" must be a string.')
    if "arguments" not in value:
        return ToolCallError('"arguments" is missing.')
    if isinstance(arguments, str):
        arguments, _ = _decode(arguments, 0)
    if not isinstance(arguments, dict):
        return ToolCallError('"arguments" must be a JSON object.')
    return ToolCall(name, arguments) if _depth(arguments) <= MAX_DEPTH else _TOO_DEEP


def _depth(value: Any) -> int:
    """Return how deep lists and dicts nest; without recursion, as the value may nest up to the interpreter's limit."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
