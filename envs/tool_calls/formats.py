"""One interface for both formats of tool calls: find, remove, write and detect them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from envs.safe_text import well_formed
from envs.tool_calls.hermes import read_hermes
from envs.tool_calls.qwen_xml import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, read_qwen_xml
from envs.tool_calls.types import CLOSE, OPEN, ToolCall, ToolCallError, ToolFormat

_READERS = {"hermes": read_hermes, "qwen_xml": read_qwen_xml}


def find_tool_calls(text: str, format: ToolFormat = "hermes") -> list[ToolCall | ToolCallError]:
    """Return every call of a turn in order, broken ones as `ToolCallError`; [] if there is no attempt.

    Any opening or closing tag is an attempt. More than 64 calls end with an error. No text raises, and the time is
    linear in the text. Half a surrogate pair becomes U+FFFD.

    >>> find_tool_calls('Check. <tool_call>{"name": "calc_score", "arguments": {"answer": "68"}}</tool_call>')
    [ToolCall(name='calc_score', arguments={'answer': '68'})]
    >>> find_tool_calls("<function=calc_score><parameter=answer>68</parameter></function>", "qwen_xml")
    [ToolCall(name='calc_score', arguments={'answer': '68'})]
    >>> find_tool_calls('<tool_call>{"name": 5}</tool_call> <tool_call>{"name": "f"')  # doctest: +NORMALIZE_WHITESPACE
    [ToolCallError(reason='"name" must be a string.', kind='malformed'),
     ToolCallError(reason='The JSON ends too early.', kind='truncated')]
    >>> find_tool_calls("The answer is 68.")
    []
    """
    return [_well_formed(call) for call in _READERS[format](text).found]


def _well_formed(call: ToolCall | ToolCallError) -> ToolCall | ToolCallError:
    """Replace half pairs in every text of a call, also those that its JSON escapes stand for."""
    if isinstance(call, ToolCallError):
        return replace(call, reason=well_formed(call.reason))
    return ToolCall(well_formed(call.name), json.loads(well_formed(json.dumps(call.arguments, ensure_ascii=False))))


def outside_tool_calls(text: str, format: ToolFormat = "hermes") -> str:
    """Return the text before the first call and after the last one; the whole text if there is no call.

    An unclosed call extends to the end.

    >>> outside_tool_calls("So 68. <tool_call>{}</tool_call> Done.")
    'So 68.  Done.'
    """
    calls = _READERS[format](text)
    return text[: calls.start] + text[calls.end :]


def call_example(name: str, arguments: Mapping[str, Any], format: ToolFormat) -> str:
    """Return an example of a call for an error text; `arguments` maps names to sample values.

    A Hermes call has no tags here: in a tool's answer they would look like a real call.

    >>> call_example("calc_score", {"answer": "..."}, "hermes")
    '{"name": "calc_score", "arguments": {"answer": "..."}}'
    >>> call_example("calc_score", {"answer": "..."}, "qwen_xml")
    '<function=calc_score><parameter=answer>...</parameter></function>'
    """
    if format == "hermes":
        return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    parameters = "".join(
        f"{PARAMETER}{key}>{value if isinstance(value, str) else json.dumps(value)}{PARAMETER_END}"
        for key, value in arguments.items()
    )
    return f"{FUNCTION}{name}>{parameters}{FUNCTION_END}"


def write_tool_call(call: ToolCall, format: ToolFormat) -> str:
    r"""Return a call as a model should write it, with the tags and line breaks of Qwen's templates.

    >>> write_tool_call(ToolCall("calc_score", {"answer": "68"}), "hermes")
    '<tool_call>\n{"name": "calc_score", "arguments": {"answer": "68"}}\n</tool_call>'
    >>> write_tool_call(ToolCall("f", {"a": 1}), "qwen_xml")
    '<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>'
    """
    if format == "hermes":
        return f"{OPEN}\n{call_example(call.name, call.arguments, format)}\n{CLOSE}"
    lines = [f"{FUNCTION}{call.name}>"]
    for key, value in call.arguments.items():
        if isinstance(value, str):
            text = value
        else:
            text = json.dumps(value, ensure_ascii=False)
        lines += [f"{PARAMETER}{key}>", text, PARAMETER_END]
    return "\n".join([OPEN, *lines, FUNCTION_END, CLOSE])


def detect_format(chat_template: str) -> ToolFormat:
    """Return the format that a chat template describes; Hermes if it describes none.

    >>> detect_format("Write <tool_call><function=NAME>...</function></tool_call>.")
    'qwen_xml'
    """
    # Templates of both formats hold <tool_call>; only the XML format names a function in a tag.
    if FUNCTION in chat_template:
        return "qwen_xml"
    return "hermes"
