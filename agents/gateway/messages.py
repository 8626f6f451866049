"""Reads the conversation of a request, in the words of any of the protocols, as messages of chat completions.

The protocols differ in where calls and results stand: beside the messages (Responses), in their content (Anthropic's
messages), or in fields of their own (chat completions). Each may use the words of the others.
"""

from __future__ import annotations

from typing import Any

from agents.rollout.assistant_turn import parse_calls
from envs.errors import UserError
from envs.types import Message, bare_text

Json = dict[str, Any]
MAX_ITEMS = 10_000


def read_messages(items: object, field: str, system: object = None) -> list[Message]:
    """Return a conversation as messages, behind the `system` message if there is one.

    Content is a text, or a list of parts where there is an image, which is still a URL. Calls are `ToolCall`s.

    Example::

        call = {"type": "tool_use", "name": "f", "input": {"a": 1}}
        read_messages([{"role": "assistant", "content": [{"type": "text", "text": "So"}, call]}], "messages")
        # [{"role": "assistant", "content": "So", "tool_calls": [ToolCall("f", {"a": 1})]}]

    Raises:
        UserError: something is no part of a conversation. Names its place in `field`.
    """
    messages: list[Message] = []
    if system:
        _add(messages, "system", system, "system")
    if items:
        _add(messages, "user", items, field)
    return messages


def as_list(value: object, field: str) -> list[Json]:
    """Return a list of objects; a text is that of one part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list) and len(value) <= MAX_ITEMS and all(isinstance(item, dict) for item in value):
        return value
    raise UserError(field, f"must be a text or a list of objects, at most {MAX_ITEMS}", value, "fix the field")


def _add_message(messages: list[Message], item: Json, field: str) -> None:
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        rule = "must be one of system, developer, user, assistant, tool"
        raise UserError(f"{field}.role", rule, role, "fix the role")
    if role == "developer":
        role = "system"
    _add(messages, role, item.get("content"), f"{field}.content")
    # A client may add fields of its own, which no template knows.
    if role == "assistant":
        if item.get("function_call"):
            raise UserError(f"{field}.function_call", "must be absent", item["function_call"], "use tool_calls")
        _add_calls(messages, item.get("tool_calls"), field)
    elif isinstance(item.get("name"), str):
        messages[-1]["name"] = item["name"]


def _add(messages: list[Message], role: str, given: object, field: str) -> None:
    """Add what is said in a role. Messages, results and calls in it stand apart: the calls behind, the rest before."""
    parts: list[Json] = []
    calls: list[Json] = []
    num_before = len(messages)
    for place, part in enumerate(as_list(given or "", field)):
        here = f"{field}[{place}]"
        match part:
            case {"role": _}:
                _add_message(messages, part, here)
            case {"type": "text" | "input_text" | "output_text", "text": str() as text} | {
                "type": "refusal",
                "refusal": str() as text,
            }:
                parts.append({"type": "text", "text": text})
            case {"type": "image_url" | "input_image", "image_url": {"url": url} | url}:
                parts.append({"type": "image", "image": url, "field": here})
            case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
                parts.append({"type": "image", "image": f"data:{kind};base64,{data}", "field": here})
            case {"type": "function_call"}:
                _add_calls(messages, [part], here)
            case {"type": "tool_use"}:
                calls.append({"name": part.get("name"), "arguments": part.get("input")})
            case {"type": "function_call_output"}:
                _add(messages, "tool", part.get("output"), f"{here}.output")
            case {"type": "tool_result"}:
                _add(messages, "tool", part.get("content"), f"{here}.content")
            case {"type": "reasoning" | "thinking" | "redacted_thinking"}:
                pass  # The thoughts of a turn, which stands for itself.
            case _:
                rule = "must be a message, a text, an image as base64, a call or a result"
                raise UserError(f"{here}.type", rule, part, "leave it out")
    content: str | list[Json] = parts
    if not any("image" in part for part in parts):
        content = bare_text({"content": parts})
    elif role == "assistant":
        raise UserError(field, "must be text where the assistant speaks", "an image", "leave it out")
    if parts or len(messages) == num_before:
        messages.append({"role": role, "content": content})
    _add_calls(messages, calls, field)


def _add_calls(messages: list[Message], calls: object, field: str) -> None:
    """Add calls to the assistant's message."""
    if not calls:
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    known = messages[-1].setdefault("tool_calls", [])
    known += parse_calls({"tool_calls": calls}, field)
