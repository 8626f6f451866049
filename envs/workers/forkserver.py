"""The fork server: a process that forks workers for the program.

It receives requests over a socket and answers with process ids and exit codes. It has one thread, so a fork is safe and
takes a few milliseconds, whatever threads and libraries the program runs. When the program ends, also by SIGKILL, the
fork server kills all workers with the processes that they started, and ends.

`multiprocessing` has a fork server too. Its processes import the program's main module again (1.5 s where that imports
torch), a worker that hangs outlives a killed program, and a forked child of the program cannot use it.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection

from envs.safe_text import guard_streams
from envs.workers.process_info import children, descendants

GRACE_S = 0.5
#: Of prctl(2).
_SET_CHILD_SUBREAPER = 36


def main(descriptor: int, preloaded: Sequence[str] = ()) -> None:
    """Import the modules that workers share; answer `fork` and `wait` requests until the program closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the program alone reacts
    _adopt_orphans()
    guard_streams()  # of the workers too: what environments print reaches the terminal of the program
    for name in preloaded:
        importlib.import_module(name)
    requests = socket.socket(fileno=descriptor)
    workers: set[int] = set()
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
                    workers.add(answer)
            else:
                answer = _wait(request["pid"])
                workers.discard(request["pid"])
                _kill_strays(workers)
            requests.sendall(answer.to_bytes(8, "big", signed=True))
    finally:
        for pid in workers:
            kill_with_children(pid)
        _kill_strays(set())
        os._exit(0)


def _fork(requests: socket.socket, descriptor: int, path: list[str]) -> int:
    """Return the process id of a new worker, or a negative error number. The worker leads its own process group."""
    try:
        pid = os.fork()
    except OSError as error:  # no more processes or memory
        return -(error.errno or errno.EAGAIN)
    if pid == 0:  # the child must never return into the fork server's loop
        try:
            os.setsid()
            _adopt_orphans()
            requests.close()
            _serve(descriptor, path)
        finally:
            os._exit(1)
    return pid


def _adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends, so that a daemon is found and killed too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_strays(workers: Collection[int]) -> None:
    """Kill what workers that have ended left behind, and what that leaves: all of it is this process's now."""
    deadline = time.monotonic() + GRACE_S  # what the system cannot end now is tried again with the next worker
    while (left := set(children()).difference(workers)) and time.monotonic() < deadline:
        for pid in left:
            kill_with_children(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def kill_with_children(pid: int) -> None:
    """Kill a worker and the processes that it started, also those in sessions of their own."""
    below = descendants(pid)
    for kill in (os.killpg, os.kill):  # a worker that was just forked has no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    for child in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def _wait(pid: int) -> int:
    """Return the exit code of a worker, negative for a signal. A worker that does not end in time is killed."""
    deadline = time.monotonic() + GRACE_S
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # a child of an earlier fork server
            return -signal.SIGKILL
        if ended:
            kill_with_children(pid)  # the processes that it started
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            kill_with_children(pid)
        time.sleep(0.002)


def _serve(descriptor: int, path: list[str]) -> None:
    """Be a worker: run one call after the other until the program closes the connection."""
    sys.path[:] = path
    importlib.invalidate_caches()
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)  # or it hides the end of its worker, or answers for it
    while True:
        request = connection.recv_bytes()  # an exception here, from a leftover signal handler, ends the worker
        number = int.from_bytes(request[:8], "big")
        try:
            function, args = pickle.loads(request[8:])
            answer = (number, True, function(*args))
        except BaseException:  # user code may raise anything, SystemExit too
            answer = (number, False, traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:
            raise
        except BaseException:  # a value that cannot be pickled
            text = f"{traceback.format_exc()}The result of a call must be picklable."
            connection.send((number, False, text))
        del answer, request
