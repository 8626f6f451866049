"""The protocols that agents speak: OpenAI's chat completions, and two more as translations to and from them.

A translation reads a request as one for chat completions, whose fields are then checked, and writes the response of
chat completions as its own. Streams are events of the finished answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.gateway import chat
from agents.gateway.chat import Asked, Choice
from envs.errors import UserError

Json = dict[str, Any]
#: The name of an event, empty where events have none, and its data.
Event = tuple[str, Json | str]


@dataclass(frozen=True)
class Dialect:
    """A protocol: `read` turns a body into that of chat completions, `write` and `events` the answer into its own."""

    path: str
    read: Callable[[Json], Json]
    write: Callable[[Asked, Sequence[Choice], str], Json]
    events: Callable[[Asked, Sequence[Choice], str], Iterator[Event]]
    error: Callable[[str, str, str | None], Json] = chat.error_body


def as_stream(events: Iterable[Event]) -> str:
    """Return events as server-sent events."""
    lines = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        lines.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
    return "".join(lines)


def _chat_events(asked: Asked, choices: Sequence[Choice], answer_id: str) -> Iterator[Event]:
    for chunk in chat.events(asked, choices, answer_id):
        yield "", chunk
    yield "", "[DONE]"


def _rest(value: Json, *names: str) -> Json:
    """Return the fields that are not translated; chat completions refuse those that they do not know."""
    return {name: item for name, item in value.items() if name not in names and item is not None}


def _list(value: object, field: str) -> list[Json]:
    """Return a list of objects; a text is that of one part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(field, "must be a text or a list of objects", value, "fix the field")
    return value


def _call(call_id: object, name: object, arguments: object) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _add_call(messages: list[Json], call: Json) -> None:
    """Add a call to the assistant's message, which other protocols keep apart from it."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


# OpenAI's Responses ---------------------------------------------------------------------------------------------------

_IGNORED = ("include", "reasoning", "truncation", "background")


def _read_responses(value: Json) -> Json:
    """Return a request for Responses as one for chat completions."""
    body = _rest(value, "input", "instructions", "tools", "tool_choice", "max_output_tokens", "text", *_IGNORED)
    messages: list[Json] = []
    if value.get("instructions"):
        messages.append({"role": "system", "content": value["instructions"]})
    given = value.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(given, "input")
    for place, item in enumerate(items):
        match item.get("type", "message"):
            case "message":
                content = item.get("content")
                if not isinstance(content, str):
                    content = [_input_part(part) for part in _list(content, f"input[{place}].content")]
                messages.append({"role": item.get("role"), "content": content})
            case "function_call":
                _add_call(messages, _call(item.get("call_id"), item.get("name"), item.get("arguments")))
            case "function_call_output":
                output = [_input_part(part) for part in _list(item.get("output"), f"input[{place}].output")]
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":  # the thoughts of a turn, which stands for itself
                pass
            case other:
                rule = "must be a message, a function_call or its output"
                raise UserError(f"input[{place}].type", rule, other, "leave the item out")
    body["messages"] = messages
    if value.get("tools"):
        tools = _list(value["tools"], "tools")
        body["tools"] = [{"type": tool.get("type"), "function": _rest(tool, "type")} for tool in tools]
    if isinstance(choice := value.get("tool_choice"), str):
        body["tool_choice"] = choice
    if value.get("max_output_tokens") is not None:
        body["max_completion_tokens"] = value["max_output_tokens"]
    if isinstance(text := value.get("text"), dict) and text.get("format"):
        body["response_format"] = text["format"]
    return body


def _input_part(part: Json) -> Json:
    if part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return part


def _write_responses(asked: Asked, choices: Sequence[Choice], answer_id: str) -> Json:
    body = chat.response(asked, choices[:1], answer_id)
    message = body["choices"][0]["message"]
    is_cut = body["choices"][0]["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    calls = message.get("tool_calls", [])
    output: list[Json] = []
    if message["content"] or not calls:
        said = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "status": status, "content": [said]}
        output.append(item)
    for call in calls:
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        output.append({**item, **call["function"]})
    usage = body["usage"]
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": body["created"],
        "model": asked.model,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _responses_events(asked: Asked, choices: Sequence[Choice], answer_id: str) -> Iterator[Event]:
    for number, (kind, fields) in enumerate(_responses_pieces(_write_responses(asked, choices, answer_id))):
        yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": number, **fields}


def _responses_pieces(body: Json) -> Iterator[tuple[str, Json]]:
    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for index, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            part = item["content"][0]
            at = {**place, "content_index": 0}
            empty = {**part, "text": ""}
            yield "output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", "content": []}}
            yield "content_part.added", {**at, "part": empty}
            yield "output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "content_part.done", {**at, "part": part}
        else:
            arguments = item["arguments"]
            yield "output_item.added", {"output_index": index, "item": {**item, "arguments": ""}}
            yield "function_call_arguments.delta", {**place, "delta": arguments}
            yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": arguments}
        yield "output_item.done", {"output_index": index, "item": item}
    yield body["status"], {"response": body}


# Anthropic's messages -------------------------------------------------------------------------------------------------


def _read_messages(value: Json) -> Json:
    """Return a request of Anthropic's as one for chat completions."""
    own = ("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "cache_control")
    body = _rest(value, *own)
    messages: list[Json] = []
    if value.get("system"):
        messages.append({"role": "system", "content": _list(value["system"], "system")})
    for place, message in enumerate(_list(value.get("messages"), "messages")):
        blocks = _list(message.get("content"), f"messages[{place}].content")
        _add_blocks(messages, message.get("role"), blocks, f"messages[{place}].content")
    body["messages"] = messages
    if value.get("tools"):
        body["tools"] = [_anthropic_tool(tool) for tool in _list(value["tools"], "tools")]
    choice = value.get("tool_choice")
    if isinstance(choice, dict):
        body["tool_choice"] = "none" if choice.get("type") == "none" else "auto"
        if choice.get("disable_parallel_tool_use"):
            body["parallel_tool_calls"] = False
    if value.get("stop_sequences"):
        body["stop"] = value["stop_sequences"]
    return body


def _anthropic_tool(tool: Json) -> Json:
    function = {**_rest(tool, "input_schema", "type", "cache_control"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}


def _add_blocks(messages: list[Json], role: object, blocks: Sequence[Json], field: str) -> None:
    """Add the blocks of a message: results of tools and calls apart from its own content."""
    content: list[Json] = []
    calls: list[Json] = []
    for place, block in enumerate(blocks):
        match block.get("type"):
            case "text":
                content.append({"type": "text", "text": block.get("text")})
            case "image":
                content.append(_image_block(block, f"{field}[{place}]"))
            case "tool_use":
                calls.append(_call(block.get("id"), block.get("name"), block.get("input")))
            case "tool_result":
                inner: list[Json] = []
                _add_blocks(inner, "tool", _list(block.get("content") or "", f"{field}[{place}].content"), field)
                messages += inner
            case "thinking" | "redacted_thinking":  # the thoughts of a turn, which stands for itself
                pass
            case other:
                raise UserError(f"{field}[{place}].type", "must be text, image or of a tool", other, "leave it out")
    if content or not any(block.get("type") == "tool_result" for block in blocks):
        messages.append({"role": role, "content": content})
    for call in calls:
        _add_call(messages, call)


def _image_block(block: Json, field: str) -> Json:
    match block.get("source"):
        case {"type": "base64", "media_type": str() as kind, "data": str() as data}:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case other:
            raise UserError(f"{field}.source", "must hold the image as base64", other, "send the image itself")


_STOP_REASONS: Mapping[str, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _write_messages(asked: Asked, choices: Sequence[Choice], answer_id: str) -> Json:
    choice = choices[0]
    content: list[Json] = []
    if choice.text or not choice.calls:
        content.append({"type": "text", "text": choice.text})
    for place, call in enumerate(choice.calls):
        block = {"type": "tool_use", "id": f"toolu_{answer_id}-{place}", "name": call.name, "input": call.arguments}
        content.append(block)
    cached = choice.cached_tokens
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": content,
        "stop_reason": _STOP_REASONS[choice.finish],
        "stop_sequence": None,
        "usage": {
            "input_tokens": choice.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": len(choice.tokens),
        },
    }


def _messages_events(asked: Asked, choices: Sequence[Choice], answer_id: str) -> Iterator[Event]:
    for kind, fields in _messages_pieces(_write_messages(asked, choices, answer_id)):
        yield kind, {"type": kind, **fields}


def _messages_pieces(body: Json) -> Iterator[tuple[str, Json]]:
    yield "message_start", {"message": {**body, "content": [], "stop_reason": None}}
    for index, block in enumerate(body["content"]):
        if block["type"] == "text":
            begun = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield "content_block_start", {"index": index, "content_block": begun}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    end = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"delta": end, "usage": {"output_tokens": body["usage"]["output_tokens"]}}
    yield "message_stop", {}


def _messages_error(message: str, code: str, param: str | None = None) -> Json:
    kind = "authentication_error" if code == "invalid_api_key" else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


DIALECTS = (
    Dialect("/v1/chat/completions", lambda body: body, chat.response, _chat_events),
    Dialect("/v1/responses", _read_responses, _write_responses, _responses_events),
    Dialect("/v1/messages", _read_messages, _write_messages, _messages_events, _messages_error),
)
