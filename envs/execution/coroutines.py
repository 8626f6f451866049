"""Awaits coroutines of users on an event loop of their own: one that blocks or hangs keeps no episode from going on.

All run on one loop that lasts as long as the program, so that they may share clients and locks between calls.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

from envs.contract import EnvFault
from envs.execution.runner import CallNames, trace_of

R = TypeVar("R")


@functools.cache
def loop_of_users() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="coroutines of users").start()
    return loop


async def await_within(limit_s: float | None, names: CallNames, coroutine: Coroutine[Any, Any, R]) -> R:
    """Await a user's coroutine within a time limit, if there is one; every exception becomes an `EnvFault`."""
    waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_guarded(names, coroutine), loop_of_users()))
    try:
        done, _ = await asyncio.wait([waiting], timeout=limit_s)
        if done:
            return waiting.result()
        raise EnvFault(f"{_stack(coroutine)}{names.too_long} took longer than {limit_s:g} s", timed_out=True)
    finally:
        waiting.cancel()  # of the coroutine too, where it still runs


async def _guarded(names: CallNames, coroutine: Coroutine[Any, Any, R]) -> R:
    try:
        return await coroutine
    except EnvFault:
        raise
    except BaseException as error:  # SystemExit would end the loop
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise EnvFault(f"{names.raised} raised: {trace_of(error)}") from None


def _stack(coroutine: Any) -> str:
    """Return where a coroutine waits, outermost call first."""
    frames: list[traceback.FrameSummary] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        coroutine = coroutine.cr_await
    return "".join(traceback.format_list(frames))
