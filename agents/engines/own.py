"""Engines by name: the embedded one, and those of users, named as module:NAME, file.py:NAME or an entry point.

A user's function takes an `EngineSetup` and returns an `Engine`; to be trained, it must be a `TrainableEngine`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Literal

from agents.engines.base import Engine, EngineSetup, TrainableEngine
from envs.config.plugins import Plugin
from envs.errors import UserError

EngineName = Literal["auto", "hf", "sglang"]
ENGINE = Plugin("an engine", ("setup",))

MakeEngine = Callable[[EngineSetup], Any]


def find_engine(reference: str, field: str = "--engine") -> MakeEngine:
    """Return the function that makes an engine, imported and checked. Raises `UserError` where it cannot be used."""
    if reference == "hf":
        return make_embedded
    return ENGINE.load(field, reference)


def make_engine(reference: str, setup: EngineSetup, protocol: type = Engine, field: str = "--engine") -> Any:
    """Return the engine that a user's function makes, which has what `protocol` promises.

    Raises:
        UserError: the function raises, or what it returns lacks a method or property of the protocol.
    """
    engine = ENGINE.call(field, reference, find_engine(reference, field), setup)
    if missing := missing_parts(engine, protocol):
        rule = f"'{reference}' must return an object with {', '.join(missing)}"
        fix = f"add what {protocol.__name__} of agents/engines/base.py describes"
        raise UserError(field, rule, type(engine).__name__, fix)
    return engine


def make_embedded(setup: EngineSetup) -> Engine:
    """Return the embedded engine."""
    import torch

    from agents.engines.hf import HFEngine
    from agents.model.policy import PolicyModel

    network = PolicyModel.load(setup.model_path, getattr(torch, setup.dtype))
    return HFEngine(network, setup.context_length, setup.max_batch, setup.device)


def missing_parts(found: object, protocol: type = TrainableEngine) -> list[str]:
    """Return what an object lacks of a protocol: whole numbers, and methods that are async and take its parameters.

    >>> missing_parts(object(), Session)
    ['async generate(request)']
    """
    # What every engine has comes before what only training needs.
    names = [name for base in reversed(protocol.__mro__) for name in vars(base) if name[0] != "_"]
    return [part for name in names if (part := _missing_part(found, name, inspect.getattr_static(protocol, name)))]


def _missing_part(found: object, name: str, promised: Any) -> str:
    try:
        own = getattr(found, name, None)
    except Exception as error:  # a property of the user
        return f"{name}, which must not raise ({type(error).__name__}: {error})"
    if isinstance(promised, property):
        if isinstance(own, int) and not isinstance(own, bool):
            return ""
        return f"{name}, a whole number"
    parameters = [*inspect.signature(promised).parameters][1:]
    is_async = inspect.iscoroutinefunction(promised)
    with contextlib.suppress(TypeError):  # also of what is no function
        inspect.signature(own).bind(*parameters)  # type: ignore[arg-type]
        if not is_async or inspect.iscoroutinefunction(own):
            return ""
    return f"{'async ' * is_async}{name}({', '.join(parameters)})"
