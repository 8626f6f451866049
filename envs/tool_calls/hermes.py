"""Reads calls in the format of most Qwen models: ``<tool_call>{"name": "f", "arguments": {"a": "68"}}</tool_call>``."""

from __future__ import annotations

import re

from envs.tool_calls.json_call import BAD_ESCAPE, decode, double_lone_backslashes, find_bare_calls, interpret
from envs.tool_calls.types import CLOSE, MAX_CALLS, OPEN, TOO_MANY_CALLS, ToolCall, ToolCallError, TurnCalls

_MAX_MARKS = 20_000
# Matches the longest prefix with at most 20,000 objects, lists and commas, which bounds the decoding time: a megabyte
# of nested lists takes 0.1 s.
_DECODABLE = re.compile(rf"(?:[^\[{{,]*+[\[{{,]){{0,{_MAX_MARKS}}}+[^\[{{,]*+")
# How far into a text `decode` may start. It avoids a copy of the text per call, and counting lines from its start.
_MAX_OFFSET = 1 << 14
_OTHER_CALL = re.compile(r"\s*+<function=")
_OTHER_HEAD = re.compile(r"<function=[^<>\n]++>")

_TOO_LARGE = ToolCallError("The call is too large.")
_NO_OPENING_TAG = ToolCallError("The opening tag is missing.")
_OTHER_FORM = ToolCallError("The call must be a JSON object.")


def read_hermes(text: str) -> TurnCalls:
    r"""Find the calls of a turn.

    A call begins at every opening tag, except tags inside an object that an earlier tag began. Its closing tag may be
    missing; text after its JSON value is ignored. Without opening tags, JSON objects with name and arguments at the end
    of the text are calls too. Also accepted: ``{"function": {...}}`` around the call, arguments as a JSON string, and
    the single backslash of ``"\sqrt{2}"``, which JSON forbids.

    The time is linear: a decoder that passes a tag is inside a string there. A second one that starts at this tag reads
    strings as structure and structure as strings from then on, and no third one can pass where these two do.
    """
    start = text.find(OPEN)
    if start < 0:
        return _read_untagged(text)
    limit = len(text)
    if limit > _MAX_MARKS:  # a shorter text cannot hold more
        decodable = _DECODABLE.match(text, start)
        assert decodable is not None, (start, limit)
        limit = decodable.end()
    rest = text[start:limit]
    at = len(OPEN)
    found: list[ToolCall | ToolCallError] = []
    is_repaired = False
    while True:
        value, end = decode(rest, at)
        if value is BAD_ESCAPE and not is_repaired:
            # Once a turn: the rest of the text is repaired with it, so the time stays linear.
            is_repaired = True
            rest = double_lone_backslashes(rest[at:])
            at = 0
            value, end = decode(rest, at)
        if not isinstance(value, dict):
            end = at
        if _OTHER_CALL.match(rest, at):
            call = _OTHER_FORM
        else:
            call = interpret(value)
        if isinstance(call, ToolCallError) and call.kind == "truncated" and limit < len(text):
            call = _TOO_LARGE
        found.append(call)
        tag = rest.find(OPEN, end)
        if tag < 0 and text.find(OPEN, limit) < 0:
            is_closed = rest.find(CLOSE, end) >= 0 or text.find(CLOSE, limit) >= 0
            break
        if tag < 0 or len(found) == MAX_CALLS:
            found.append(_TOO_LARGE if tag < 0 else TOO_MANY_CALLS)
            is_closed = text.rfind(CLOSE) > text.rfind(OPEN)
            break
        at = tag + len(OPEN)
        if at > _MAX_OFFSET:
            rest = rest[at:]
            at = 0
    return TurnCalls(tuple(found), start, text.rfind(CLOSE) + len(CLOSE) if is_closed else len(text))


def _read_untagged(text: str) -> TurnCalls:
    start, calls = find_bare_calls(text)
    if len(calls) > MAX_CALLS:
        return TurnCalls((TOO_MANY_CALLS, *map(interpret, calls[1:])), start, len(text))
    if calls:
        return TurnCalls(tuple(map(interpret, calls)), start, len(text))
    if CLOSE in text:
        return TurnCalls((_NO_OPENING_TAG,), len(text), len(text))
    head = _OTHER_HEAD.search(text)
    end = text.rfind("</function>")
    if head is not None and head.end() <= end:
        return TurnCalls((_OTHER_FORM,), head.start(), end + len("</function>"))
    return TurnCalls((), len(text), len(text))
