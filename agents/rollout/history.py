"""What of a conversation the model goes on seeing, where an environment cuts its history.

A cut conversation is no extension of the stream before it, so it begins a new stream of the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.types import Message, content_parts

#: What stands in a message in place of an image that is no longer shown.
LEFT_OUT = "(an earlier image, no longer shown)"


@dataclass(frozen=True)
class History:
    """The last `keep_images` images and the last `keep_turns` turns are shown (None: all), and the opening's texts.

    Example: `History(keep_images=4, keep_turns=12)`.
    """

    keep_images: int | None = None
    keep_turns: int | None = None

    def shown(self, messages: Sequence[Message], num_opening: int) -> list[Message]:
        """Return the conversation as the model sees it; the first `num_opening` messages are never left out.

        A message without a change is the same object.
        """
        opening = messages[:num_opening]
        rest = messages[num_opening:]
        if self.keep_turns is not None:
            begins = [place for place, message in enumerate(rest) if message["role"] == "assistant"]
            # A turn goes with its answers.
            if len(begins) > self.keep_turns:
                rest = rest[begins[-self.keep_turns] :]
        shown = [*opening, *rest]
        if self.keep_images is None:
            return shown
        left = self.keep_images
        for place in reversed(range(len(shown))):
            num_images = _num_images(shown[place])
            if num_images > left:
                shown[place] = _without_images(shown[place], num_images - left)
            left = max(0, left - num_images)
        return shown


def _num_images(message: Message) -> int:
    return sum(part["type"] == "image" for part in content_parts(message))


def _without_images(message: Message, count: int) -> Message:
    """Return the message without its first `count` images."""
    parts = []
    for part in content_parts(message):
        if part["type"] == "image" and count:
            count -= 1
            part = {"type": "text", "text": LEFT_OUT}
        parts.append(part)
    return {**message, "content": parts}
