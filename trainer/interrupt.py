"""How a command that runs an event loop is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal


def cancel_on_sigterm() -> None:
    """Have SIGTERM cancel the task at hand, as Ctrl-C does; elsewhere than in the main thread nothing happens."""
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
