"""Chat completions of OpenAI's protocol: reads the body of a request, and writes the model's turns as its response."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agents.gateway.messages import Json, read_messages
from agents.types import SamplingParams
from envs.contract import MAX_IMAGE_PIXELS
from envs.errors import UserError, did_you_mean
from envs.images import image_digest, load_image
from envs.safe_text import well_formed
from envs.tool_calls import ToolCall
from envs.types import Message, bare_text, content_parts

MAX_IMAGES = 1_000
#: Known, and read by nobody here: each episode has a seed of its own, and nothing else of these changes a token.
_UNREAD = (
    "seed",
    "user",
    "metadata",
    "store",
    "service_tier",
    "reasoning_effort",
    "verbosity",
    "modalities",
    "safety_identifier",
    "prompt_cache_key",
)


class Refusal(Exception):
    """A request that is not answered, and why; `code` is for programs, `param` the field that is wrong."""

    def __init__(self, message: str, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param


#: A text that is not empty: an empty stop string would cut every answer to nothing.
_Word = Annotated[str, Field(min_length=1)]


class Asked(BaseModel):
    """What a request for chat completions asks for, checked."""

    model_config = ConfigDict(strict=True)

    messages: list[Message] = Field(min_length=1)
    model: str = ""
    tools: list[Json] = Field(default=[], max_length=1024)
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool = True
    n: int = Field(default=1, ge=1, le=16)
    max_tokens: int = Field(default=0, ge=1)
    max_completion_tokens: int = Field(default=0, ge=1)
    stop: _Word | list[_Word] = []
    stream: bool = False
    stream_options: Json = {}
    logprobs: bool = False


#: The images of one episode, by the hash of their text and by the digest of their pixels.
Images = dict[int | str, Image.Image]


def read_image(url: object, field: str, known: Images) -> Image.Image:
    """Return the image of a data URI. Equal ones are one object, and one that is sent again is not decoded again.

    Raises:
        UserError: it is none, or there are too many.
    """
    if not isinstance(url, str) or not url.startswith("data:"):
        raise UserError(field, "must be a data URI, data:image/png;base64,...", url, "send the image itself")
    key = hash(url)
    if key not in known:
        # Each has two keys.
        if len(known) >= 2 * MAX_IMAGES:
            raise UserError(field, f"must be among {MAX_IMAGES} images of an episode", "one more", "send fewer")
        image = load_image(url, field, max_pixels=MAX_IMAGE_PIXELS)
        known[key] = known.setdefault(image_digest(image), image)
    return known[key]


def read_json(body: bytes) -> Json:
    """Return the JSON object of a body, halves of surrogate pairs replaced. Raises `UserError` if it is none."""
    try:
        value = json.loads(body)
        if b"\\ud" in body.lower():  # only an escape can stand for half a pair
            value = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    except ValueError as error:
        value = str(error)
    if not isinstance(value, dict):
        raise UserError("the body", "must be a JSON object", value, "send what a client of OpenAI sends")
    return value


def read_request(value: Json, sampling: SamplingParams, images: Images) -> Asked:
    """Return what a request asks for, its images decoded.

    Raises:
        UserError: a field is wrong, unknown, or asks for another way of sampling than `sampling`. Names it.
    """
    # Some clients send null for what they leave out.
    given = {name: item for name, item in value.items() if item is not None}
    # What changes the law by which tokens are drawn, with the values that the trainer computes by.
    law = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "top_logprobs": 0,
        # The text for another format would be another than the model wrote.
        "response_format": {"type": "text"},
    }
    known = [*Asked.model_fields, *law, *_UNREAD]
    for name, item in given.items():
        if name not in known:
            fix = f"leave it out; {did_you_mean(name, known)}"
            raise UserError(name or "the body", "must be a known field", item, fix)
        if name in law and item != law[name]:
            raise UserError(name, f"must be {law[name]!r}, as in the run", item, "leave it out")
    try:
        asked = Asked.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UserError(field, first["msg"].lower(), first["input"], "fix the field") from error
    if asked.tool_choice == "none":
        asked.tools = []
    for place, tool in enumerate(asked.tools):
        match tool:
            case {"function": {"name": str() as name}} if 1 <= len(name) <= 256:
                continue
        fix = 'write {"type": "function", "function": {"name": ...}}'
        raise UserError(f"tools[{place}]", "must be a function with a name", tool, fix)
    for message in asked.messages:
        for part in content_parts(message):
            if part["type"] == "image":
                part["image"] = read_image(part["image"], f"{part.pop('field')}.image_url", images)
    if asked.messages[-1]["role"] == "assistant":
        fix = "add what is said to it; an answer is never begun for the model"
        raise UserError("messages", "must not end with the assistant", "the role assistant", fix)
    return asked


def says(message: Message) -> object:
    """Return what a message says, to compare it with answers: spaces around its text do not count."""
    return message["role"], bare_text(message).strip(), message.get("tool_calls", [])


# Answers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One turn of the model as a client reads it. `tokens` are as they are spelled, with log-probs, if asked for."""

    text: str
    #: As chat completions have them.
    calls: Sequence[Json]
    finish: str
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int
    tokens: Sequence[tuple[bytes, float]]


def write_call(call: ToolCall) -> Json:
    """Return a call as chat completions have it, with an id of its own."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def _logprob(token: bytes, logprob: float) -> Json:
    return {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token), "top_logprobs": []}


class Chat:
    """Chat completions. Subclasses are the other protocols.

    Each reads a request as one for chat completions, whose fields are then checked, and writes an answer as its own.
    """

    path = "/v1/chat/completions"
    #: What ends a stream of events.
    ending = "data: [DONE]\n\n"
    counts_events = False

    def read(self, body: Json) -> Json:
        """Return the body of a request as that of chat completions."""
        return {**body, "messages": read_messages(body.get("messages"), "messages")}

    def write(self, asked: Asked, choices: Sequence[Choice]) -> Json:
        """Return the body of a response."""
        written: list[Json] = []
        for index, choice in enumerate(choices):
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                message["content"] = choice.text or None
                message["tool_calls"] = choice.calls
            logprobs = None
            if asked.logprobs:
                logprobs = {"content": [_logprob(*token) for token in choice.tokens], "refusal": None}
            written.append(
                {"index": index, "message": message, "finish_reason": choice.finish, "logprobs": logprobs},
            )
        prompt_tokens = choices[0].prompt_tokens
        num_tokens = sum(choice.num_tokens for choice in choices)
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": asked.model,
            "choices": written,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": prompt_tokens + num_tokens,
                "prompt_tokens_details": {"cached_tokens": choices[0].cached_tokens},
            },
        }

    def events(self, body: Json, options: Json) -> Iterator[Json]:
        """Yield a response as the events of a stream: what a choice says in one piece, then its end."""
        chunk = {**body, "object": "chat.completion.chunk"}
        usage = chunk.pop("usage")
        for choice in chunk.pop("choices"):
            delta = choice.pop("message")
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
            yield {**chunk, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
            yield {**chunk, "choices": [{**choice, "delta": {}, "logprobs": None}]}
        if options.get("include_usage"):
            yield {**chunk, "choices": [], "usage": usage}

    def error(self, refusal: Refusal) -> Json:
        """Return the body of a refusal."""
        return {
            "error": {
                "message": str(refusal),
                "type": "invalid_request_error",
                "param": refusal.param,
                "code": refusal.code,
            }
        }

    def stream(self, body: Json, options: Json) -> str:
        """Return a response as server-sent events. An event that has a type is named by it."""
        text = ""
        for number, event in enumerate(self.events(body, options)):
            if self.counts_events:
                event["sequence_number"] = number
            if "type" in event:
                text += f"event: {event['type']}\n"
            text += f"data: {json.dumps(event)}\n\n"
        return text + self.ending
