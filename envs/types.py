"""Frozen types that every package shares: a task's row (`Sample`) and the chat messages it is shown as.

A message is a plain dict, as chat templates take them: ``{"role": ..., "content": ...}`` where content is a string or a
list of parts, each ``{"type": "text", "text": str}`` or ``{"type": "image", "image": PIL.Image.Image}``.
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from PIL import Image

from envs.errors import UserError

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


def private(sample: Sample) -> Sample:
    """Return the sample with a prompt and metadata of its own, so that one episode cannot change them for another.

    Pictures are shared.
    """
    prompt = [
        {**m, "content": [{**part} for part in m["content"]]} if isinstance(m.get("content"), list) else {**m}
        for m in sample.prompt
    ]
    metadata = copy.deepcopy(dict(sample.metadata)) if sample.metadata else {}
    return Sample(sample.id, tuple(prompt), sample.label, metadata)


class SampleSource(Protocol):
    """A finite, indexable set of samples; reading the same index twice gives the same sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class MadeSamples(Sequence[Sample]):
    """Samples that are made when they are read: a subclass says how the one at a place from 0 to `size` - 1 is made.

    Example::

        class Squares(MadeSamples):
            def make(self, place):
                return Sample(f"square-{place}", ({"role": "user", "content": f"{place} squared?"},), str(place**2))

        Squares(size=10)[-1].label      # "81"
    """

    def __init__(self, size: int) -> None:
        """Take the number of samples; raise UserError where it is negative."""
        if size < 0:
            raise UserError("size", "must be at least 0", size, "give the number of samples")
        self.size = size

    @abstractmethod
    def make(self, place: int) -> Sample:
        """Return the sample at a place; the same one every time."""

    def place(self, index: int) -> int:
        """Return the place of an index from -size to size - 1."""
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
