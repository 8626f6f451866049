"""The protocols that agents speak: OpenAI's chat completions and Responses, and Anthropic's messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from agents.gateway.chat import Answer, Chat, Refusal
from agents.gateway.messages import Json, as_list, read_messages


def _rest(value: Json, *names: str) -> Json:
    """Return the fields that are not translated; chat completions refuse those that they do not know."""
    return {name: item for name, item in value.items() if name not in names and item is not None}


class Responses(Chat):
    """OpenAI's Responses, without stored conversations."""

    path = "/v1/responses"
    ending = ""
    #: What is translated, and what changes no token.
    own = (
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

    def read(self, body: Json) -> Json:
        """Return the body of a request as that of chat completions."""
        items = body.get("input")
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        tools = []
        for tool in as_list(body.get("tools") or [], "tools"):
            tools.append({"type": tool.get("type"), "function": _rest(tool, "type")})
        asked = {
            "messages": read_messages(items, "input", body.get("instructions")),
            "tools": tools,
            "max_completion_tokens": body.get("max_output_tokens"),
        }
        if isinstance(body.get("text"), dict):
            asked["response_format"] = body["text"].get("format")
        return {**asked, **_rest(body, *self.own)}

    def write(self, answer: Answer) -> Json:
        """Return the body of a response."""
        choice = answer.choices[0]
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
                    "id": f"msg_{answer.id}",
                    "role": "assistant",
                    "status": status,
                    "content": [{"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}],
                }
            )
        for call in answer.calls():
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
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": answer.asked.model,
            "status": status,
            "incomplete_details": details,
            "error": None,
            "output": output,
            "parallel_tool_calls": answer.asked.parallel_tool_calls,
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

    def events(self, answer: Answer) -> Iterator[Json]:
        """Yield the response as the events of a stream."""
        for number, (kind, fields) in enumerate(self._events(self.write(answer))):
            yield {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _events(self, body: Json) -> Iterator[tuple[str, Json]]:
        begun = {**body, "status": "in_progress", "output": [], "usage": None}
        yield "created", {"response": begun}
        yield "in_progress", {"response": begun}
        for index, item in enumerate(body["output"]):
            at = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                at["content_index"] = 0
                part = item["content"][0]
                text = part["text"]
                begun = {**item, "status": "in_progress", "content": []}
                yield "output_item.added", {"output_index": index, "item": begun}
                yield "content_part.added", {**at, "part": {**part, "text": ""}}
                yield "output_text.delta", {**at, "delta": text, "logprobs": []}
                yield "output_text.done", {**at, "text": text, "logprobs": []}
                yield "content_part.done", {**at, "part": part}
            else:
                arguments = item["arguments"]
                yield "output_item.added", {"output_index": index, "item": {**item, "arguments": ""}}
                yield "function_call_arguments.delta", {**at, "delta": arguments}
                yield "function_call_arguments.done", {**at, "name": item["name"], "arguments": arguments}
            yield "output_item.done", {"output_index": index, "item": item}
        yield body["status"], {"response": body}


class Messages(Chat):
    """Anthropic's messages."""

    path = "/v1/messages"
    ending = ""
    #: What is translated, and what changes no token.
    own = ("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "cache_control")

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
            "stop": body.get("stop_sequences") or [],
        }
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            asked["tool_choice"] = choice.get("type")
            asked["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        return {**asked, **_rest(body, *self.own)}

    def write(self, answer: Answer) -> Json:
        """Return the body of a response."""
        choice = answer.choices[0]
        content: list[Json] = []
        if choice.text or not choice.calls:
            content.append({"type": "text", "text": choice.text})
        for place, call in enumerate(choice.calls):
            content.append(
                {
                    "type": "tool_use",
                    "id": f"toolu_{answer.id}-{place}",
                    "name": call.name,
                    "input": call.arguments,
                }
            )
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.asked.model,
            "content": content,
            "stop_reason": reasons[choice.finish],
            "stop_sequence": None,
            "usage": {
                "input_tokens": choice.prompt_tokens - choice.cached_tokens,
                "cache_read_input_tokens": choice.cached_tokens,
                "output_tokens": choice.num_tokens,
            },
        }

    def events(self, answer: Answer) -> Iterator[Json]:
        """Yield the response as the events of a stream."""
        body = self.write(answer)
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
        kind = "invalid_request_error"
        if refusal.code == "invalid_api_key":
            kind = "authentication_error"
        return {"type": "error", "error": {"type": kind, "message": str(refusal), "code": refusal.code}}


DIALECTS = (Chat(), Responses(), Messages())
