"""Measures the stages of a step."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class StepClock:
    """The seconds of each stage of one step, by the name that they have in the metrics.

    Example::

        clock = StepClock()
        rollout = await clock.time("rollout_s", rollouts.collect(8))
        clock.seconds["rollout_s"], clock.total_s       # 2.1, 2.1
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    async def time(self, stage: str, work: Awaitable[T]) -> T:
        """Await `work`, note how long it took, and return its result."""
        started = time.perf_counter()
        result = await work
        self.seconds[stage] = time.perf_counter() - started
        return result

    @property
    def total_s(self) -> float:
        """The time since the step began."""
        return time.perf_counter() - self._started
