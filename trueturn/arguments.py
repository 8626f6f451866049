"""Checks what a call of a public function is given, and words every error of it in Python, not in flags."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, TypeVar, cast, get_type_hints

import numpy as np
from pydantic import ConfigDict, InstanceOf, TypeAdapter, ValidationError

from envs.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])

#: The attribute of a public function with the settings of its command that are none of the call.
ELSEWHERE = "settings_elsewhere"
_ANY_TYPE = ConfigDict(arbitrary_types_allowed=True)
#: A command line, which stays as it is; the setting that an error is about; a flag, perhaps before a number; the word.
_FLAG = re.compile(
    r"python -m .*|^(?P<field>\w+)=|(?<![\w-])--(?P<flag>[a-z][a-z0-9-]*)(?P<value> (?=\d))?|\bflag(?=s?\b)"
)


#: The default of an argument whose place a setting or a recording takes. None is an error, as for any other argument.
NOT_GIVEN: Any = type("NotGiven", (), {"__repr__": lambda self: "not given"})()


def public(*, without: Collection[str] = (), **names: str) -> Callable[[F], F]:
    """Check the arguments of a public function by its annotations, and name arguments in its errors, not flags.

    `names` has the settings of the command that the call has under another name, `without` those that it has not.

    Example::

        @public(size="num_problems")
        def rollout(env: Environment | str, num_problems: int = 32, **settings: Any) -> Rollout: ...

        rollout("geo3k", None)     # UserError: num_problems=: must be int, got None; see help(tt.rollout)
        rollout("geo3k", size=3)   # UserError: size=: is no setting of this call, got 3; give num_problems=
    """

    names = dict.fromkeys(without, "") | names

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **settings: Any) -> Any:
            _check(function, args, settings, names)
            with _in_python(_help_of(function), names):
                return function(*args, **settings)

        setattr(call, ELSEWHERE, frozenset(names))
        return cast(F, call)

    return decorate


def _check(
    function: Callable[..., Any], args: tuple[Any, ...], settings: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Raise `UserError` for an argument of another type than its annotation says, or under a name of the command."""
    parameters = inspect.signature(function).parameters
    for name in settings.keys() & names.keys() - parameters.keys():
        if names[name]:
            fix = f"give {names[name]}="
        else:
            fix = f"leave it out; see {_help_of(function)}"
        raise UserError(f"{name}=", "is no setting of this call", settings[name], fix)
    given = inspect.signature(function).bind(*args, **settings).arguments
    for name, adapter in _adapters(function).items():
        if name not in given:
            continue
        value = given[name]
        try:
            adapter.validate_python((value.item() if isinstance(value, np.generic) else value,), strict=True)
        except ValidationError as error:
            rule = f"must be {parameters[name].annotation}"
            raise UserError(f"{name}=", rule, value, f"see {_help_of(function)}") from error


@functools.cache
def _adapters(function: Callable[..., Any]) -> Mapping[str, TypeAdapter[Any]]:
    """Return what checks each parameter of its own; the settings are checked as those of the command."""
    parameters = inspect.signature(function).parameters
    annotated = {
        name: each.annotation
        for name, each in parameters.items()
        if each.annotation is not each.empty and each.kind is not each.VAR_KEYWORD
    }
    hints = get_type_hints(SimpleNamespace(__annotations__=annotated), function.__globals__)
    for name, hint in hints.items():
        if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            hints[name] = tuple[hint, ...]
        elif is_dataclass(hint):
            hints[name] = InstanceOf[hint]
    # In a tuple, because pydantic takes no `config` for a dataclass alone.
    one: Any = tuple
    return {name: TypeAdapter(one[hint], config=_ANY_TYPE) for name, hint in hints.items()}


def _help_of(function: Callable[..., Any]) -> str:
    return f"help(tt.{function.__qualname__.removesuffix('.__init__')})"


@contextlib.contextmanager
def _in_python(help_text: str, names: Mapping[str, str]) -> Iterator[None]:
    """Name the arguments of a call in an error that names the flags of a command.

    Example: "--max-turns: must be over 3; add --samples 2" becomes "max_turns=: must be over 3; add samples=2".
    """

    def keyword(found: re.Match[str]) -> str:
        if found[0] == "flag":
            return "keyword"
        if found["flag"] == "help":
            return help_text
        name = (found["flag"] or found["field"] or "").replace("-", "_")
        if not name:
            return found[0]
        is_assigned = found["value"] is not None or found.start() == 0
        return (names.get(name) or name) + "=" * is_assigned

    try:
        yield
    except UserError as error:
        error.field, error.rule, error.fix = (_FLAG.sub(keyword, text) for text in (error.field, error.rule, error.fix))
        error.args = (_FLAG.sub(keyword, str(error)),)
        raise
