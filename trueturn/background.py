"""Runs blocking work beside an event loop that runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from trainer.checkpoint.cancel import CANCEL

T = TypeVar("T")


def run_blocking(work: Callable[[], T]) -> T:
    """Return what `work` returns. It may start an event loop of its own, also where one runs already.

    Ctrl-C, or a notebook's stop button, ends a run as it does on the command line: everything so far is kept.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    future, thread = _start(work)
    try:
        return future.result()
    except KeyboardInterrupt:
        _cancel(thread)
        return future.result()


async def run_beside(work: Callable[[], T]) -> T:
    """Return what `work` returns, while the event loop goes on. Cancelling the call ends the run in the same way."""
    future, thread = _start(work)
    wrapped = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(wrapped)
    except asyncio.CancelledError:
        _cancel(thread)
        await asyncio.wait([wrapped])
        raise


def _start(work: Callable[[], T]) -> tuple[Future[T], threading.Thread]:
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:  # the next thread may have the same number
            CANCEL.pop(threading.get_ident(), None)

    thread = threading.Thread(target=target, name="trueturn", daemon=True)
    thread.start()
    return future, thread


def _cancel(thread: threading.Thread) -> None:
    """Cancel the run of a thread, as soon as it runs."""
    while thread.is_alive():
        if cancel := CANCEL.pop(thread.ident or 0, None):
            cancel()
            return
        thread.join(0.05)
