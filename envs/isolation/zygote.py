"""The process that forks workers: file descriptors come in over a socket, process ids and exit codes go out.

It has one thread, so a fork is safe and takes a few milliseconds, whatever threads
and libraries the program itself runs. It ends, and takes all of its workers with it, when the program does.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

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
                answer = _fork(requests, descriptors[0], request["path"])
                os.close(descriptors[0])
                if answer > 0:
                    children.add(answer)
            else:
                answer = _wait(request["pid"])
                children.discard(request["pid"])
            requests.sendall(answer.to_bytes(8, "big", signed=True))
    finally:
        for pid in children:
            _kill_all(pid)
        os._exit(0)


def _fork(requests: socket.socket, descriptor: int, path: list[str]) -> int:
    """Return the id of a new worker, which leads a process group of its own, or the negative error number."""
    try:
        pid = os.fork()
    except OSError as error:  # no more processes or memory
        return -(error.errno or errno.EAGAIN)
    if pid == 0:  # whatever happens in here must not come back to where the other workers are looked after
        try:
            os.setsid()
            requests.close()
            _serve(descriptor, path)
        finally:
            os._exit(1)
    return pid


def _kill_all(pid: int) -> None:
    """Kill a worker and the processes that it has started."""
    for kill in (os.killpg, os.kill):  # just forked, it leads no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _wait(pid: int) -> int:
    """Return the exit code of a worker, negative for a signal; one that does not end is killed."""
    deadline = time.monotonic() + GRACE_S
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # of a zygote before this one
            return -signal.SIGKILL
        if ended:
            _kill_all(pid)  # those that it has started
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            _kill_all(pid)
        time.sleep(0.002)


def _serve(descriptor: int, path: list[str]) -> None:
    """Be a worker: run one call after the other, and end when the other end is closed."""
    sys.path[:] = path
    importlib.invalidate_caches()
    connection = Connection(descriptor)
    while True:
        request = (
            connection.recv_bytes()
        )  # an exception here, of a signal handler that was left behind, ends the worker
        number = int.from_bytes(request[:8], "big")
        try:
            function, args = pickle.loads(request[8:])
            answer = (number, True, function(*args))
        except BaseException:  # whatever the code of a user raises, SystemExit too
            answer = (number, False, traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:
            raise
        except BaseException:  # a value that cannot be pickled
            text = f"{traceback.format_exc()}What leaves a process must be picklable."
            connection.send((number, False, text))
        del answer, request
