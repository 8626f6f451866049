"""Claims about tools: schema, argument check and corrective text from a typed method; content from what it returns."""

from __future__ import annotations

import datetime
import gc
import inspect
import json
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, Field

from envs.tools import BadArgumentsError, Tool, marked_methods, to_content, tool


class Colour(str, Enum):  # noqa: UP042 - as users write it
    RED = "red"


class Point(BaseModel):
    x: float
    y: float = 0.0


def price(fruit: str, pieces: int = 1) -> float:
    """Return the price of some fruit.

    It changes from day to day.

    Args:
        fruit: the name,
            in lower case
        pieces: how many
    """
    return len(fruit) * pieces


def test_the_schema_is_the_signature_and_the_docstring() -> None:
    assert Tool.of(price).schema == {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Return the price of some fruit. It changes from day to day.",
            "parameters": {
                "type": "object",
                "properties": {
                    "fruit": {"type": "string", "description": "the name, in lower case"},
                    "pieces": {"type": "integer", "description": "how many", "default": 1},
                },
                "required": ["fruit"],
            },
        },
    }


def test_the_schema_has_its_keys_in_the_order_in_which_templates_are_read() -> None:
    written = json.dumps(Tool.of(price).schema["function"]["parameters"])
    assert written.startswith('{"type": "object", "properties": {"fruit": {"type": "string", "description"')


def test_types_of_every_kind_become_schemas() -> None:
    def draw(
        where: Point, colour: Literal["red", "blue"], tags: list[str], size: Annotated[int, Field(ge=1, le=9)] = 3
    ) -> None: ...

    parameters = Tool.of(draw).schema["function"]["parameters"]
    properties = parameters["properties"]
    assert properties["colour"] == {"type": "string", "enum": ["red", "blue"]}
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}}
    assert properties["size"] == {"type": "integer", "default": 3, "maximum": 9, "minimum": 1}
    assert parameters["$defs"]["Point"]["properties"]["x"] == {"type": "number"}
    assert "title" not in json.dumps(parameters)


def test_a_parameter_may_have_any_name() -> None:
    def f(schema: str, _x: int, title: str, copy: bool) -> None: ...

    made = Tool.of(f)
    arguments = {"schema": "a", "_x": 1, "title": "b", "copy": True}
    assert made.check(arguments) == arguments
    assert list(made.schema["function"]["parameters"]["properties"]) == list(arguments)


def test_a_parameter_without_a_type_is_the_authors_error() -> None:
    def f(x): ...  # type: ignore[no-untyped-def]

    with pytest.raises(TypeError, match=r"tool f: parameter 'x' needs a type; write x: str"):
        Tool.of(f)


@pytest.mark.parametrize("kind", [Callable, np.ndarray, Image.Image])
def test_a_parameter_of_a_type_that_json_cannot_hold_is_named(kind: object) -> None:
    def f(x: int, y: str) -> None: ...

    f.__annotations__["y"] = kind
    with pytest.raises(
        TypeError, match=r"tool f: parameter 'y' has a type that JSON cannot hold, got .*; use str, int"
    ):
        Tool.of(f)


def test_a_parameter_that_cannot_be_named_is_the_authors_error() -> None:
    def f(*words: str) -> None: ...

    with pytest.raises(TypeError, match="cannot be given by name"):
        Tool.of(f)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fruit": "pear"}, {"fruit": "pear"}),
        ({"fruit": "pear", "pieces": "2"}, {"fruit": "pear", "pieces": 2}),
        ({"fruit": "pear", "pieces": 2.0}, {"fruit": "pear", "pieces": 2}),
        ({"fruit": 68}, {"fruit": "68"}),
    ],
)
def test_arguments_come_as_the_types_say(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert Tool.of(price).check(given) == expected


def test_lists_and_objects_may_come_as_json_text() -> None:
    def f(points: list[Point], flags: dict[str, bool]) -> None: ...

    checked = Tool.of(f).check({"points": '[{"x": 1}, {"x": "2", "y": 3}]', "flags": '{"a": true}'})
    assert checked == {"points": [Point(x=1), Point(x=2, y=3)], "flags": {"a": True}}


def test_text_that_looks_like_json_stays_text_where_text_is_asked_for() -> None:
    assert Tool.of(price).check({"fruit": "[1]"}) == {"fruit": "[1]"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, '"fruit" is missing.'),
        ({"fruits": "pear"}, '"fruit" is missing. "fruits" is no argument of price; did you mean \'fruit\'?'),
        ({"fruit": "pear", "day": 1}, '"day" is no argument of price; known: fruit, pieces.'),
        ({"fruit": None}, '"fruit" must be a valid string.'),
        ({"fruit": ["pear"]}, '"fruit" must be a valid string.'),
        ({"fruit": True}, '"fruit" must be a valid string.'),
        (
            {"fruit": "pear", "pieces": "two"},
            '"pieces" must be a valid integer, unable to parse string as an integer.',
        ),
        ({"fruit": "pear", "pieces": 1.5}, '"pieces" must be a valid integer, got a number with a fractional part.'),
    ],
)
def test_wrong_arguments_are_explained(given: dict[str, Any], text: str) -> None:
    with pytest.raises(BadArgumentsError) as caught:
        Tool.of(price).check(given)
    assert str(caught.value) == text


def test_a_wrong_place_inside_an_argument_is_named() -> None:
    def f(at: Point) -> None: ...

    with pytest.raises(BadArgumentsError, match=r'"at\.x" is missing'):
        Tool.of(f).check({"at": {"y": 1}})


@pytest.mark.parametrize(
    "given",
    [
        {"a": "NaN"},
        {"a": "1e999"},
        {"a": "-inf"},
        {"a": "1" + "0" * 400},
        {"b": ["1", "nan"]},
        {"b": "[1, Infinity]"},
        {"c": '{"x": NaN}'},
        {"d": '{"x": {"y": [NaN]}}'},
        {"e": "Infinity"},
        {"g": {"nan": "x"}},
        {"g": '{"-inf": "x"}'},
    ],
)
def test_no_text_becomes_a_number_that_is_not_finite(given: dict[str, Any]) -> None:
    def g(
        a: float = 0, b: list[float] | None = None, c: Point | None = None, d: dict[str, Any] | None = None,
        e: int | float = 0, g: dict[float, str] | None = None,
    ) -> None: ...  # fmt: skip

    rule = "must be a (finite number|valid list|valid dictionary)"
    with pytest.raises(BadArgumentsError, match=f'^"{next(iter(given))}.* {rule}'):
        Tool.of(g).check(given)


@pytest.mark.parametrize("text", ["[" * 40 + "]" * 40, "[" * 900 + "]" * 900, '{"a": ' * 40 + "1" + "}" * 40])
def test_lists_in_a_text_nest_no_deeper_than_those_of_a_call(text: str) -> None:
    def f(a: list[Any] | dict[str, Any]) -> None: ...

    with pytest.raises(BadArgumentsError, match="must be a valid list"):
        Tool.of(f).check({"a": text})


def test_the_word_nan_stays_a_word_where_text_is_asked_for() -> None:
    def f(a: str, b: float | str) -> None: ...

    assert Tool.of(f).check({"a": "NaN", "b": "inf"}) == {"a": "NaN", "b": "inf"}


def test_no_more_than_three_problems_are_named() -> None:
    with pytest.raises(BadArgumentsError) as caught:
        Tool.of(price).check({"fruit": "a"} | {f"x{k}": 1 for k in range(50)})
    assert str(caught.value).count("is no argument") == 3


def test_the_example_has_the_required_arguments_with_values_of_their_types() -> None:
    def f(a: str, b: int, c: float, d: bool, e: list[int], g: Literal["x", "y"], h: str = "") -> None: ...

    assert Tool.of(f).example == {"a": "...", "b": 1, "c": 0.5, "d": True, "e": [], "g": "x"}


def test_marked_methods_come_in_the_order_of_their_definition_and_can_be_overridden() -> None:
    class Base:
        @tool
        def second(self) -> None: ...

        @tool(name="zeroth")
        def first(self) -> None: ...

        def no_tool(self) -> None: ...

    class Derived(Base):
        @tool
        def third(self) -> None: ...

        def first(self) -> None: ...

        second = None  # type: ignore[assignment]

    assert list(marked_methods(Base).items()) == [("second", "second"), ("first", "zeroth")]
    assert list(marked_methods(Derived).items()) == [("first", "zeroth"), ("third", "third")]
    assert Tool.of(Base().first).name == "zeroth"


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_static_method_marked_as_a_tool_is_the_authors_error(kind: Callable) -> None:
    with pytest.raises(TypeError, match="@tool needs a plain method"):
        tool(kind(price))


IMAGE = Image.new("RGB", (4, 3))


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("a text", "a text"),
        (None, ""),
        (68, "68"),
        (0.5, "0.5"),
        (True, "true"),
        ({"x": [1, "é"]}, '{"x": [1, "é"]}'),
        ([1, 2], "[1, 2]"),
        ((1, 2), "[1, 2]"),
        ({2, 1}, "[1, 2]"),
        (np.float32(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        (Point(x=1), '{"x": 1.0, "y": 0.0}'),
        (datetime.date(2026, 1, 2), '"2026-01-02"'),
        (IMAGE, [{"type": "image", "image": IMAGE}]),
        (
            ["see", IMAGE, 3],
            [{"type": "text", "text": "see"}, {"type": "image", "image": IMAGE}, {"type": "text", "text": "3"}],
        ),
        ((IMAGE, IMAGE), [{"type": "image", "image": IMAGE}] * 2),
        (np.float32(18.8), "18.8"),
        ({"x": np.array([[0.1, 18.8]], np.float16)}, '{"x": [[0.1, 18.8]]}'),
    ],
)
def test_what_a_tool_returns_becomes_content(value: object, content: object) -> None:
    assert to_content(value) == content


@pytest.mark.parametrize("value", [object(), {"x": object()}, b"\xff", lambda: None])
def test_what_cannot_be_shown_is_the_authors_error(value: object) -> None:
    with pytest.raises(TypeError, match="a tool must return text, numbers, images"):
        to_content(value)


@pytest.mark.parametrize(
    ("kind", "is_fault"),
    [
        (str, True),
        (Image.Image, True),
        (Point, True),
        (None, False),
        (str | None, False),
        (Any, False),
        (object, False),
        (inspect.Parameter.empty, False),
    ],
)
def test_a_tool_that_says_what_it_returns_and_returns_nothing_is_the_authors_error(
    kind: object, is_fault: bool
) -> None:
    def look(): ...  # type: ignore[no-untyped-def]

    if kind is not inspect.Parameter.empty:
        look.__annotations__["return"] = kind
    if not is_fault:
        assert Tool.of(look).content(None) == ""
        return
    with pytest.raises(TypeError, match=r"tool look must return \w+, got None; does it return\?"):
        Tool.of(look).content(None)


def test_the_methods_of_a_class_are_read_once_and_functions_of_an_episode_are_not_kept() -> None:
    class Base:
        @tool
        def look(self, where: str) -> None: ...

    def make() -> Callable[[str], None]:
        return lambda where: None

    assert Tool.of(Base().look).arguments is Tool.of(Base().look).arguments
    function = make()
    function.__annotations__ = {"where": str}
    kept = weakref.ref(function)
    Tool.of(function)
    del function
    gc.collect()
    assert kept() is None


def test_a_description_in_the_type_is_shown_too() -> None:
    def f(x: Annotated[int, Field(description="how far")]) -> None: ...

    assert Tool.of(f).schema["function"]["parameters"]["properties"]["x"]["description"] == "how far"


def test_the_member_of_an_enumeration_of_texts_is_its_text() -> None:
    content = to_content(Colour.RED)
    assert (content, type(content)) == ("red", str)


@pytest.mark.parametrize("name", ["x" * 50_000, "\n".join("y" * 5_000)])
def test_feedback_repeats_no_endless_name_of_an_argument(name: str) -> None:
    def price(fruit: str, pieces: int = 1) -> float: ...

    with pytest.raises(BadArgumentsError) as caught:
        Tool.of(price).check({"fruit": "apple", name: 1})
    assert len(str(caught.value)) < 200 and f'"{name[:57]}..." is no argument of price' in str(caught.value)
