"""What of a conversation the model goes on seeing, where an entry or an environment cuts its history.

A cut conversation is no extension of the token stream before it, so it begins a new stream of the episode.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from envs.contract import EnvFault, checked_messages
from envs.types import Message, content_parts, message_images

#: What stands in a message in place of an image that is no longer shown.
LEFT_OUT = "(an earlier image)\n"


class History(BaseModel):
    """A window: the model sees the last `keep_images` images and the last `keep_turns` turns (None: all).

    What it read before its first turn stays, and of its images those of the problem.

    Example: `History(keep_images=4, keep_turns=12)`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    keep_images: int | None = Field(default=None, ge=1)
    keep_turns: int | None = Field(default=None, ge=1)

    def shown(
        self, messages: Sequence[Message], num_opening: int, problem_images: Sequence[Image.Image] = ()
    ) -> list[Message]:
        """Return the conversation as the model sees it. A message without a change is the same object.

        The first `num_opening` messages are never left out, nor are `problem_images`, which do not count.
        """
        opening = messages[:num_opening]
        rest = messages[num_opening:]
        if self.keep_turns is not None:
            begins = [place for place, message in enumerate(rest) if message["role"] == "assistant"]
            # A turn goes with its answers.
            if len(begins) > self.keep_turns:
                rest = rest[begins[-self.keep_turns] :]
        shown = [*opening, *rest]
        if self.keep_images is not None:
            spared = set(map(id, problem_images))
            others = [image for image in message_images(shown) if id(image) not in spared]
            num_left_out = len(others) - self.keep_images
            for place, message in enumerate(shown):
                if num_left_out <= 0:
                    break
                shown[place], num_gone = _without_images(message, num_left_out, spared)
                num_left_out -= num_gone
        return shown


def _without_images(message: Message, most: int, spared: set[int]) -> tuple[Message, int]:
    """Return the message without its first images, `most` at most, and how many these are."""
    num_gone = 0
    parts = []
    for part in content_parts(message):
        if part["type"] == "image" and id(part["image"]) not in spared and num_gone < most:
            num_gone += 1
            part = {"type": "text", "text": LEFT_OUT}
        parts.append(part)
    if num_gone:
        return {**message, "content": parts}, num_gone
    return message, 0


def with_numbers(messages: Sequence[Message]) -> tuple[list[Message], list[Image.Image]]:
    """Return copies of the messages in which its number, from 0, stands for each image, and the images."""
    images: list[Image.Image] = []
    copies = []
    for message in messages:
        if isinstance(message.get("content"), list):
            message = {**message, "content": [_with_number(part, images) for part in message["content"]]}
        # Deep, because code of an author may change what it gets.
        copies.append(copy.deepcopy(message))
    return copies, images


def _with_number(part: dict[str, Any], images: list[Image.Image]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    images.append(part["image"])
    return {**part, "image": len(images) - 1}


def checked_history(value: object, given: Sequence[Message]) -> tuple[Message, ...]:
    """Validate what `edit_history` makes of the messages `given`; return it with the images for their numbers.

    A message without a change is the same object.
    """
    if not isinstance(value, list | tuple) or not value:
        raise EnvFault(f"edit_history must return messages in a list, got {value!r:.200}")
    numbered, images = with_numbers(given)
    edited: list[Message] = []
    places: list[int] = []
    for each in value:
        place = next((n for n, message in enumerate(numbered) if message == each and n not in places), None)
        if place is None:
            (message,) = checked_messages(each, images, "edit_history")
        else:
            message = given[place]
        if message["role"] == "assistant":
            # Only what the model wrote may stand for its words.
            if place is None or place < max(places, default=0):
                fix = "leave a turn out, or keep it as it is and where it is"
                raise EnvFault(f"edit_history must not write, change or move a message of the assistant; {fix}")
            places.append(place)
        edited.append(message)
    if edited[-1]["role"] == "assistant":
        raise EnvFault('edit_history must not end with the role "assistant": the model has to write next')
    return tuple(edited)
