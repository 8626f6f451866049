"""Environments that leave something behind in the program, or change it for all others."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy

from tests.catalogue.base import Row, Sound, Step

_kept: list[Any] = []


class Leaves(Sound):
    """Calls `leave` in every step."""

    def step(self, response_text: str) -> Step:
        self.leave()
        return super().step(response_text)

    def leave(self) -> None:
        raise NotImplementedError


class Children(Leaves):
    def leave(self) -> None:
        subprocess.Popen(["sleep", "600.125"])


class Zombies(Leaves):
    def leave(self) -> None:
        _kept.append(subprocess.Popen(["true"]))


class Threads(Leaves):
    def leave(self) -> None:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


class Files(Leaves):
    def leave(self) -> None:
        _kept.append(Path(os.devnull).open())  # noqa: SIM115 - the fault


class Sockets(Leaves):
    def leave(self) -> None:
        _kept.append(socket.socket())


class Walks(Leaves):
    def leave(self) -> None:
        os.chdir("/")


class Strands(Leaves):
    def leave(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)


class Sets(Leaves):
    def leave(self) -> None:
        os.environ["CATALOGUE"] = "left"


class Patches(Leaves):
    def leave(self) -> None:
        time.time = lambda: 0.0


class Temporary(Leaves):
    def leave(self) -> None:
        tempfile.mkdtemp()


class Handlers(Leaves):
    def leave(self) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: None)


class Alarms(Leaves):
    def leave(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 3600)


class Seeds(Leaves):
    def leave(self) -> None:
        random.seed(0)


class NumpySeeds(Leaves):
    def leave(self) -> None:
        numpy.random.seed(0)


class Logs(Leaves):
    def leave(self) -> None:
        logging.basicConfig(level=logging.DEBUG, force=True)


class Mutes(Leaves):
    def leave(self) -> None:
        logging.disable(logging.CRITICAL)


class Swaps(Leaves):
    def leave(self) -> None:
        sys.stdout = sys.stderr


class Deepens(Leaves):
    def leave(self) -> None:
        sys.setrecursionlimit(5000)


class Hurries(Leaves):
    def leave(self) -> None:
        socket.setdefaulttimeout(1.0)


class Hoards(Leaves):
    def leave(self) -> None:
        gc.disable()


SETTINGS = "settings of the whole program"

ROWS = (
    Row(Children, "every step leaves a process", "leftovers", "processes"),
    Row(Zombies, "nobody waits for a child's end", "leftovers", "processes"),
    Row(Threads, "every step leaves a thread", "leftovers", "threads"),
    Row(Files, "every step leaves an open file", "leftovers", "open files"),
    Row(Sockets, "every step leaves a socket", "leftovers", "open files"),
    Row(Walks, "a step changes the directory", "leftovers", "the working directory is now /"),
    Row(Strands, "a step changes to a directory that is gone", "leftovers", "the working directory is now one that"),
    Row(Sets, "a step sets an environment variable", "leftovers", "CATALOGUE"),
    Row(Patches, "a step replaces a function of Python", "leftovers", "time.time"),
    Row(Temporary, "every step leaves a temporary folder", "leftovers", "temporary files"),
    Row(Handlers, "a step sets a signal handler", "leftovers", "the handler of signal", {"isolation": "inline"}),
    Row(Alarms, "a step sets a timer", "leftovers", "signal.ITIMER_VIRTUAL"),
    Row(Seeds, "a step seeds the generator of all", "leftovers", "the seed of random"),
    Row(NumpySeeds, "a step seeds NumPy's generator of all", "leftovers", "numpy.random"),
    Row(Logs, "a step configures the logging of all", "leftovers", SETTINGS),
    Row(Mutes, "a step mutes the logging of all", "leftovers", "logging.disable"),
    Row(Swaps, "a step replaces the standard output", "leftovers", "sys.stdout"),
    Row(Deepens, "a step changes the recursion limit", "leftovers", "the recursion limit"),
    Row(Hurries, "a step gives all sockets a timeout", "leftovers", "timeout of sockets"),
    Row(Hoards, "a step turns the garbage collector off", "leftovers", "the garbage collector"),
)
