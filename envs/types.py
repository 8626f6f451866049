"""Types that all packages share: `Sample`, one task, and the chat messages that show it to the model.

A message is a plain dict, as chat templates expect: ``{"role": ..., "content": ...}`` where content is a string or a
list of parts, each ``{"type": "text", "text": str}`` or ``{"type": "image", "image": PIL.Image.Image}``.
"""

from __future__ import annotations

import base64
import copy
import io
import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from PIL import Image

from envs.errors import UserError

Message = dict[str, Any]
#: Text, or a list of parts.
Content = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Sample:
    """One task: the prompt for the model, and the label that the answer is compared with.

    Example::

        Sample(id="geo3k-train-17", label="68", prompt=(
            {"role": "user", "content": [{"type": "image", "image": diagram}, {"type": "text", "text": "Find x."}]},))
    """

    id: str
    prompt: tuple[Message, ...]
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def private(sample: Sample) -> Sample:
    """Return the sample with its own prompt and metadata, so that one episode cannot change them for another.

    Images are shared.
    """
    prompt = [
        {**m, "content": [{**part} for part in m["content"]]} if isinstance(m.get("content"), list) else {**m}
        for m in sample.prompt
    ]
    if sample.metadata:
        metadata = copy.deepcopy(dict(sample.metadata))
    else:
        metadata = {}
    return Sample(sample.id, tuple(prompt), sample.label, metadata)


class SampleSource(Protocol):
    """A finite, indexable set of samples; reading the same index twice gives the same sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class MadeSamples(Sequence[Sample]):
    """Samples that are created when they are read: a subclass creates the one at a place from 0 to `size` - 1.

    Example::

        class Squares(MadeSamples):
            def make(self, place):
                return Sample(f"square-{place}", ({"role": "user", "content": f"{place} squared?"},), str(place**2))

        Squares(size=10)[-1].label      # "81"
    """

    def __init__(self, size: int) -> None:
        """Set the number of samples; raise UserError if it is negative."""
        if size < 0:
            raise UserError("size", "must be at least 0", size, "give the number of samples")
        self.size = size

    @abstractmethod
    def make(self, place: int) -> Sample:
        """Return the sample at a place; always the same one."""

    def place(self, index: int) -> int:
        """Return the place of an index in -size to size - 1."""
        if not -self.size <= index < self.size:
            raise IndexError(f"index {index} is out of range for {self.size} samples")
        return index % self.size

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(index, slice):
            return [self.make(place) for place in range(*index.indices(self.size))]
        return self.make(self.place(index))


def content_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message's content as a list of parts, also if it is a string."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content)


def openai_message(message: Mapping[str, Any]) -> Message:
    """Return a message as OpenAI's protocol has it, each image as a data URI of a PNG file.

    >>> openai_message({"role": "user", "content": "Find x."})
    {'role': 'user', 'content': 'Find x.'}
    """
    if not isinstance(message.get("content"), list):
        return dict(message)
    parts = content_parts(dict(message))
    return {**message, "content": [_openai_image(part["image"]) if part["type"] == "image" else part for part in parts]}


def _openai_image(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    encoded = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def plain_text(message: Message) -> str:
    """Return a message's text, with ``<image>`` for each image."""
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in content_parts(message))


def bare_text(message: Mapping[str, Any]) -> str:
    """Return a message's text, its parts joined, without a word for images; whatever a stranger's message holds."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def message_images(messages: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
    """Return the images of the messages in reading order."""
    parts = itertools.chain.from_iterable(map(content_parts, messages))
    return [part["image"] for part in parts if part.get("type") == "image"]
