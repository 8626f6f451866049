"""Lets the turns of a server go together: whenever it begins to read some, all that it writes stand still.

A turn of a few dozen new tokens costs a stop, not the reading of its tokens, so few stops for many turns are better
than many for one each. docs/rollouts.md says what recorded runs tell of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: So many turns that are written let one more wait: with 128, sixteen go together.
SHARE = 8


class Gate:
    """Where turns wait for others, for `wait_s` at most, while the server writes.

    A turn waits until those that wait are an eighth of those that have been written for `wait_s` or longer. So it never
    waits where a server writes for a few, nor where many begin at once. 0: no turn waits.

    Example::

        await gate.enter()      # may wait
        with gate.writing():    # not before: the engine may have been paused meanwhile
            answer = await client.call("generate", body)
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._began: dict[object, float] = {}
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> None:
        """Wait for other turns."""
        if not self.wait_s:
            return
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting[mine] = None
        if self._timer is None:
            self._timer = loop.call_later(self.wait_s, self._open)
        self._open_if_due()
        try:
            await mine
        finally:  # one that is cancelled waits no longer
            self._waiting.pop(mine, None)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Count a turn as written."""
        turn = object()
        self._began[turn] = time.monotonic()
        try:
            yield
        finally:
            del self._began[turn]
            self._open_if_due()

    def _open_if_due(self) -> None:
        before = time.monotonic() - self.wait_s
        if self._waiting and SHARE * len(self._waiting) >= sum(began <= before for began in self._began.values()):
            self._open()

    def _open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)
