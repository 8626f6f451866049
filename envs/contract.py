"""The environment contract for callers: `EpisodeEnv` (the methods that an episode needs), `EnvFault` and `ToolFault`
(what went wrong in one), and the checks of what an environment shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from envs.images import load_image
from envs.plain import plain
from envs.types import Message

MAX_IMAGE_PIXELS = 16_000_000
#: The outcome of a tool call that raised, hung or ended the process.
TOOL_FAULT = "tool_fault"


class EpisodeEnv(Protocol):
    """The methods of an environment that an episode calls."""

    @property
    def tools(self) -> Any: ...
    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]: ...
    def format_observation(self, observation: dict[str, Any]) -> Message | Sequence[Message]: ...
    def reward(self, final_text: str) -> float: ...
    def close(self) -> None: ...


class EnvFault(Exception):
    """The environment raised, hung or returned a value that breaks the contract; the message says which."""

    def __init__(self, detail: str, timed_out: bool = False, process_ended: bool = False) -> None:
        super().__init__(detail)
        self.timed_out, self.process_ended = timed_out, process_ended


class ToolFault(EnvFault):
    """A fault that the model's own action caused: the episode counts, with the lowest reward.

    `info` is the step's info; the outcome of the call in its `tool_calls` is `TOOL_FAULT`.
    """

    def __init__(self, detail: str, info: Mapping[str, Any] | None = None, timed_out: bool = False) -> None:
        super().__init__(detail, timed_out)
        self.info = info or {}


def checked_messages(value: object) -> tuple[Message, ...]:
    """Validate messages, or a single one, and return them with decoded pictures."""
    return tuple(_message(each) for each in (value if isinstance(value, (list, tuple)) else [value]))


def checked_opening(value: object) -> tuple[Message, ...]:
    """Validate the first observation's messages, which are a part of the prompt: they may show turns of an example."""
    messages = checked_messages(value)
    if messages and messages[-1]["role"] == "assistant":
        raise EnvFault('the first observation must not end with the role "assistant": the model has to write next')
    return messages


def checked_answer(value: object) -> tuple[Message, ...]:
    """Validate the messages that answer a turn: none may pass for a turn of the model."""
    messages = checked_messages(value)
    if any(message["role"] == "assistant" for message in messages):
        fix = 'give the message the role "tool" or "user"'
        raise EnvFault(f'an observation must not have the role "assistant", in which only the model writes; {fix}')
    return messages


def checked_tools(value: object) -> tuple[dict[str, Any], ...]:
    """Validate the tools of an environment: schemas in a list, none for None."""
    tools = () if value is None else value
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise EnvFault(f"tools must be a list of schemas, each a dict, got {value!r:.200}")
    return tuple(map(plain, tools))


def _message(value: object) -> Message:
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        content = value.get("content")
        rest = {name: plain(part) for name, part in value.items() if name != "content"}
        if isinstance(content, str):
            return {**rest, "content": plain(content)}
        if isinstance(content, list):
            return {**rest, "content": [_part(part) for part in content]}
    rule = 'format_observation must return {"role": str, "content": str or list of parts}, or a list of such messages'
    raise EnvFault(f"{rule}, got {value!r:.200}")


def _part(part: object) -> dict[str, Any]:
    if isinstance(part, dict):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return plain(part)
        if part.get("type") == "image":
            picture = load_image(part.get("image"), "observation image", None, max_pixels=MAX_IMAGE_PIXELS)
            return {**{name: plain(each) for name, each in part.items() if name != "image"}, "image": picture}
    raise EnvFault(
        f'a part must be {{"type": "text", "text": str}} or {{"type": "image", "image": picture}}, got {part!r:.200}'
    )
