r"""Reads a call in JSON: ``{"name": "f", "arguments": {"answer": "68"}}``.

It accepts invalid JSON that models often write if the meaning is clear.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from envs.tool_calls.types import CLOSE, MAX_CALLS, OPEN, ToolCall, ToolCallError

MAX_DEPTH = 32
# Single backslashes per turn that are read as double ones.
MAX_REPAIRS = 20_000
# Calls without tags are searched in the last characters of a text, which may be decoded three times.
MAX_BARE_CHARS = 1 << 16

_BARE_CALL = re.compile(r'\{\s*+"(?:name|function)"')
_NOT_SPACE = re.compile(r"\S")
# A text that ends inside true, false, null or a negative number.
_CUT_WORD = re.compile(r"(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-)\Z")
# The first backslash of a run of odd length whose last one starts no escape; one more makes the length even.
_LONE_BACKSLASH = re.compile(r'\\(?<!\\\\)(?=(?:\\\\)*+(?![\\"/bfnrt]|u[0-9a-fA-F]{4}))')

BAD_ESCAPE = ToolCallError(r"Bad JSON: write \\ for a backslash.")
_TOO_DEEP = ToolCallError("The JSON is nested too deeply.")
_TOO_EARLY = "The JSON ends too early."


def decode(text: str, start: int = 0) -> tuple[Any, int]:
    """Return (value, end) of the JSON value at `start`, or (ToolCallError, start); text after the value is ignored.

    The decoder counts the line breaks before a fault: `start` should be small where there may be many faults.
    """
    match = _NOT_SPACE.search(text, start)
    if match is None:
        return ToolCallError("The call is empty.", "truncated"), start
    if text.startswith((OPEN, CLOSE), match.start()):
        return ToolCallError("The call is empty."), start
    try:
        return _DECODER.raw_decode(text, match.start())
    except RecursionError:
        return _TOO_DEEP, start
    except json.JSONDecodeError as error:
        return _explain(error), start
    except ValueError:
        return ToolCallError("A number is out of range."), start


def _explain(error: json.JSONDecodeError) -> ToolCallError:
    """Return the error; "truncated" if the text ends inside the value and no later tag could close it."""
    if error.msg.startswith("Invalid \\"):
        return BAD_ESCAPE
    text = error.doc
    at = error.pos
    if at >= len(text):
        return ToolCallError(_TOO_EARLY, "truncated")
    if error.msg.startswith("Unterminated"):
        is_tagged = text.find(OPEN, at) >= 0 or text.find(CLOSE, at) >= 0
        return ToolCallError(_TOO_EARLY, "malformed" if is_tagged else "truncated")
    if text.startswith((OPEN, CLOSE), at):
        return ToolCallError(_TOO_EARLY)
    return ToolCallError(f"Bad JSON: {error.msg}.", "truncated" if _CUT_WORD.match(text, at) else "malformed")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(digits)
    return value


# JSON has no NaN or Infinity; a string may hold line breaks, as models write them.
_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_finite)


def double_lone_backslashes(text: str) -> str:
    r"""Double every backslash that does not start a JSON escape.

    >>> print(double_lone_backslashes(r'"\sqrt{2} \\pi \n"'))
    "\\sqrt{2} \\pi \n"
    """
    return _LONE_BACKSLASH.sub(r"\\\\", text, count=MAX_REPAIRS)


def interpret(value: Any) -> ToolCall | ToolCallError:
    """Check the shape of a decoded call; one that was read already, or an error, is returned unchanged.

    >>> interpret({"function": {"name": "f", "arguments": '{"a": 1}'}})
    ToolCall(name='f', arguments={'a': 1})
    """
    if isinstance(value, ToolCall | ToolCallError):
        return value
    if not isinstance(value, dict):
        return ToolCallError("The call must be a JSON object.")
    value = _unwrap(value)
    name = value.get("name")
    arguments = value.get("arguments")
    if "name" not in value:
        return ToolCallError('"name" is missing.')
    if not isinstance(name, str):
        return ToolCallError('"name" must be a string.')
    if "arguments" not in value:
        return ToolCallError('"arguments" is missing.')
    if isinstance(arguments, str):
        # OpenAI's form: the arguments are a JSON text.
        arguments, _ = decode(arguments)
    if not isinstance(arguments, dict):
        return ToolCallError('"arguments" must be a JSON object.')
    if depth(arguments) <= MAX_DEPTH:
        return ToolCall(name, arguments)
    return _TOO_DEEP


def _unwrap(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function")
    if "name" not in call and isinstance(inner, dict):
        return inner
    return call


def depth(value: Any) -> int:
    """Return the nesting depth of lists and dicts, without recursion: the value may reach the interpreter's limit."""
    levels = 0
    level = [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        levels += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return levels


def find_bare_calls(text: str) -> tuple[int, list[dict[str, Any]]]:
    """Return (start, objects) of calls without opening tags at the end of a text; (its length, []) if there are none.

    An object with name and arguments counts if only closing tags, spaces and other such objects follow it. The search
    stops after `MAX_CALLS` + 1 objects.

    >>> find_bare_calls('So {"name": "f", "arguments": {}} {"name": "g", "arguments": {}}')
    (3, [{'name': 'f', 'arguments': {}}, {'name': 'g', 'arguments': {}}])
    """
    start = len(text)
    if not text.rstrip().endswith(("}", CLOSE)):  # like most answers
        return start, []
    floor = max(0, start - MAX_BARE_CHARS)
    begins = [match.start() for match in _BARE_CALL.finditer(text, floor)]
    # If the whole text is one object, it may start with another key.
    if floor == 0:
        whole = len(text) - len(text.lstrip())
    else:
        whole = start
    calls: list[dict[str, Any]] = []
    while len(calls) <= MAX_CALLS:
        body = text[floor:start].rstrip().removesuffix(CLOSE).rstrip()
        if not body.endswith("}"):
            break
        # The last two, because the inner object of {"function": {"name": ...}} looks like a call too.
        for begin in [*begins[:-3:-1], whole]:
            call = _decode_whole(body[begin - floor :])
            if call is not None:
                break
        else:
            break
        start = begin
        calls.append(call)
        while begins and begins[-1] >= start:
            begins.pop()
    return start, calls[::-1]


def _decode_whole(source: str) -> dict[str, Any] | None:
    """Return the object if the text is exactly one object with name and arguments."""
    value, end = decode(source)
    if value is BAD_ESCAPE:
        source = double_lone_backslashes(source)
        value, end = decode(source)
    if isinstance(value, dict):
        call = _unwrap(value)
    else:
        call = {}
    if end == len(source) and "name" in call and "arguments" in call:
        return value
    return None
