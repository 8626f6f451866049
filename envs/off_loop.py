"""Runs coroutines of users where an event loop may run already."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def off_loop(function: Callable[..., Any], *args: object) -> Any:
    """Call outside of any event loop: directly, or on another thread if this thread runs one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function(*args)
    # An event loop cannot be run inside another one of the same thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def awaited(value: Any) -> Any:
    """Return a value; a coroutine is run on an event loop of its own, and its result returned."""
    if inspect.iscoroutine(value):
        return off_loop(asyncio.run, value)
    return value
