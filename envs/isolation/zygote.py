"""The process that forks workers: file descriptors come in over a socket, process ids and exit codes go out.

It has one thread, so a fork is safe and takes a few milliseconds, whatever threads
and libraries the program itself runs. It ends, and takes all of its workers with it, when the program does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

GRACE_S = 0.5


def main(descriptor: int, preloaded: Sequence[str] = ()) -> None:
    """Import modules that the workers will share; answer `fork` and `wait` requests until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the program decides what it means
    for name in preloaded:
        importlib.import_module(name)
    requests = socket.socket(fileno=descriptor)
    children: set[int] = set()
    try:
        while True:
            header, descriptors, _, _ = socket.recv_fds(requests, 65_536, 1)
            if not header:
                return
            request = json.loads(header)
            if request["do"] == "fork":
                pid = os.fork()
                if pid == 0:
                    requests.close()
                    _serve(descriptors[0], request["path"])
                os.close(descriptors[0])
                children.add(pid)
                answer = pid
            else:
                answer = _wait(request["pid"])
                children.discard(request["pid"])
            requests.sendall(answer.to_bytes(8, "big", signed=True))
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _wait(pid: int) -> int:
    """Return the exit code of a worker, negative for a signal; one that does not end is killed."""
    deadline = time.monotonic() + GRACE_S
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # of a zygote before this one
            return -signal.SIGKILL
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _serve(descriptor: int, path: list[str]) -> None:
    """Be a worker: run one call after the other, and end when the other end is closed."""
    sys.path[:] = path
    importlib.invalidate_caches()
    connection = Connection(descriptor)
    while True:
        try:
            function, args = connection.recv()
            answer = (True, function(*args))
        except EOFError:
            os._exit(0)
        except BaseException:  # whatever the code of a user raises, SystemExit too
            answer = (False, traceback.format_exc())
        _send(connection, answer)
        del answer


def _send(connection: Connection, answer: tuple[bool, Any]) -> None:
    try:
        connection.send(answer)
    except BrokenPipeError:
        os._exit(0)
    except Exception:  # a value that cannot be pickled
        connection.send((False, f"{traceback.format_exc()}What leaves a process must be picklable."))
