"""Frozen types that every package shares: a task's row (`Sample`) and the chat messages it is shown as.

A message is a plain dict, as chat templates take them: ``{"role": ..., "content": ...}`` where content is a string or a
list of parts, each ``{"type": "text", "text": str}`` or ``{"type": "image", "image": PIL.Image.Image}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL import Image

_HALF_PAIR = re.compile("[\ud800-\udfff]")

Message = dict[str, Any]
#: Text, or a list of parts.
Content = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One task: the prompt that the model is shown and the label that its answer is held against.

    Example::

        Sample(id="geo3k-train-17", label="68", prompt=(
            {"role": "user", "content": [{"type": "image", "image": diagram}, {"type": "text", "text": "Find x."}]},))
    """

    id: str
    prompt: tuple[Message, ...]
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class SampleSource(Protocol):
    """A finite, indexable set of samples; reading the same index twice gives the same sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def well_formed(text: str) -> str:
    """Return the text with U+FFFD for each half of a surrogate pair, which no tokenizer and no file takes.

    A model writes one as the JSON escape of half an emoji.
    """
    return _HALF_PAIR.sub("\ufffd", text)


def content_parts(message: Message) -> list[dict[str, Any]]:
    """Return a message's content as a list of parts, whichever of the two forms it has."""
    content = message.get("content") or ""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def message_images(messages: Sequence[Message]) -> Iterator[Image.Image]:
    """Yield the images of the messages in reading order."""
    for message in messages:
        for part in content_parts(message):
            if part.get("type") == "image":
                yield part["image"]
