"""A process that runs one call at a time and can be killed: a function and its arguments in, its value out.

Functions and values travel pickled, so a function must be importable by name. This guards against faults, not against
malice: code in a worker has the rights of the program.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

R = TypeVar("R")
#: Modules that the zygote imports once, so that not every worker does, if this program has use for them.
PRELOADED = ("envs.isolation.process_env",)


class WorkerError(Exception):
    """The call raised; the message is its traceback."""


class WorkerDied(Exception):
    """The process ended inside the call; the message says how: "exit code 3", "signal SIGSEGV"."""


class WorkerTimeout(Exception):
    """The call took longer than its limit; the process has been killed."""


class _Zygote:
    """This program's one zygote process, started when the first worker is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def fork(self) -> tuple[int, Connection]:
        """Return the process id of a new worker and the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._ask({"do": "fork", "path": sys.path}, [theirs.fileno()])
        if pid < 0:
            ours.close()
            raise OSError(-pid, f"no worker process can be started: {os.strerror(-pid)}")
        return pid, Connection(ours.detach())

    def wait(self, pid: int) -> int:
        """Return the exit code of a worker that has ended or is about to, negative for a signal."""
        return self._ask({"do": "wait", "pid": pid}, [])

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            channel = self._start() if self._socket is None or self._owner != os.getpid() else self._socket
            try:
                return self._send(channel, request, descriptors)
            except OSError:  # it was killed, by the system where memory ran out; its workers went with it
                return self._send(self._start(), request, descriptors)

    @staticmethod
    def _send(channel: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
        socket.send_fds(channel, [json.dumps(request).encode()], descriptors)
        answer = channel.recv(8, socket.MSG_WAITALL)
        if len(answer) < 8:
            raise BrokenPipeError(f"the zygote ended: got {len(answer)} of 8 bytes")
        return int.from_bytes(answer, "big", signed=True)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            shared = [name for name in PRELOADED if name in sys.modules]
            start = f"from envs.isolation.zygote import main; main({theirs.fileno()}, {shared!r})"
            command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]
            # In a session of its own: neither Ctrl-C nor the end of a worker's group ends it before it has cleaned up.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        self._socket, self._owner = ours, os.getpid()
        atexit.register(ours.close)
        return ours


_ZYGOTE = _Zygote()


class Worker:
    """One child process.

    Example::

        worker = Worker()
        worker.call(math.sqrt, 2.0, timeout_s=1.0)        # 1.4142135623730951
        worker.call(time.sleep, 60, timeout_s=0.1)        # WorkerTimeout, and the process is gone
    """

    def __init__(self) -> None:
        self.pid, self._connection = _ZYGOTE.fork()
        self._calling, self._ending = threading.Lock(), threading.Lock()
        self._is_alive = True
        self._num_calls = 0

    @property
    def is_alive(self) -> bool:
        """Whether the process can take another call."""
        return self._is_alive

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for a call; it may have ended meanwhile, or said something unasked."""
        return self._is_alive and not self._calling.locked() and not self._connection.poll(0)

    def call(self, function: Callable[..., R], *args: object, timeout_s: float | None = None) -> R:
        """Run `function(*args)` in the process and return its value.

        Raises:
            WorkerError: it raised.
            WorkerDied: the process ended, also because `kill` was called meanwhile.
            WorkerTimeout: it took longer than `timeout_s`.
        """
        with self._calling:
            if not self._is_alive:
                raise WorkerDied("the process had ended before the call")
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            self._num_calls += 1
            request = self._num_calls.to_bytes(8, "big") + ForkingPickler.dumps((function, args))
            try:
                self._connection.send_bytes(request)
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._connection.poll(left):
                    self.kill()
                    raise WorkerTimeout(f"took longer than {timeout_s} s")
                number, succeeded, value = self._connection.recv()
                if number != self._num_calls:  # its code forked, and both halves answered
                    self.kill()
                    raise WorkerDied(f"it answered call {number} in the place of call {self._num_calls}")
            except (EOFError, OSError) as error:
                raise WorkerDied(self._end()) from error
            except (KeyboardInterrupt, SystemExit):  # the answer must not be taken for that of the next call
                self.kill()
                raise
        if not succeeded:
            raise WorkerError(value)
        return value

    def kill(self) -> None:
        """End the process at once; a call that is running in it raises `WorkerDied`."""
        if self._is_alive:
            for kill in (os.killpg, os.kill):  # with the processes that it has started
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, signal.SIGKILL)
            self._end()

    def _end(self) -> str:
        """Collect the exit code, once; return how the process ended."""
        with self._ending:
            if not self._is_alive:
                return "killed"
            self._is_alive = False
            code = _ZYGOTE.wait(self.pid)
        if not self._calling.locked():
            self._connection.close()
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class WorkerPool:
    """Idle workers, kept for the next user.

    Example::

        with pool.worker() as worker:
            worker.call(function, timeout_s=1.0)
    """

    def __init__(self, size: int | None = None) -> None:
        """Take the largest number of workers in use at once (None: no limit); more users wait."""
        self._size = size
        self._reset()

    def _reset(self) -> None:
        self._idle: list[Worker] = []
        self._places = threading.Semaphore(self._size) if self._size is not None else None
        self._owner = os.getpid()

    def acquire(self) -> Worker:
        """Return an idle worker, or a new one."""
        if self._owner != os.getpid():  # in a forked child: the workers are the parent's
            self._reset()
        if self._places is not None:
            self._places.acquire()
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return Worker()
            if worker.is_idle:
                return worker
            worker.kill()

    def release(self, worker: Worker) -> None:
        """Give a worker back; one that was killed is forgotten."""
        if worker.is_alive:
            self._idle.append(worker)
        if self._places is not None:
            self._places.release()

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """Lend a worker for the time of a `with` block."""
        worker = self.acquire()
        try:
            yield worker
        finally:
            self.release(worker)
