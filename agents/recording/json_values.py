"""Converts what an environment puts into a message or an info to JSON values. It never raises."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from PIL import Image
from pydantic import BaseModel

from envs.contract import MAX_BITS, MAX_DEPTH, shown


def to_json(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return the value as JSON can hold it. What JSON cannot hold, or what nests too deeply, becomes text.

    Half of a surrogate pair, which JSON readers reject, becomes U+FFFD.

    >>> to_json({"score": float("nan"), 3: (1, 2)})
    {'score': 'nan', '3': [1, 2]}
    """
    if depth and isinstance(value, Mapping):
        return {shown(key): to_json(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, list | tuple):
        return [to_json(item, depth - 1) for item in value]
    # Python refuses to print integers of thousands of digits, and readers to parse them.
    if type(value) is int and value.bit_length() > MAX_BITS:
        return shown(hex(value))
    if type(value) is float and not math.isfinite(value):
        return repr(value)
    # Exact types: a subclass, such as a NumPy float, may print itself otherwise.
    if value is None or type(value) in (bool, int, float):
        return value
    return shown(value)


def json_text(model: BaseModel) -> str:
    """Return a record as indented JSON. pydantic's own `model_dump_json` raises at half of a surrogate pair."""
    return json.dumps(to_json(model.model_dump(mode="json")), indent=1, ensure_ascii=False) + "\n"


def cut(value: Any, limit: int) -> Any:
    """Return a JSON value with texts of at most `limit` characters and objects and arrays of at most `limit` items.

    >>> cut({"score": 1.0, "log": "a very long text"}, 6)
    {'score': 1.0, 'log': 'a very ... 10 more'}
    """
    if isinstance(value, str) and len(value) > limit:
        return f"{value[:limit]} ... {len(value) - limit} more"
    if isinstance(value, Mapping):
        return {cut(key, limit): cut(item, limit) for key, item in itertools.islice(value.items(), limit)}
    if isinstance(value, list):
        return [cut(item, limit) for item in value[:limit]]
    return value


def message_to_json(message: Mapping[str, Any], name_image: Callable[[Image.Image], str]) -> dict[str, Any]:
    """Return a chat message as it is recorded, with the name that `name_image` returns for each image.

    >>> message_to_json({"role": "tool", "content": [{"type": "image", "image": image}]}, lambda image: "1.png")
    {'role': 'tool', 'content': [{'type': 'image', 'image': '1.png'}]}
    """

    def part(value: object) -> object:
        # An image may be anywhere in a part, whatever `type` its author gave it.
        if isinstance(value, Mapping) and isinstance(value.get("image"), Image.Image):
            return {**value, "image": name_image(value["image"])}
        return value

    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [part(each) for each in content]
    return to_json({**message, "content": content})


class MessageTable:
    """The messages of an episode as they are recorded, each at a place: first all of its first stream.

    Example::

        table = MessageTable(trajectory.messages, name_image)      # of 3 messages
        table.place(trajectory.messages[1])                        # 1
        table.place({"role": "user", "content": "Go on."})         # 3, where none of them says this
        table.written[3]                                           # {"role": "user", "content": "Go on."}
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], name_image: Callable[[Image.Image], str]) -> None:
        self._name_image = name_image
        self.written = [message_to_json(message, name_image) for message in messages]
        # An object stands in several streams, and in the turn that it answers.
        self._of_object = {id(message): place for place, message in enumerate(messages)}

    @functools.cached_property
    def _of_text(self) -> dict[bytes, int]:
        # Made when it is asked for: an episode of one stream never does.
        return {_text(written): place for place, written in reversed(list(enumerate(self.written)))}

    def place(self, message: Mapping[str, Any]) -> int:
        """Return the place of a message, or of one that says the same; a new one is appended."""
        place = self._of_object.get(id(message))
        if place is None:
            written = message_to_json(message, self._name_image)
            place = self._of_text.setdefault(_text(written), len(self.written))
            if place == len(self.written):
                self.written.append(written)
            self._of_object[id(message)] = place
        return place

    def recorded(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as it is recorded, which may have no place."""
        place = self._of_object.get(id(message))
        if place is None:
            return message_to_json(message, self._name_image)
        return self.written[place]


def _text(written: Mapping[str, Any]) -> bytes:
    return orjson.dumps(written)
