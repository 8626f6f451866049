"""Environments that end the program, or take its memory, its stack or its terminal."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

from tests.catalogue.base import Row, Sound, Step

_kept: list[bytearray] = []


class Grows(Sound):
    def reset(self) -> Any:
        _kept.append(bytearray(b"x" * 4 * 2**20))
        return super().reset()


class Bottomless(Sound):
    def step(self, response_text: str) -> Step:
        return self.step(response_text)


class DeepOnLongTexts(Sound):
    def step(self, response_text: str) -> Step:
        self.descend(len(response_text))
        return super().step(response_text)

    def descend(self, depth: int) -> None:
        if depth:
            self.descend(depth - 1)


class Greedy(Sound):
    def step(self, response_text: str) -> Step:
        bytearray(2**60)
        return super().step(response_text)


class Exits(Sound):
    def step(self, response_text: str) -> Step:
        os._exit(0)


class ExitsOnLongTexts(Sound):
    def step(self, response_text: str) -> Step:
        if len(response_text) > 50_000:
            os._exit(3)
        return super().step(response_text)


class Quits(Sound):
    def step(self, response_text: str) -> Step:
        sys.exit(3)


class Interrupts(Sound):
    def step(self, response_text: str) -> Step:
        raise KeyboardInterrupt


class InterruptsInline(Interrupts):
    pass


class Crashes(Sound):
    def step(self, response_text: str) -> Step:
        ctypes.string_at(0)
        return super().step(response_text)


class CrashesInClose(Sound):
    def close(self) -> None:
        ctypes.string_at(0)


class Aborts(Sound):
    def step(self, response_text: str) -> Step:
        os.abort()


class Forks(Sound):
    def step(self, response_text: str) -> Step:
        os.fork()
        return super().step(response_text)


class ClosesAll(Sound):
    def step(self, response_text: str) -> Step:
        os.closerange(3, 1024)
        return super().step(response_text)


class Alarmed(Sound):
    def step(self, response_text: str) -> Step:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        time.sleep(0.1)
        return super().step(response_text)


class Floods(Sound):
    def step(self, response_text: str) -> Step:
        print("step\n" * 20_000)
        return super().step(response_text)


class FloodsByC(Sound):
    def step(self, response_text: str) -> Step:
        os.write(2, b"debug\n" * 20_000)
        return super().step(response_text)


ROWS = (
    Row(Grows, "every episode keeps 4 MiB", "leftovers", "MiB of memory"),
    Row(Bottomless, "a step calls itself without end", "contract", "RecursionError"),
    Row(DeepOnLongTexts, "long texts exhaust the stack", "malformed calls", "RecursionError"),
    Row(Greedy, "a step asks for more memory than there is", "contract", "MemoryError"),
    Row(Exits, "a step ends the process", "contract", "ended the process: exit code 0"),
    Row(ExitsOnLongTexts, "long texts end the process", "malformed calls", "ended the process: exit code 3"),
    Row(Quits, "a step calls sys.exit", "contract", "SystemExit"),
    Row(Interrupts, "a step raises KeyboardInterrupt", "contract", "KeyboardInterrupt"),
    Row(InterruptsInline, "the same on the event loop", "contract", "KeyboardInterrupt", {"isolation": "inline"}),
    Row(Crashes, "native code crashes", "contract", "signal SIGSEGV; with"),
    Row(CrashesInClose, "native code crashes in close", "closing", "signal SIGSEGV"),
    Row(Aborts, "native code aborts", "contract", "signal SIGABRT"),
    Row(Forks, "a step forks, and both processes go on", "leftovers", "processes"),
    Row(ClosesAll, "a step closes the files of all", "contract", "ended the process"),
    Row(Alarmed, "a step sets an alarm that nobody handles", "contract", "signal SIGALRM"),
    Row(Floods, "every step prints 100 kB", "leftovers", "bytes of output"),
    Row(FloodsByC, "every step writes 120 kB past Python", "leftovers", "bytes of output"),
)
