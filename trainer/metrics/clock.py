"""Measures the stages of a run's start, and those of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
#: Shorter stages of a start are left out of its line.
LEAST_S = 0.1


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


@dataclass(frozen=True)
class Stage:
    """One part of a run's start, in seconds since the command began; stages that overlap ran at the same time."""

    name: str
    start_s: float
    end_s: float


class StartClock:
    """The stages from the command to the end of step 1, in the order in which they end. Threads may share it.

    Example::

        clock = StartClock()
        with clock.stage("the learner"):
            clock.line()                    # "the learner (12 s)"
        clock.stages                        # [Stage("the learner", 0.0, 12.3)]
    """

    def __init__(self, age_s: float = 0.0) -> None:
        """Begin; the command is already `age_s` old, which its imports have taken."""
        self._began = time.monotonic() - age_s
        self._running: dict[str, float] = {}
        self.stages: list[Stage] = [Stage("imports", 0.0, round(age_s, 2))] if age_s else []

    def now_s(self) -> float:
        """Return the seconds since the command began."""
        return time.monotonic() - self._began

    def begin(self, name: str) -> None:
        """Begin a stage."""
        self._running[name] = self.now_s()

    def end(self, name: str) -> None:
        """End a stage, unless it has ended."""
        # A server's stage may be ended by the watching thread and by the run.
        if (start_s := self._running.pop(name, None)) is not None:
            self.stages.append(Stage(name, round(start_s, 2), round(self.now_s(), 2)))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as a stage."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def line(self) -> str:
        """Return what runs, and for how long: "server 0 (32 s), the learner (12 s)"."""
        # Copied, since another thread may end a stage meanwhile.
        now_s = self.now_s()
        return ", ".join(f"{name} ({now_s - start_s:.0f} s)" for name, start_s in tuple(self._running.items()))

    def summary(self) -> str:
        """Return each finished stage that took time, with begin and end: "imports 0.0-3.1 s, the learner 3.2-7.0 s"."""
        took_time = [stage for stage in self.stages if stage.end_s - stage.start_s >= LEAST_S]
        # By begin: they are kept in the order in which they end.
        stages = sorted(took_time, key=lambda stage: stage.start_s)
        return ", ".join(f"{stage.name} {stage.start_s:.1f}-{stage.end_s:.1f} s" for stage in stages)


def process_age_s() -> float:
    """Return how long this process has run; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
