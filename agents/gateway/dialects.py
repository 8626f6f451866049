"""The protocols that agents speak: OpenAI's chat completions and Responses, and Anthropic's messages."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence

from agents.gateway.chat import Asked, Chat, Choice, Refusal
from agents.gateway.messages import Json, as_list, read_messages

#: What is translated, and what changes no token.
_RESPONSES = (
    "input",
    "instructions",
    "messages",
    "tools",
    "max_output_tokens",
    "text",
    "include",
    "reasoning",
    "truncation",
    "background",
)
_MESSAGES = ("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "cache_control")


def _rest(value: Json, *names: str) -> Json:
    """Return the fields that have other names, which chat completions may know or refuse."""
    return {name: item for name, item in value.items() if name not in names and item is not None}


class Responses(Chat):
    """OpenAI's Responses, without stored conversations."""

    path = "/v1/responses"
    ending = ""
    counts_events = True

    def read(self, body: Json) -> Json:
        """Return the body of a request as that of chat completions."""
        tools = []
        for tool in as_list(body.get("tools") or [], "tools"):
            tools.append({"type": tool.get("type"), "function": _rest(tool, "type")})
        asked = {
            "messages": read_messages(body.get("input"), "input", body.get("instructions")),
            "tools": tools,
            "max_completion_tokens": body.get("max_output_tokens"),
        }
        match body:
            case {"text": {"format": kind}}:
                asked["response_format"] = kind
        return {**asked, **_rest(body, *_RESPONSES)}

    def write(self, asked: Asked, choices: Sequence[Choice]) -> Json:
        """Return the body of a response."""
        choice = choices[0]
        status = "completed"
        details = None
        if choice.finish == "length":
            status = "incomplete"
            details = {"reason": "max_output_tokens"}
        output: list[Json] = []
        if choice.text or not choice.calls:
            output.append(
                {
                    "type": "message",
                    "id": f"msg_{secrets.token_hex(8)}",
                    "role": "assistant",
                    "status": status,
                    "content": [{"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}],
                }
            )
        for call in choice.calls:
            output.append(
                {
                    "type": "function_call",
                    "id": f"fc_{call['id']}",
                    "call_id": call["id"],
                    "status": "completed",
                    **call["function"],
                }
            )
        return {
            "id": f"resp_{secrets.token_hex(8)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": asked.model,
            "status": status,
            "incomplete_details": details,
            "error": None,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": choice.prompt_tokens,
                "input_tokens_details": {"cached_tokens": choice.cached_tokens},
                "output_tokens": choice.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": choice.prompt_tokens + choice.num_tokens,
            },
        }

    def events(self, body: Json, options: Json) -> Iterator[Json]:
        """Yield a response as the events of a stream."""
        begun = {**body, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(body["output"]):
            at = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                at["content_index"] = 0
                part = item["content"][0]
                text = part["text"]
                yield {
                    "type": "response.output_item.added",
                    "output_index": index,
                    "item": {**item, "status": "in_progress", "content": []},
                }
                yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
                yield {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []}
                yield {"type": "response.output_text.done", **at, "text": text, "logprobs": []}
                yield {"type": "response.content_part.done", **at, "part": part}
            else:
                yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "arguments": ""}}
                yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
                yield {
                    "type": "response.function_call_arguments.done",
                    **at,
                    "name": item["name"],
                    "arguments": item["arguments"],
                }
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{body['status']}", "response": body}


class Messages(Chat):
    """Anthropic's messages."""

    path = "/v1/messages"
    ending = ""

    def read(self, body: Json) -> Json:
        """Return the body of a request as that of chat completions."""
        tools = []
        for tool in as_list(body.get("tools") or [], "tools"):
            function = _rest(tool, "input_schema", "type", "cache_control")
            function["parameters"] = tool.get("input_schema")
            tools.append({"type": "function", "function": function})
        asked = {
            "messages": read_messages(body.get("messages"), "messages", body.get("system")),
            "tools": tools,
            "stop": body.get("stop_sequences"),
        }
        match body.get("tool_choice"):
            case {"type": kind, **rest}:
                asked["tool_choice"] = kind
                asked["parallel_tool_calls"] = not rest.get("disable_parallel_tool_use")
        return {**asked, **_rest(body, *_MESSAGES)}

    def write(self, asked: Asked, choices: Sequence[Choice]) -> Json:
        """Return the body of a response."""
        choice = choices[0]
        content: list[Json] = []
        if choice.text or not choice.calls:
            content.append({"type": "text", "text": choice.text})
        for call in choice.calls:
            content.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
            )
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        return {
            "id": f"msg_{secrets.token_hex(8)}",
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": content,
            "stop_reason": reasons[choice.finish],
            "stop_sequence": None,
            "usage": {
                "input_tokens": choice.prompt_tokens - choice.cached_tokens,
                "cache_read_input_tokens": choice.cached_tokens,
                "output_tokens": choice.num_tokens,
            },
        }

    def events(self, body: Json, options: Json) -> Iterator[Json]:
        """Yield a response as the events of a stream."""
        yield {"type": "message_start", "message": {**body, "content": [], "stop_reason": None}}
        for index, block in enumerate(body["content"]):
            if block["type"] == "text":
                begun = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                begun = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_start", "index": index, "content_block": begun}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": body["stop_reason"], "stop_sequence": None},
            "usage": {"output_tokens": body["usage"]["output_tokens"]},
        }
        yield {"type": "message_stop"}

    def error(self, refusal: Refusal) -> Json:
        """Return the body of a refusal."""
        error = {"type": "invalid_request_error", "message": str(refusal), "code": refusal.code}
        if refusal.code == "invalid_api_key":
            error["type"] = "authentication_error"
        return {"type": "error", "error": error}


DIALECTS = (Chat(), Responses(), Messages())
