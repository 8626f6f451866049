"""Chat completions of OpenAI's protocol: reads the body of a request, and writes the model's turns as its response."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
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
from envs.types import Message

MAX_MESSAGES = 10_000
MAX_IMAGES = 1_000
MAX_CHOICES = 16
#: Read by nobody here: each episode has a seed of its own, and nothing else of these changes a token.
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


class Asked(BaseModel):
    """A request for chat completions, checked. Another field is an error: it may change what the model writes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    model: str = ""
    tools: list[Json] = Field(default=[], max_length=1024)
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool = True
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int = Field(default=0, ge=1)
    max_completion_tokens: int = Field(default=0, ge=1)
    stop: str | list[Annotated[str, Field(min_length=1)]] = []
    stream: bool = False
    stream_options: Json = {}
    logprobs: bool = False

    @property
    def max_new_tokens(self) -> int:
        """The agent's own limit on a turn; 0 for none."""
        return self.max_completion_tokens or self.max_tokens


class ImageShelf:
    """The images of one episode: equal ones are one object, and one that is sent again is not decoded again."""

    def __init__(self) -> None:
        #: By the digest of the text, and by that of the pixels.
        self._images: dict[bytes | str, Image.Image] = {}

    def image(self, url: object, field: str) -> Image.Image:
        """Return the image of a data URI. Raises `UserError` if it is none."""
        if not isinstance(url, str) or not url.startswith("data:"):
            raise UserError(field, "must be a data URI, data:image/png;base64,...", url, "send the image itself")
        key = hashlib.blake2b(url.encode()).digest()
        if key not in self._images:
            if len(self._images) >= 2 * MAX_IMAGES:
                raise UserError(field, f"must be among {MAX_IMAGES} images of an episode", "one more", "send fewer")
            image = load_image(url, field, max_pixels=MAX_IMAGE_PIXELS)
            self._images[key] = self._images.setdefault(image_digest(image), image)
        return self._images[key]


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


def read_request(value: Json, sampling: SamplingParams, shelf: ImageShelf) -> Asked:
    """Return what a request asks for, its images decoded.

    Raises:
        UserError: a field is wrong, unknown, or asks for another way of sampling than `sampling`. Names it.
    """
    # Some clients send null for what they leave out.
    given = {name: item for name, item in value.items() if item is not None and name not in _UNREAD}
    law = _law(sampling)
    for name, wanted in law.items():
        item = given.pop(name, wanted)
        if item != wanted:
            raise UserError(name, f"must be {wanted!r}, as in the run", item, "leave it out")
    try:
        asked = Asked.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the body"
        rule = first["msg"][:1].lower() + first["msg"][1:]
        fix = "fix the field"
        if first["type"] == "extra_forbidden":
            rule = "must be a known field"
            fix = f"leave it out; {did_you_mean(field, [*Asked.model_fields, *law, *_UNREAD])}"
        raise UserError(field, rule, first["input"], fix) from error
    if asked.tool_choice == "none":
        asked.tools = []
    for place, tool in enumerate(asked.tools):
        _check_tool(tool, f"tools[{place}]")
    for place, message in enumerate(asked.messages):
        if isinstance(message["content"], list):
            _decode(message["content"], f"messages[{place}].content", shelf)
    if asked.messages[-1]["role"] == "assistant":
        fix = "add what is said to it; an answer is never begun for the model"
        raise UserError("messages", "must not end with the assistant", "the role assistant", fix)
    return asked


def _law(sampling: SamplingParams) -> Json:
    """Return the fields that change the law by which tokens are drawn, with the values that the trainer computes by."""
    return {
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


def _check_tool(tool: Json, field: str) -> None:
    match tool:
        case {"function": {"name": str() as name}} if 1 <= len(name) <= 256:
            return
    fix = 'write {"type": "function", "function": {"name": ...}}'
    raise UserError(field, "must be a function with a name", tool, fix)


def _decode(parts: list[Json], field: str, shelf: ImageShelf) -> None:
    for place, part in enumerate(parts):
        if part["type"] == "image":
            part["image"] = shelf.image(part["image"], f"{field}[{place}].image_url")


def says(message: Message) -> tuple[str, list[ToolCall]]:
    """Return what a message of the assistant says, to compare: its text, but for spaces around it, and its calls."""
    return message["content"].strip(), message.get("tool_calls", [])


# Answers --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """One turn of the model as a client reads it: what it says, its calls, and its log-probs if they are asked for."""

    text: str
    calls: list[ToolCall]
    finish: str
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int
    logprobs: Json | None


@dataclass(frozen=True)
class Answer:
    """What the model has written to a request. `id` is unique among those of an episode."""

    asked: Asked
    choices: Sequence[Choice]
    id: str

    def calls(self, index: int = 0) -> list[Json]:
        """Return the calls of a choice as chat completions have them."""
        return [
            {
                "id": f"call_{self.id}-{index}-{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for place, call in enumerate(self.choices[index].calls)
        ]


def write_logprobs(tokens: Iterable[tuple[bytes, float]]) -> Json:
    """Return the log-probs of the tokens of a turn, which are given as they are spelled."""
    content = [
        {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled), "top_logprobs": []}
        for spelled, logprob in tokens
    ]
    return {"content": content, "refusal": None}


class Chat:
    """Chat completions. Subclasses are the other protocols.

    Each reads a request as one for chat completions, whose fields are then checked, and writes an answer as its own.
    """

    path = "/v1/chat/completions"
    #: What ends a stream of events.
    ending = "data: [DONE]\n\n"

    def read(self, body: Json) -> Json:
        """Return the body of a request as that of chat completions."""
        return {**body, "messages": read_messages(body.get("messages"), "messages")}

    def write(self, answer: Answer) -> Json:
        """Return the body of a response."""
        choices: list[Json] = []
        for index, choice in enumerate(answer.choices):
            message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.calls:
                message["content"] = choice.text or None
                message["tool_calls"] = answer.calls(index)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "finish_reason": choice.finish,
                    "logprobs": choice.logprobs,
                }
            )
        first = answer.choices[0]
        num_written = sum(choice.num_tokens for choice in answer.choices)
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": answer.asked.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": first.prompt_tokens,
                "completion_tokens": num_written,
                "total_tokens": first.prompt_tokens + num_written,
                "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
            },
        }

    def events(self, answer: Answer) -> Iterator[Json]:
        """Yield the response as the chunks of a stream: what a choice says in one piece, then its end."""
        chunk = self.write(answer)
        chunk["object"] = "chat.completion.chunk"
        usage = chunk.pop("usage")
        for choice in chunk.pop("choices"):
            delta = choice.pop("message")
            for place, call in enumerate(delta.get("tool_calls", [])):
                call["index"] = place
            yield {**chunk, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
            yield {**chunk, "choices": [{**choice, "delta": {}, "logprobs": None}]}
        if answer.asked.stream_options.get("include_usage"):
            yield {**chunk, "choices": [], "usage": usage}

    def error(self, refusal: Refusal) -> Json:
        """Return the body of a refusal."""
        said = {"message": str(refusal), "type": "invalid_request_error", "param": refusal.param, "code": refusal.code}
        return {"error": said}

    def stream(self, answer: Answer) -> str:
        """Return an answer as server-sent events. An event that has a type is named by it."""
        lines = []
        for event in self.events(answer):
            if "type" in event:
                lines.append(f"event: {event['type']}\n")
            lines.append(f"data: {json.dumps(event)}\n\n")
        return "".join(lines) + self.ending
