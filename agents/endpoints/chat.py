"""Translates between our chat messages and those of an OpenAI-compatible server, and checks what a server answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from envs.tool_calls import ToolCall, ToolFormat, write_tool_call
from envs.tool_calls.types import CLOSE, OPEN
from envs.types import Message, bare_text, message_images, openai_message

#: The answer under a call where the environment has answered all calls of a turn at once.
SEE_LAST = "(see the last result)"


class EndpointFault(Exception):
    """A server has given no usable answer; the message says why. It ends the episode as `aborted`."""


@dataclass(frozen=True)
class Answer:
    """One turn of a server's model.

    `text` is the turn as environments read it, its calls in our tool format. `message` is what the server must get back
    in the next request, `call_ids` the ids of its calls. `usage` has the server's own counts of tokens.
    """

    text: str
    message: Message
    call_ids: tuple[str, ...]
    finish: str
    usage: Mapping[str, int]


def _as_text(arguments: Any) -> Any:
    if isinstance(arguments, dict):  # of a server that does not write them as text
        return json.dumps(arguments)
    return arguments or "{}"


class _Function(BaseModel):
    name: str
    arguments: Annotated[str, BeforeValidator(_as_text)] = "{}"


class _Call(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    content: str | list[Any] | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(default=0, ge=0, lt=2**31)
    completion_tokens: int = Field(default=0, ge=0, lt=2**31)


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def read_answer(body: bytes, tool_format: ToolFormat) -> Answer:
    """Return the answer in the body of a response.

    Raises:
        EndpointFault: it is no chat completion, or the model or a filter of the server has refused to answer.
    """
    try:
        completion = _Completion.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise EndpointFault(f"the answer is no chat completion: {place}: {first['msg']}") from None
    choice = completion.choices[0]
    # A field of its own at OpenAI; the text would be empty.
    if choice.message.refusal:
        raise EndpointFault(f"the model has refused: {choice.message.refusal:.300}")
    if choice.finish_reason == "content_filter":
        raise EndpointFault("a content filter of the server has cut the answer (content_filter)")
    # Some servers answer with parts in place of a text.
    content = bare_text({"content": choice.message.content})
    calls = choice.message.tool_calls or []
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message |= {"content": content or None, "tool_calls": [call.model_dump() for call in calls]}
    # Only what the server has counted: 0 and unknown are not the same.
    usage = completion.usage.model_dump(exclude_unset=True) if completion.usage else {}
    finish = "length" if choice.finish_reason == "length" else "stop"
    texts = [content] * bool(content) + [_call_text(call.function, tool_format) for call in calls]
    return Answer("\n".join(texts), message, tuple(call.id for call in calls), finish, usage)


def _call_text(function: _Function, tool_format: ToolFormat) -> str:
    """Return a call as text; one whose arguments are no JSON object keeps them, so that the environment explains it."""
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return write_tool_call(ToolCall(function.name, arguments), tool_format)
    return f"{OPEN}\n{function.model_dump_json()}\n{CLOSE}"


def answer_to_server(observations: Sequence[Message], call_ids: Sequence[str]) -> list[Message]:
    """Return the environment's answer to a turn as the server's next messages.

    Each call needs a `tool` message with its id, and such a message holds text alone: its images follow in a user's
    message. Without calls everything is the user's.

    >>> answer_to_server([{"role": "tool", "content": "Score 1.0"}], ["call_0"])
    [{'role': 'tool', 'tool_call_id': 'call_0', 'content': 'Score 1.0'}]
    """
    if not call_ids:
        shown = [openai_message({**message, "role": "user"}) for message in observations]
        return shown or [{"role": "user", "content": ""}]
    texts = [bare_text(message) for message in observations]
    if len(texts) != len(call_ids):
        texts = [SEE_LAST] * (len(call_ids) - 1) + ["\n".join(texts)]
    results: list[Message] = [
        {"role": "tool", "tool_call_id": call_id, "content": text}
        for call_id, text in zip(call_ids, texts, strict=True)
    ]
    images = [{"type": "image", "image": image} for image in message_images(observations)]
    if images:
        results.append(openai_message({"role": "user", "content": images}))
    return results
