"""Runs blocking work beside an event loop that runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeVar

from trainer.checkpoint.cancel import CANCEL

P = ParamSpec("P")
T = TypeVar("T")

#: Held by the call that works: models are loaded and signals handled for the whole process.
_TURN = threading.Lock()


def run_blocking(work: Callable[[], T]) -> T:
    """Return what `work` returns. It may start an event loop of its own, also where one runs already.

    Ctrl-C, or a notebook's stop button, ends a run as it does on the command line: everything so far is kept.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    call = _Call(work)
    try:
        return call.future.result()
    except KeyboardInterrupt:
        call.cancel()
        return call.future.result()


def as_coroutine(function: Callable[P, T], example: str) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the `_async` twin of a public function: the event loop goes on while it works.

    Calls at the same time take turns. `example` are the arguments that its docstring shows.
    """

    @functools.wraps(function)
    async def call(*args: P.args, **settings: P.kwargs) -> T:
        working = _Call(lambda: function(*args, **settings))
        wrapped = asyncio.wrap_future(working.future)
        try:
            return await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            await asyncio.to_thread(working.cancel)
            await asyncio.to_thread(working.thread.join)
            await asyncio.wait([wrapped])
            raise

    twin = f"{function.__name__}_async"
    call.__name__ = twin
    call.__qualname__ = twin
    call.__doc__ = f"""Do what `{function.__name__}` does while the event loop goes on.

    Cancelling the call ends it as Ctrl-C does.

    Example::

        result = await tt.{twin}({example})
    """
    return call


class _Call(Generic[T]):
    """Work on a thread of its own, once it is its turn."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._work = work
        self._is_cancelled = threading.Event()
        self.thread = threading.Thread(target=self._run, name="trueturn", daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        """Cancel the run, as soon as it runs."""
        self._is_cancelled.set()
        while self.thread.is_alive():
            if cancel := CANCEL.pop(self.thread.ident or 0, None):
                cancel()
                return
            self.thread.join(0.05)

    def _run(self) -> None:
        while not _TURN.acquire(timeout=0.05):
            if self._is_cancelled.is_set():
                self.future.set_exception(KeyboardInterrupt())
                return
        try:
            self.future.set_result(self._work())
        except BaseException as error:
            self.future.set_exception(error)
        finally:
            CANCEL.pop(threading.get_ident(), None)  # the next thread may have the same number
            _TURN.release()
