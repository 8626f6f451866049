"""The environment contract for callers: `EpisodeEnv` (the methods that an episode needs), `EnvFault` (a broken
environment) and `checked_messages` (validates what an environment shows)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from envs.images import load_image
from envs.types import Message

MAX_IMAGE_PIXELS = 16_000_000


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

    def __init__(self, detail: str, timed_out: bool = False) -> None:
        super().__init__(detail)
        self.timed_out = timed_out


def checked_messages(value: object) -> tuple[Message, ...]:
    """Validate the result of `format_observation` and return it as messages with decoded pictures."""
    return tuple(_message(each) for each in (value if isinstance(value, (list, tuple)) else [value]))


def _message(value: object) -> Message:
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        content = value.get("content")
        if isinstance(content, str):
            return {**value}
        if isinstance(content, list):
            return {**value, "content": [_part(part) for part in content]}
    rule = 'format_observation must return {"role": str, "content": str or list of parts}, or a list of such messages'
    raise EnvFault(f"{rule}, got {value!r:.200}")


def _part(part: object) -> dict[str, Any]:
    if isinstance(part, dict):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return {**part}
        if part.get("type") == "image":
            return {
                **part,
                "image": load_image(part.get("image"), "observation image", None, max_pixels=MAX_IMAGE_PIXELS),
            }
    raise EnvFault(
        f'a part must be {{"type": "text", "text": str}} or {{"type": "image", "image": picture}}, got {part!r:.200}'
    )
