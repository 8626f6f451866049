"""Chat completions of OpenAI's protocol: reads the body of a request, and writes the model's turns as its response."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents.rollout.assistant_turn import parse_calls
from agents.types import SamplingParams
from envs.contract import MAX_IMAGE_PIXELS
from envs.errors import UserError, did_you_mean
from envs.images import image_digest, load_image
from envs.safe_text import well_formed
from envs.tool_calls import ToolCall, ToolFormat, find_tool_calls, outside_tool_calls
from envs.tool_calls.thinking import Thinking
from envs.types import Message

MAX_MESSAGES = 10_000
MAX_IMAGES = 1_000
MAX_CHOICES = 16
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
#: What would change the law by which tokens are drawn, and its neutral values.
_NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "top_logprobs": 0,
}


class _Named(BaseModel):
    name: str = Field(min_length=1, max_length=256)


class _Tool(BaseModel):
    function: _Named


class _StreamOptions(BaseModel):
    include_usage: bool = False


class Asked(BaseModel):
    """A request for chat completions, checked. Another field is an error: it may change what the model writes.

    A message of the assistant has its text as `content` and its `tool_calls` as `ToolCall`s. Images are decoded.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str = ""
    tools: list[dict[str, Any]] = Field(default=[], max_length=1024)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int = Field(default=0, ge=1)
    max_completion_tokens: int = Field(default=0, ge=1)
    stop: str | list[Annotated[str, Field(min_length=1)]] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: bool = False
    response_format: dict[str, Any] = {}
    # Those of the run, or absent.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float = 0
    presence_penalty: float = 0
    repetition_penalty: float = 1
    logit_bias: dict[str, Any] = {}
    top_logprobs: int = 0
    # Read by nobody here: each episode has a seed of its own, and nothing else of these changes a token.
    seed: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    modalities: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def max_new_tokens(self) -> int:
        """The agent's own limit on a turn; 0 for none."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> Sequence[str]:
        """The strings that cut an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ImageShelf:
    """The images of one episode: equal ones are one object, and one that is sent again is not decoded again."""

    def __init__(self) -> None:
        self._by_text: dict[bytes, Image.Image] = {}
        self._by_pixels: dict[str, Image.Image] = {}

    def image(self, url: object, field: str) -> Image.Image:
        """Return the image of a data URI. Raises `UserError` if it is none."""
        if not isinstance(url, str) or not url.startswith("data:"):
            raise UserError(field, "must be a data URI, data:image/png;base64,...", url, "send the image itself")
        key = hashlib.blake2b(url.encode(), digest_size=16).digest()
        if key not in self._by_text:
            if len(self._by_text) >= MAX_IMAGES:
                raise UserError(field, f"must be among {MAX_IMAGES} images of an episode", "one more", "send fewer")
            image = load_image(url, field, max_pixels=MAX_IMAGE_PIXELS)
            self._by_text[key] = self._by_pixels.setdefault(image_digest(image), image)
        return self._by_text[key]


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, halves of surrogate pairs replaced. Raises `UserError` if it is none."""
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():  # only an escape can stand for half a pair
            value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise UserError("the body", "must be JSON", str(error), "send what a client of OpenAI sends") from error
    if not isinstance(value, dict):
        raise UserError("the body", "must be an object", value, "send what a client of OpenAI sends")
    return value


def read_request(value: Mapping[str, Any], sampling: SamplingParams, shelf: ImageShelf) -> Asked:
    """Return what a request asks for.

    Raises:
        UserError: a field is wrong, unknown, or asks for another way of sampling than `sampling`. Names it.
    """
    try:
        # Some clients send null for what they leave out.
        asked = Asked.model_validate({name: item for name, item in value.items() if item is not None})
    except ValidationError as error:
        raise _as_user_error(error) from error
    _check_law(asked, sampling)
    if asked.tool_choice == "none":
        tools = []
    else:
        tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(asked.tools)]
    messages = [_message(each, f"messages[{place}]", shelf) for place, each in enumerate(asked.messages)]
    if messages[-1]["role"] == "assistant":
        fix = "add what is said to it; an answer is never begun for the model"
        raise UserError("messages", "must not end with the assistant", "the role assistant", fix)
    return asked.model_copy(update={"messages": messages, "tools": tools})


def _as_user_error(error: ValidationError) -> UserError:
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "the body"
    if first["type"] == "extra_forbidden":
        known = did_you_mean(field, Asked.model_fields)
        return UserError(field, "must be a known field", first["input"], f"leave it out; {known}")
    return UserError(field, first["msg"][:1].lower() + first["msg"][1:], first["input"], "fix the field")


def _check_law(asked: Asked, sampling: SamplingParams) -> None:
    """Raise `UserError` where tokens would be drawn otherwise than the trainer computes their log-probs."""
    law = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    for name, wanted in {**_NEUTRAL, **law}.items():
        given = getattr(asked, name)
        if given is not None and given != wanted:
            raise UserError(name, f"must be {wanted!r}, as in the run", given, "leave it out")
    # The text for a format would be another than the model wrote.
    if asked.response_format and asked.response_format != {"type": "text"}:
        fix = "ask for the format in a message"
        raise UserError("response_format", "must be of the type text", asked.response_format, fix)


def _tool(tool: dict[str, Any], field: str) -> dict[str, Any]:
    try:
        _Tool.model_validate(tool, strict=True)
    except ValidationError as error:
        fix = 'write {"type": "function", "function": {"name": ...}}'
        raise UserError(field, "must be a function with a name", tool, fix) from error
    return tool


def _message(value: dict[str, Any], field: str, shelf: ImageShelf) -> Message:
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise UserError(f"{field}.role", f"must be one of {', '.join(_ROLES)}", role, "fix the role")
    message: Message = {"role": _ROLES[role], "content": _content(value.get("content"), f"{field}.content", shelf)}
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    if role == "assistant":
        if not isinstance(message["content"], str):
            raise UserError(f"{field}.content", "must be text where the assistant speaks", "an image", "leave it out")
        # A client may add fields of its own, which no template knows.
        message = {"role": role, "content": message["content"]}
        if value.get("function_call"):
            raise UserError(f"{field}.function_call", "must be absent", value["function_call"], "use tool_calls")
        if value.get("tool_calls"):
            message["tool_calls"] = parse_calls(value, field)
    return message


def _content(value: object, field: str, shelf: ImageShelf) -> str | list[dict[str, Any]]:
    """Return a text, or parts where there is an image."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise UserError(field, "must be a text or a list of parts", value, "fix the content")
    parts = [_part(part, f"{field}[{place}]", shelf) for place, part in enumerate(value)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: object, field: str, shelf: ImageShelf) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "refusal", "image_url"):
        raise UserError(field, "must be a part of the type text or image_url", part, "send texts and images")
    if kind == "image_url":
        held = part.get("image_url")
        url = held.get("url") if isinstance(held, dict) else held
        return {"type": "image", "image": shelf.image(url, f"{field}.image_url")}
    text = part.get(kind)
    if not isinstance(text, str):
        raise UserError(f"{field}.{kind}", "must be a text", text, "fix the part")
    return {"type": "text", "text": text}


# Answers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One turn of the model as a client reads it: what it says, its calls, and its tokens with their log-probs."""

    text: str
    calls: tuple[ToolCall, ...]
    finish: str
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[tuple[bytes, float], ...]

    @property
    def message(self) -> Message:
        """The turn as a message of a request, as `read_request` would read it."""
        calls = {"tool_calls": list(self.calls)} if self.calls else {}
        return {"role": "assistant", "content": self.text, **calls}


def read_turn(
    text: str, finish: str, asked: Asked, tool_format: ToolFormat, thinking: Thinking | None
) -> tuple[str, tuple[ToolCall, ...], str]:
    """Return what a turn says, its calls, and why it ends, as the client is told.

    Thoughts are left out, and what follows a stop string. Where a call is broken, or was cut off, the text is left as
    it is: the agent shows it to the model, or explains.
    """
    if thinking:
        text = thinking.said(text)
    if stops := [place for word in asked.stops if (place := text.find(word)) >= 0]:
        text = text[: min(stops)]
        finish = "stop"
    if asked.tools:
        found = find_tool_calls(text, tool_format)
        calls = tuple(call for call in found if isinstance(call, ToolCall))
        if calls and len(calls) == len(found):
            if not asked.parallel_tool_calls:
                calls = calls[:1]
            return outside_tool_calls(text, tool_format).strip(), calls, "tool_calls"
    return text, (), finish


def says_same(one: Message, other: Message) -> bool:
    """Return whether two messages of the assistant say the same: in text, but for spaces around it, and in calls."""
    if one["content"].strip() != other["content"].strip():
        return False
    return one.get("tool_calls", []) == other.get("tool_calls", [])


def response(asked: Asked, choices: Sequence[Choice], answer_id: str) -> dict[str, Any]:
    """Return the body of a response. `answer_id` is unique among those of an episode."""
    return {
        **_head(asked, answer_id, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": _written(choice, f"{answer_id}-{index}"),
                "finish_reason": choice.finish,
                "logprobs": _logprobs(asked, choice),
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _usage(choices),
    }


def events(asked: Asked, choices: Sequence[Choice], answer_id: str) -> Iterator[dict[str, Any]]:
    """Yield the same response as the chunks of a stream: what a choice says in one piece, then its end."""
    head = _head(asked, answer_id, "chat.completion.chunk")
    for index, choice in enumerate(choices):
        delta = _written(choice, f"{answer_id}-{index}")
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        said = {"index": index, "delta": delta, "finish_reason": None, "logprobs": _logprobs(asked, choice)}
        yield {**head, "choices": [said]}
        yield {**head, "choices": [{"index": index, "delta": {}, "finish_reason": choice.finish, "logprobs": None}]}
    if asked.stream_options.include_usage:
        yield {**head, "choices": [], "usage": _usage(choices)}


def _head(asked: Asked, answer_id: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": int(time.time()), "model": asked.model}


def _written(choice: Choice, name: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {
                "id": f"call_{name}-{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for place, call in enumerate(choice.calls)
        ]
    return message


def _logprobs(asked: Asked, choice: Choice) -> dict[str, Any] | None:
    if not asked.logprobs:
        return None
    content = [
        {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled), "top_logprobs": []}
        for spelled, logprob in choice.tokens
    ]
    return {"content": content, "refusal": None}


def _usage(choices: Sequence[Choice]) -> dict[str, Any]:
    prompt = choices[0].prompt_tokens
    written = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": choices[0].cached_tokens},
    }


def error_body(message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """Return the body of a refusal."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}
