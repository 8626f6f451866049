r"""Reads calls in the format of Qwen3-Coder, whose values are plain text, never JSON.

The format is ``<tool_call>\n<function=f>\n<parameter=a>\n68\n</parameter>\n</function>\n</tool_call>``.
"""

from __future__ import annotations

import re

from envs.tool_calls.json_call import find_bare_calls
from envs.tool_calls.types import CLOSE, MAX_CALLS, OPEN, TOO_MANY_CALLS, ToolCall, ToolCallError, TurnCalls

FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
MAX_PARAMETERS = 64

_NAME = re.compile(r"([^<>\n]*+)(>?)")

_TOO_EARLY = "The call ends too early."
_NO_FUNCTION = "A call starts with <function=NAME>."
_NO_NAME = "A name is missing or lacks its >."
_JSON = ToolCallError("Write no JSON but <function=NAME><parameter=KEY>VALUE</parameter></function>.")
_NO_PARAMETER = ToolCallError("Write each argument as <parameter=KEY>VALUE</parameter>.")
_DUPLICATE = ToolCallError("A parameter is given twice.")
_TOO_MANY_PARAMETERS = ToolCallError(f"A call has at most {MAX_PARAMETERS} parameters.")


def read_qwen_xml(text: str) -> TurnCalls:
    r"""Find the calls of a turn.

    A call begins at every ``<tool_call>``, and at every ``<function=`` outside one, except inside a parameter's value.
    ``</function>`` or ``</tool_call>`` ends it. A value extends to the first ``</parameter>``, without one line break
    at either end. If ``<parameter=`` or ``</function>`` comes first, the value was not closed and ends at the next tag.
    """
    tags = _Tags(text)
    start, tag = tags.next(0, OPEN, FUNCTION)
    if start == len(text):
        return _read_untagged(text)
    found: list[ToolCall | ToolCallError] = []
    at = end = start
    while at < len(text) and len(found) < MAX_CALLS:
        call, end = (_read_block if tag == OPEN else _read_function)(text, tags, at + len(tag))
        found.append(call)
        at, tag = tags.next(end, OPEN, FUNCTION)
    if at < len(text):
        found.append(TOO_MANY_CALLS)
        last = max(text.rfind(OPEN), text.rfind(FUNCTION))
        if text.rfind(CLOSE) < last:
            end = len(text)
        else:
            end = last
    closing = text.rfind(CLOSE)
    return TurnCalls(tuple(found), start, closing + len(CLOSE) if closing >= end else end)


class _Tags:
    """Finds the next of several tags.

    If the start positions never decrease, it reads each character once per tag, however many searches there are::

        tags = _Tags("a</function>b</tool_call>")
        tags.next(0, CLOSE, FUNCTION_END)         # (1, "</function>")
        tags.next(2, CLOSE, FUNCTION_END)         # (13, "</tool_call>")
        tags.next(14, CLOSE, FUNCTION_END)[0]     # 25, the text's length: no tag
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[str, int] = {}

    def next(self, start: int, *tags: str) -> tuple[int, str]:
        """Return (position, tag) of the first of some tags at or after `start`."""
        return min((self._find(tag, start), tag) for tag in tags)

    def _find(self, tag: str, start: int) -> int:
        at = self._known.get(tag, -1)
        if at < start:
            found = self._text.find(tag, start)
            self._known[tag] = at = found if found >= 0 else len(self._text)
        return at


def _read_block(text: str, tags: _Tags, start: int) -> tuple[ToolCall | ToolCallError, int]:
    """Return (call, end) for the text after ``<tool_call>``."""
    at, tag = tags.next(start, FUNCTION, OPEN, CLOSE)
    content = text[start:at].strip()
    if content.startswith("{"):
        return _JSON, tags.next(start, OPEN, CLOSE)[0]
    if at == len(text):
        return ToolCallError("The call is empty." if not content else _NO_FUNCTION, "truncated"), at
    if tag == FUNCTION:
        return _read_function(text, tags, at + len(FUNCTION))
    return ToolCallError("The call is empty." if not content else _NO_FUNCTION), at


def _read_function(text: str, tags: _Tags, start: int) -> tuple[ToolCall | ToolCallError, int]:
    """Return (call, end) for the text after ``<function=``."""
    name, at = _read_name(text, start)
    body = at
    problem = None if name else ToolCallError(_NO_NAME)
    arguments: dict[str, str] = {}
    num_parameters = 0
    while True:
        at, tag = tags.next(at, PARAMETER, FUNCTION_END, CLOSE, OPEN, FUNCTION)
        if at == len(text):
            return ToolCallError(_TOO_EARLY, "truncated"), at
        if tag in (OPEN, FUNCTION):
            return problem or ToolCallError(_TOO_EARLY), at
        if tag != PARAMETER:
            break
        # Each has a fixed cost, however short it is.
        if num_parameters == MAX_PARAMETERS:
            return _TOO_MANY_PARAMETERS, tags.next(at, FUNCTION_END, CLOSE)[0]
        num_parameters += 1
        key, value_start = _read_name(text, at + len(PARAMETER))
        value, at = _read_value(text, tags, value_start)
        if not key:
            problem = problem or ToolCallError(_NO_NAME)
        elif key in arguments:
            problem = problem or _DUPLICATE
        else:
            arguments[key] = value
    if not problem and num_parameters == 0 and text[body:at].strip():
        problem = _NO_PARAMETER
    return problem or ToolCall(name, arguments), at + len(tag)


def _read_name(text: str, start: int) -> tuple[str, int]:
    """Return (name, end) of a name that ``>`` ends; an empty name if there is no ``>``."""
    match = _NAME.match(text, start)
    assert match is not None, (start, len(text))
    return match[1].strip() if match[2] else "", match.end()


def _read_value(text: str, tags: _Tags, start: int) -> tuple[str, int]:
    """Return (value, end) for the text after ``<parameter=KEY>``."""
    at, tag = tags.next(start, PARAMETER_END, PARAMETER, FUNCTION_END)
    end = at + len(tag)
    # A model forgot to close the value; the next argument must not become a part of it.
    if at == len(text) or tag != PARAMETER_END:
        at, _ = tags.next(start, PARAMETER, FUNCTION_END, CLOSE, OPEN, FUNCTION)
        end = at
    return text[start:at].removeprefix("\n").removesuffix("\n"), end


def _read_untagged(text: str) -> TurnCalls:
    start, calls = find_bare_calls(text)
    if calls:
        return TurnCalls((_JSON,) * len(calls), start, len(text))
    if any(tag in text for tag in (CLOSE, FUNCTION_END, PARAMETER_END)):
        found = (ToolCallError(_NO_FUNCTION),)
    else:
        found = ()
    return TurnCalls(found, len(text), len(text))
