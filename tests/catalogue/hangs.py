"""Environments that hang: in Python or in C, in every call, with ordinary and with hostile texts."""

from __future__ import annotations

import asyncio
import ctypes
import re
import subprocess
import threading
import time
from typing import Any

from envs import Sample, tool
from tests.catalogue.base import SHORT, Row, Sound, Step

_lock = threading.Lock()


class Sleeper(Sound):
    def step(self, response_text: str) -> Step:
        time.sleep(600)
        return super().step(response_text)


class Spinner(Sound):
    def step(self, response_text: str) -> Step:
        while True:
            pass


class Backtracker(Sound):
    def step(self, response_text: str) -> Step:
        re.match(r"(\w+\s?)*$", response_text)
        return super().step(response_text)


class ToolBacktracker(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Return the price of a fruit."""
        return 3 if re.match(r"(7+)+$", fruit) else 4


class GraderBacktracker(Sound):
    def reward(self, final_text: str) -> float:
        return float(bool(re.fullmatch(r"(a|aa)+", final_text))) or super().reward(final_text)


class Keeper(Sound):
    def step(self, response_text: str) -> Step:
        ctypes.PyDLL(None).sleep(600)
        return super().step(response_text)


class Adder(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Return the price of a fruit."""
        return sum(range(10**14))


class ResetKeeper(Sound):
    def reset(self) -> Any:
        ctypes.PyDLL(None).sleep(600)
        return super().reset()


class NeverBuilt(Sound):
    def __init__(self, sample: Sample, args: Any) -> None:
        super().__init__(sample, args)
        time.sleep(600)


class NeverReset(Sound):
    def reset(self) -> Any:
        time.sleep(600)
        return super().reset()


class NeverClosed(Sound):
    def close(self) -> None:
        time.sleep(600)


class CloseKeeper(Sound):
    def close(self) -> None:
        ctypes.PyDLL(None).sleep(600)


class NeverPaid(Sound):
    def reward(self, final_text: str) -> float:
        time.sleep(600)
        return super().reward(final_text)


class Deadlock(Sound):
    def step(self, response_text: str) -> Step:
        _lock.acquire()
        return super().step(response_text)


class WaitsForItself(Sound):
    def step(self, response_text: str) -> Step:
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        thread.join()
        return super().step(response_text)


class AsksTheTerminal(Sound):
    def step(self, response_text: str) -> Step:
        input("Go on? ")
        return super().step(response_text)


class ChildOnTheTerminal(Sound):
    @tool
    def price(self, fruit: str) -> Any:
        """Return the price of a fruit."""
        return subprocess.run(["cat"], capture_output=True, text=True, check=True).stdout


class AsyncSleeper(Sound):
    @tool
    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(600)
        return "over"


class SlowReader(Sound):
    def step(self, response_text: str) -> Step:
        time.sleep(600 if len(response_text) > 50_000 else 0)
        return super().step(response_text)


class InlineSleeper(Sound):
    def step(self, response_text: str) -> Step:
        time.sleep(600)
        return super().step(response_text)


class InlineBacktracker(ToolBacktracker):
    pass


class ProcessBacktracker(ToolBacktracker):
    pass


KEEPS, LONGER = "kept the interpreter", "took longer than 1 s"
IN_TOOL, UNBOUND = f"{KEEPS} for more than 1 s in price", "under `isolation: inline` no time limit"
INLINE = {**SHORT, "isolation": "inline"}

ROWS = (
    Row(Sleeper, "a step sleeps", "contract", f"{LONGER} (hangs.py:", SHORT),
    Row(Spinner, "a step loops for ever", "contract", f"{LONGER} (hangs.py:", SHORT),
    Row(Backtracker, "a regular expression backtracks over a text", "malformed calls", KEEPS, SHORT),
    Row(ToolBacktracker, "one backtracks over an argument", "malformed calls", IN_TOOL, SHORT),
    Row(GraderBacktracker, "one backtracks over the last text", "malformed calls", KEEPS, SHORT),
    Row(Keeper, "C code sleeps with the interpreter's lock", "contract", KEEPS, SHORT),
    Row(Adder, "a loop of C takes years", "contract", IN_TOOL, SHORT),
    Row(ResetKeeper, "C code in reset sleeps with the lock", "contract", f"reset: {KEEPS}", SHORT),
    Row(NeverBuilt, "building sleeps", "contract", LONGER, SHORT),
    Row(NeverReset, "reset sleeps", "contract", LONGER, SHORT),
    Row(NeverClosed, "close sleeps", "closing", LONGER, SHORT),
    Row(CloseKeeper, "C code in close sleeps with the lock", "closing", KEEPS, SHORT),
    Row(NeverPaid, "reward sleeps", "contract", LONGER, SHORT),
    Row(Deadlock, "a lock is never released", "contract", LONGER, SHORT),
    Row(WaitsForItself, "a thread never ends, and is waited for", "contract", LONGER, SHORT),
    Row(AsksTheTerminal, "a step asks whoever sits at the terminal", "contract", LONGER, SHORT),
    Row(ChildOnTheTerminal, "a child waits for what is typed", "contract", LONGER, SHORT),
    Row(AsyncSleeper, "an async tool sleeps", "contract", LONGER, SHORT),
    Row(SlowReader, "a long text takes for ever", "malformed calls", LONGER, SHORT),
    Row(InlineSleeper, "a step sleeps where no limit acts", "contract", UNBOUND, INLINE),
    Row(InlineBacktracker, "one backtracks there", "malformed calls", UNBOUND, INLINE),
    Row(
        ProcessBacktracker, "one backtracks in a process of its own", "malformed calls", LONGER,
        {**SHORT, "isolation": "process"},
    ),
)  # fmt: skip
