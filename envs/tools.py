"""Tools from typed methods: a method in; its JSON schema, checked arguments and corrective text out."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import docstring_parser
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from envs.errors import did_you_mean
from envs.types import Content

F = TypeVar("F", bound=Callable[..., Any])
MAX_PROBLEMS_SHOWN = 3


class ToolError(Exception):
    """What a tool tells the model instead of a result; any other exception is a fault of the environment.

    Example: ``raise ToolError("There is no room 7.")``; `outcome` is what the metrics count it as.
    """

    def __init__(self, message: str, outcome: str = "tool_error") -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True)
class ToolOptions:
    """How a method is a tool: its name (empty: the method's), and how often it is tried again when it raises."""

    name: str = ""
    retries: int = 0
    backoff_s: float = 0.5


@overload
def tool(method: F) -> F: ...
@overload
def tool(*, name: str = "", retries: int = 0, backoff_s: float = 0.5) -> Callable[[F], F]: ...
def tool(method: F | None = None, *, name: str = "", retries: int = 0, backoff_s: float = 0.5) -> F | Callable[[F], F]:
    """Mark a method of a `ToolEnv` as a tool that the model may call.

    Its parameters need types; its docstring is what the model reads, parameters too. It may be `async`. With `retries`,
    an exception that is no `ToolError` is followed by another try after `backoff_s`, then twice that, and so on.

    Example::

        @tool
        def price(self, fruit: str, pieces: int = 1) -> float:
            '''Return the price of some fruit.

            Args:
                fruit: the name, in lower case
            '''
    """
    options = ToolOptions(name, retries, backoff_s)

    def mark(method: F) -> F:
        if isinstance(method, staticmethod | classmethod):
            raise TypeError("@tool goes on a plain method with self; take @staticmethod or @classmethod away")
        method.__tool__ = options  # type: ignore[attr-defined]
        return method

    return mark if method is None else mark(method)


class BadArgumentsError(Exception):
    """The arguments of a call break the tool's signature; the message says how, for the model."""


@dataclass(frozen=True)
class Tool:
    """One tool, ready to be shown, checked and called.

    Example::

        def price(fruit: str, pieces: int = 1) -> float: ...
        price_tool = Tool.of(price)
        price_tool.schema["function"]["parameters"]["required"]       # ["fruit"]
        price_tool.check({"fruit": "apple", "pieces": "2"})           # {"fruit": "apple", "pieces": 2}
        price_tool.check({"fruits": "apple"})                         # BadArgumentsError: "fruit" is missing. ...
    """

    name: str
    function: Callable[..., Any]
    options: ToolOptions
    arguments: type[BaseModel]
    schema: dict[str, Any]
    is_async: bool

    @classmethod
    def of(cls, function: Callable[..., Any], options: ToolOptions | None = None) -> Tool:
        """Read name, types and docstring of a function or bound method.

        Raises:
            TypeError: a parameter has no type, or is *args, **kwargs or positional-only.
        """
        chosen: ToolOptions = options or getattr(function, "__tool__", ToolOptions())
        name = chosen.name or function.__name__
        # What a class defines is read once; a function made for an episode is not kept after it.
        method = getattr(function, "__func__", None)
        read = _read_signature if method is not None else _read_signature.__wrapped__
        arguments, schema, is_async = read(name, method or function)
        return cls(name, function, chosen, arguments, schema, is_async)

    @property
    def example(self) -> dict[str, Any]:
        """Arguments as a call of the required ones has them: ``{"answer": "...", "pieces": 1}``."""
        parameters = self.schema["function"]["parameters"]
        required = parameters.get("required", ())
        return {name: _example(parameters["properties"][name]) for name in required}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the method's types have them; what has a default and was not given is left out.

        Numbers given as text, or lists and objects given as JSON text, are converted.

        Raises:
            BadArgumentsError: with a text for the model.
        """
        try:
            return self._validated(arguments)
        except ValidationError as error:
            decoded = dict(arguments)
            for problem in error.errors():
                key = problem["loc"][0]
                if isinstance(text := decoded.get(str(key)), str):
                    decoded[str(key)] = _json_or_text(text)
            try:
                return self._validated(decoded)
            except ValidationError:
                raise BadArgumentsError(self._explain(error)) from error

    def _validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        model = self.arguments.model_validate(dict(arguments))
        fields = self.arguments.model_fields
        return {fields[field].alias or field: getattr(model, field) for field in model.model_fields_set}

    def _explain(self, error: ValidationError) -> str:
        known = self.schema["function"]["parameters"]["properties"]
        problems = []
        for problem in error.errors()[:MAX_PROBLEMS_SHOWN]:
            key, *inner = (str(part) for part in problem["loc"])
            place = f'"{".".join([key, *inner])}"'
            if problem["type"] == "missing":
                problems.append(f"{place} is missing.")
            elif problem["type"] == "extra_forbidden" and not inner:
                fix = did_you_mean(key, known) if known else "it takes none"
                problems.append(f"{place} is no argument of {self.name}; {fix}{'' if fix.endswith('?') else '.'}")
            else:
                rule = problem["msg"].replace("Input should be", "must be").replace("Value error, ", "")
                problems.append(f"{place} {rule[0].lower()}{rule[1:]}.")
        return " ".join(problems)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@functools.lru_cache(maxsize=1024)
def _read_signature(name: str, function: Callable[..., Any]) -> tuple[type[BaseModel], dict[str, Any], bool]:
    """Return the model of a function's arguments, the tool's schema as the template takes it, and if it is async."""
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
        default = ... if parameter.default is parameter.empty else parameter.default
        text = " ".join(described.get(parameter.name, "").split())
        field = Field(default, alias=parameter.name)
        if text:  # else it may stand in the type's own Field
            field = Field(default, alias=parameter.name, description=text)
        # Under a name of our own, for "schema" or "_x" cannot be fields of a model.
        fields[f"p{number}"] = (hints[parameter.name], field)
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=False)
    arguments = create_model(name, __config__=config, **fields)
    description = " ".join(part for part in (parsed.short_description, parsed.long_description) if part)
    parameters_schema = _tidy(arguments.model_json_schema(by_alias=True))
    parameters_schema.pop("additionalProperties", None)
    parameters_schema.setdefault("properties", {})
    function_schema = {"name": name, "description": " ".join(description.split()), "parameters": parameters_schema}
    return arguments, {"type": "function", "function": function_schema}, inspect.iscoroutinefunction(function)


#: The keys of a schema in the order in which model cards write them.
_ORDER = ("type", "enum", "description", "properties", "required")
_SCHEMAS_BY_NAME = ("properties", "$defs", "patternProperties")


def _tidy(schema: Any) -> Any:
    """Drop pydantic's titles, which repeat the names and cost the model tokens, and put keys in the usual order."""
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


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    examples = {"integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}
    return examples.get(str(schema.get("type")), "...")


def to_content(value: object) -> Content:
    """Return what a tool returned as a message's content: text, or a list of text and image parts.

    Text stays as it is, a picture becomes an image part, a list or tuple with a picture in it becomes several parts.
    None is empty text; numbers, lists, dicts and pydantic models are written as JSON.

    >>> to_content(68), to_content({"x": 1.5}), to_content(["a", "b"])
    ('68', '{"x": 1.5}', '["a", "b"]')

    Raises:
        TypeError: the value, or something in it, is none of these.
    """
    if isinstance(value, Image.Image):
        return [{"type": "image", "image": value}]
    if isinstance(value, list | tuple) and any(isinstance(item, Image.Image) for item in value):
        return [part for item in value for part in _parts(to_content(item))]
    if isinstance(value, str):
        return str.__str__(value)  # also of an enum's member
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _parts(content: Content) -> Sequence[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _plain(value: object) -> Any:
    """Return what `json` can write of a value that it does not know."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    for method in ("tolist", "isoformat"):  # of arrays and their numbers; of dates and times
        if callable(found := getattr(value, method, None)):
            return found()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(
        f"a tool must return text, numbers, images, or lists and dicts of text and numbers, got {type(value).__name__}"
    )


@functools.cache
def marked_methods(owner: type) -> Mapping[str, ToolOptions]:
    """Return the methods of a class that are marked with `tool`, and how, in the order in which they were defined.

    A method that overrides a marked one is a tool as well; ``price = None`` in a subclass takes the tool away.
    """
    marked: dict[str, ToolOptions] = {}
    for base in reversed(owner.__mro__):
        for name, value in vars(base).items():
            if (options := getattr(value, "__tool__", None)) is not None:
                marked[name] = options
    return {name: options for name, options in marked.items() if callable(getattr(owner, name))}
