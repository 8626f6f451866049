"""Claims about copies of what an environment returns: the same values, no code of it, and always an end."""

from __future__ import annotations

import enum
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agents.recording.json_values import to_json
from envs.contract import MAX_VALUES, plain

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Endless(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        while True:
            yield "x"


VALUES: tuple[Any, ...] = (
    None, True, 3, 2.5, float("nan"), 2**100, "text", b"bytes", 1j, [1, (2, [3])], {"a": {"b": None}}, {(1, 2): 3},
    {1, 2}, {(1, "a")}, {Colour.RED}, Colour.RED, Point(1, 2), OrderedDict(a=1), Counter("aab"), range(3), Point,
    np.float64(0.5), np.arange(3), np.array([Colour.RED], dtype=object), {Point: 1},
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_copy_is_recorded_as_the_value_itself(value: Any) -> None:
    assert to_json(plain(value)) == to_json(value)


@pytest.mark.parametrize("value", [3, 2.5, "a", b"a", [1, (2, {"a": {3}})], np.float64(0.5)], ids=repr)
def test_a_copy_of_plain_values_has_their_types(value: Any) -> None:
    assert plain(value) == value and type(plain(value)) is type(value)


def test_a_copy_does_not_change_with_the_value() -> None:
    image, value = Image.new("L", (2, 2)), {"a": [1], "array": np.zeros(2)}
    copied, shown = plain(value), plain(image)
    value["a"].append(2)
    value["array"][0] = 1
    image.putpixel((0, 0), 9)
    assert copied["a"] == [1] and copied["array"].tolist() == [0, 0] and shown.getpixel((0, 0)) == 0


def test_a_value_without_an_end_becomes_a_text() -> None:
    doubled: list[Any] = []
    for _ in range(40):
        doubled = [doubled, doubled]
    for value in (Endless(), doubled, [0] * (MAX_VALUES + 1)):
        assert plain(value) == f"(more than {MAX_VALUES} values)"
    circle: list[Any] = []
    circle.append(circle)
    assert "[[...]]" in str(plain(circle))
    assert "lock object" in plain(threading.Lock())
