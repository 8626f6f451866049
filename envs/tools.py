"""Turns typed methods into tools: JSON schema, argument checks, and error texts for the model."""

from __future__ import annotations

import functools
import inspect
import json
import traceback
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import docstring_parser
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, create_model
from pydantic_core import to_jsonable_python

from envs.contract import MAX_IMAGE_PIXELS
from envs.errors import UserError, did_you_mean, shortened
from envs.images import check_size
from envs.tool_calls.json_call import MAX_DEPTH, decode, depth
from envs.tool_calls.types import ToolCallError
from envs.types import Content, content_parts

F = TypeVar("F", bound=Callable[..., Any])
MAX_PROBLEMS_SHOWN = 3
MAX_FAULT_CHARS = 200
#: The most characters of an argument's name that a feedback repeats; the model may have written any number.
MAX_NAME_SHOWN = 60


class ToolError(Exception):
    """A tool's error text for the model. Any other exception is a fault; the entry's `on_tool_fault` says its worth.

    Example: ``raise ToolError("There is no room 7.")``; the metrics count it under `outcome`.
    """

    def __init__(self, message: str, outcome: str = "tool_error") -> None:
        super().__init__(message)
        self.outcome = outcome


@overload
def tool(method: F) -> F: ...
@overload
def tool(*, name: str) -> Callable[[F], F]: ...
def tool(method: F | None = None, *, name: str = "") -> F | Callable[[F], F]:
    """Mark a method of a `ToolEnv` as a tool that the model may call, under its own name or another.

    Every parameter needs a type. The model reads the docstring, with its parameters. The method may be `async`.

    Example::

        @tool
        def price(self, fruit: str, pieces: int = 1) -> float:
            '''Return the price of some fruit.

            Args:
                fruit: the name, in lower case
            '''
    """
    if method is not None and not (callable(method) or isinstance(method, staticmethod | classmethod)):
        fix = "write @tool, or @tool(name=...)"
        raise UserError("@tool", "must stand over a method", repr(method), fix)

    def mark(method: F) -> F:
        if isinstance(method, staticmethod | classmethod):
            raise TypeError("@tool needs a plain method with self; remove @staticmethod or @classmethod")
        method.__tool__ = name or method.__name__  # type: ignore[attr-defined]
        return method

    if method is None:
        return mark
    return mark(method)


class BadArgumentsError(Exception):
    """The arguments of a call break the tool's signature; the message tells the model how."""


@dataclass(frozen=True)
class Tool:
    """One tool: its schema, its argument check and its function.

    Example::

        def price(fruit: str, pieces: int = 1) -> float: ...
        price_tool = Tool.of(price)
        price_tool.schema["function"]["parameters"]["required"]       # ["fruit"]
        price_tool.check({"fruit": "apple", "pieces": "2"})           # {"fruit": "apple", "pieces": 2}
        price_tool.check({"fruits": "apple"})                         # BadArgumentsError: "fruit" is missing. ...
    """

    name: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    schema: dict[str, Any]
    is_async: bool
    #: The annotated class of the result, such as `str`; None where the method may return nothing.
    result: type | None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str = "") -> Tool:
        """Read types and docstring of a function or bound method, and its name where none is given.

        Raises:
            TypeError: a parameter has no type or one that JSON cannot hold, or is *args, **kwargs or positional-only.
        """
        name = name or getattr(function, "__tool__", function.__name__)
        method = getattr(function, "__func__", None)
        if method is None:  # created for one episode: a cache would keep its values alive
            return cls(name, function, *_read_signature.__wrapped__(name, function))
        return cls(name, function, *_read_signature(name, method))

    def content(self, value: object) -> Content:
        """Convert what the function returned to a message's content.

        Raises:
            TypeError: no model takes it, or it is None where the method says that it returns something.
        """
        if value is None and self.result:
            raise TypeError(f"tool {self.name} must return {self.result.__name__}, got None; does it return?")
        return to_content(value)

    @property
    def example(self) -> dict[str, Any]:
        """Example values of the required arguments: ``{"answer": "...", "pieces": 1}``."""
        parameters = self.schema["function"]["parameters"]
        required = parameters.get("required", ())
        return {name: _example(parameters["properties"].get(name)) for name in required}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments converted to the method's types; omitted arguments with a default stay omitted.

        Numbers in text form and lists and objects in JSON form are converted.

        Raises:
            BadArgumentsError: the arguments are wrong; the text is for the model.
        """
        try:
            return self._validated(arguments)
        except ValidationError as error:
            # Models of the XML format write every value as text, and others quote lists.
            decoded = dict(arguments)
            for problem in error.errors():
                key = problem["loc"][0]
                if isinstance(text := decoded.get(str(key)), str):
                    decoded[str(key)] = _json_or_text(text)
            try:
                return self._validated(decoded)
            except ValidationError:
                # Of the first try: the model wrote that text, and not what it was decoded to.
                raise BadArgumentsError(self._explain(error)) from error

    def _validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        model = self.arguments.model_validate(dict(arguments))
        fields = self.arguments.model_fields
        known = {
            fields[field].alias or field: getattr(model, field) for field in fields if field in model.model_fields_set
        }
        return known | (model.model_extra or {})

    def _explain(self, error: ValidationError) -> str:
        known = self.schema["function"]["parameters"]["properties"]
        problems = []
        for problem in error.errors()[:MAX_PROBLEMS_SHOWN]:
            key, *inner = (str(part) for part in problem["loc"])
            place = f'"{shortened(".".join([key, *inner]), MAX_NAME_SHOWN)}"'
            if problem["type"] == "missing":
                problems.append(f"{place} is missing.")
            elif problem["type"] == "extra_forbidden" and not inner:
                if known:
                    fix = did_you_mean(key, known)
                else:
                    fix = "it takes none"
                problems.append(f"{place} is no argument of {self.name}; {fix}{'' if fix.endswith('?') else '.'}")
            else:
                rule = problem["msg"].replace("Input should be", "must be").replace("Value error, ", "")
                problems.append(f"{place} {rule[0].lower()}{rule[1:]}.")
        return " ".join(problems)


def _json_or_text(text: str) -> Any:
    """Return the value of a JSON text, read as a call's own JSON is, without NaN; the text if it is none."""
    value, end = decode(text)
    is_value = not isinstance(value, ToolCallError) and not text[end:].strip() and depth(value) <= MAX_DEPTH
    return value if is_value else text


@functools.lru_cache(maxsize=1024)
def _read_signature(
    name: str, function: Callable[..., Any]
) -> tuple[type[BaseModel], dict[str, Any], bool, type | None]:
    """Return the arguments' pydantic model, the schema, whether the function is async, and the class of its result."""
    # Annotations are texts where a module imports them from __future__.
    hints = typing.get_type_hints(function, include_extras=True)
    parsed = docstring_parser.parse(inspect.getdoc(function) or "")
    described = {parameter.arg_name: parameter.description or "" for parameter in parsed.params}
    fields: dict[str, Any] = {}
    parameters = list(inspect.signature(function).parameters.values())
    for number, parameter in enumerate(p for p in parameters if p.name != "self"):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {name}: parameter {parameter} cannot be given by name; write it as a plain parameter"
            )
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter '{parameter.name}' needs a type; write {parameter.name}: str")
        try:
            # One by one, because an error of the whole schema names no parameter.
            TypeAdapter(hints[parameter.name]).json_schema()
        except PydanticUserError as error:
            rule = f"parameter '{parameter.name}' has a type that JSON cannot hold"
            fix = "use str, int, float, bool, Literal, list, dict or a pydantic model"
            raise TypeError(f"tool {name}: {rule}, got {hints[parameter.name]!r:.80}; {fix}") from error
        if parameter.default is parameter.empty:
            default = ...
        else:
            default = parameter.default
        text = " ".join(described.get(parameter.name, "").split())
        field = Field(default, alias=parameter.name)
        if text:  # otherwise the type's own Field may hold it
            field = Field(default, alias=parameter.name, description=text)
        # Numbered names, because "schema" or "_x" cannot be fields of a model.
        fields[f"p{number}"] = (hints[parameter.name], field)
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
    arguments = create_model(name, __config__=config, **fields)
    description = " ".join(part for part in (parsed.short_description, parsed.long_description) if part)
    parameters_schema = _tidy(arguments.model_json_schema(by_alias=True))
    # No model card shows it, and it costs tokens in every prompt.
    parameters_schema.pop("additionalProperties", None)
    parameters_schema.setdefault("properties", {})
    function_schema = {"name": name, "description": " ".join(description.split()), "parameters": parameters_schema}
    result = hints.get("return")
    # Only a plain class promises a value: `str | None` and `Any` allow none.
    if not isinstance(result, type) or result in (type(None), object, Any):
        result = None
    schema = {"type": "function", "function": function_schema}
    return arguments, schema, inspect.iscoroutinefunction(function), result


#: Schema keys in the order that model cards use.
_ORDER = ("type", "enum", "description", "properties", "required")
_SCHEMAS_BY_NAME = ("properties", "$defs", "patternProperties")


def _tidy(schema: Any) -> Any:
    """Remove pydantic's titles, which repeat the names and cost tokens, and put the keys in the usual order."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title"}
    ordered = sorted(kept, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER))
    return {
        key: {name: _tidy(inner) for name, inner in kept[key].items()} if key in _SCHEMAS_BY_NAME else _tidy(kept[key])
        for key in ordered
    }


def _example(schema: Any) -> Any:
    if not isinstance(schema, Mapping):  # a stranger's schema may be True, or missing
        return "..."
    if schema.get("enum"):
        return schema["enum"][0]
    examples = {"integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}
    return examples.get(str(schema.get("type")), "...")


def fault_line(error: BaseException) -> str:
    """Return an exception as one short line, which the model reads.

    >>> fault_line(ValueError("no digits\\nat line 3"))
    'ValueError: no digits at line 3'
    """
    # Cut before it is split: an error may quote megabytes of the model's text.
    shown = "".join(traceback.format_exception_only(error))[: 10 * MAX_FAULT_CHARS]
    return shortened(" ".join(shown.split()), MAX_FAULT_CHARS)


def to_content(value: object) -> Content:
    """Convert a tool's result to a message's content: text, or a list of text and image parts.

    Text stays unchanged, an image becomes an image part, a list or tuple that holds an image becomes several parts.
    None becomes empty text; numbers, lists, dicts and pydantic models are written as JSON.

    >>> to_content(68), to_content({"x": 1.5}), to_content(["a", "b"])
    ('68', '{"x": 1.5}', '["a", "b"]')

    Raises:
        TypeError: the value, or a value in it, has another type.
        UserError: no model takes an image of this size.
    """
    if isinstance(value, Image.Image):
        check_size(value, "image", MAX_IMAGE_PIXELS)
        return [{"type": "image", "image": value}]
    if isinstance(value, list | tuple) and any(isinstance(item, Image.Image) for item in value):
        return [part for item in value for part in content_parts({"content": to_content(item)})]
    if isinstance(value, str):
        return str.__str__(value)  # plain text, also for a member of a text enum
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    """Return a JSON form of a value that `json` cannot write: pydantic's, of an array its numbers, of a set a list."""
    if str(getattr(value, "dtype", "")) in ("float16", "float32"):
        return value.astype(str).astype(float).tolist()  # the shortest decimals: 18.8, not 18.799999237060547
    if isinstance(value, set | frozenset):  # in an order that is the same in every process
        return sorted(value)
    try:
        return value.tolist() if hasattr(value, "tolist") else to_jsonable_python(value)
    except ValueError as error:  # of pydantic, or of bytes that are no text
        rule = "a tool must return text, numbers, images, or lists and dicts of text and numbers"
        raise TypeError(f"{rule}, got {type(value).__name__}") from error


@functools.cache
def marked_methods(owner: type) -> Mapping[str, str]:
    """Return the methods of a class that are marked with `tool`, with the tools' names, in order of definition.

    A method that overrides a marked one is a tool too; ``price = None`` in a subclass removes the tool.
    """
    marked: dict[str, str] = {}
    # From the oldest class on, so that tools keep their places where a subclass overrides them.
    for base in reversed(owner.__mro__):
        marked |= {name: value.__tool__ for name, value in vars(base).items() if hasattr(value, "__tool__")}
    return {method: name for method, name in marked.items() if callable(getattr(owner, method))}
