"""Lets others end a run early: it then keeps everything so far, as after Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable

#: Cancels the run of a thread that is not the main one, by the thread's number.
CANCEL: dict[int, Callable[[], object]] = {}


def cancel_on_request() -> None:
    """Let SIGTERM cancel the current task, as Ctrl-C does; outside the main thread, where no signal comes, `CANCEL`."""
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    assert task is not None
    if threading.current_thread() is not threading.main_thread():
        CANCEL[threading.get_ident()] = lambda: loop.call_soon_threadsafe(task.cancel)
        return
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
