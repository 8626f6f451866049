"""Worker processes: each runs one function call at a time, returns its value, and can be killed.

Functions and values are pickled, so a function must be importable by name. Workers protect the program against faults,
not against malicious code: a worker has the same rights as the program.
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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from envs.workers.forkserver import kill_with_children

if TYPE_CHECKING:
    from envs.workers.ray_worker import RayWorker

R = TypeVar("R")
#: Modules that the fork server imports once for all workers, if the program has imported them.
PRELOADED = ("envs.execution.process_env", "envs.checking.worker_player")


#: How long the fork server may take to answer, also as it starts on a busy host. A stopped one never does.
ANSWER_LIMIT_S = 60.0


class WorkerError(Exception):
    """The call raised an exception; the message is its traceback."""


class WorkerDied(Exception):
    """The process ended during the call; the message says how: "exit code 3", "signal SIGSEGV"."""


class WorkerLost(WorkerDied):
    """The host of the process is gone, and the process with it."""


class WorkerTimeout(Exception):
    """The call exceeded its time limit, and the process was killed."""


class _ForkServer:
    """The client of the program's one fork server, which starts with the first worker."""

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
        """Return the exit code of a worker that has ended or is ending, negative for a signal."""
        return self._ask({"do": "wait", "pid": pid}, [])

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            if self._socket is None or self._owner != os.getpid():
                channel = self._start()
            else:
                channel = self._socket
            try:
                return self._send(channel, request, descriptors)
            except OSError:  # the fork server was killed, for example for memory, or is stopped; start another
                if self._process is not None:
                    self._process.kill()
                return self._send(self._start(), request, descriptors)

    @staticmethod
    def _send(channel: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
        channel.settimeout(ANSWER_LIMIT_S)
        socket.send_fds(channel, [json.dumps(request).encode()], descriptors)
        answer = channel.recv(8, socket.MSG_WAITALL)
        if len(answer) < 8:
            raise BrokenPipeError(f"the fork server ended: got {len(answer)} of 8 bytes")
        return int.from_bytes(answer, "big", signed=True)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            shared = [name for name in PRELOADED if name in sys.modules]
            start = f"from envs.workers.forkserver import main; main({theirs.fileno()}, {shared!r})"
            command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]
            # In its own session, so that neither Ctrl-C nor the end of a worker's group stops its clean-up.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        self._socket = ours
        self._owner = os.getpid()
        atexit.register(ours.close)
        return ours


_FORK_SERVER = _ForkServer()


class Worker:
    """One child process.

    Example::

        worker = Worker()
        worker.call(math.sqrt, 2.0, timeout_s=1.0)        # 1.4142135623730951
        worker.call(time.sleep, 60, timeout_s=0.1)        # WorkerTimeout, and the process is gone
    """

    def __init__(self) -> None:
        self.pid, self._connection = _FORK_SERVER.fork()
        self._calling = threading.Lock()
        self._ending = threading.Lock()
        #: Whether the process can take another call.
        self.is_alive = True
        self._num_calls = 0

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for a call: no call is in progress, and no unexpected answer has arrived."""
        return self.is_alive and not self._calling.locked() and not self._connection.poll(0)

    def call(self, function: Callable[..., R], *args: object, timeout_s: float | None = None) -> R:
        """Run `function(*args)` in the process and return its value.

        Raises:
            WorkerError: the function raised.
            WorkerDied: the process ended, also by a call of `kill` from another thread.
            WorkerTimeout: the call took longer than `timeout_s`.
        """
        with self._calling:
            if not self.is_alive:
                raise WorkerDied("the process had ended before the call")
            self._num_calls += 1
            # The number comes back with the answer: an answer of an earlier call would be taken for that of this one.
            request = self._num_calls.to_bytes(8, "big") + ForkingPickler.dumps((function, args))
            try:
                self._connection.send_bytes(request)
                if not self._connection.poll(timeout_s):
                    self.kill()
                    raise WorkerTimeout(f"took longer than {timeout_s} s")
                number, succeeded, value = self._connection.recv()
                if number != self._num_calls:  # the called code forked, and both processes answered
                    self.kill()
                    raise WorkerDied(f"it answered call {number} instead of call {self._num_calls}")
            except (EOFError, OSError) as error:
                raise WorkerDied(self._end()) from error
            except (KeyboardInterrupt, SystemExit):  # or the next call would read this answer
                self.kill()
                raise
        if not succeeded:
            raise WorkerError(value)
        return value

    def kill(self) -> None:
        """Kill the process at once; a call that runs in it raises `WorkerDied`."""
        if self.is_alive:
            kill_with_children(self.pid)
            self._end()

    def _end(self) -> str:
        """Collect the exit code once; return how the process ended."""
        with self._ending:
            if not self.is_alive:
                return "killed"
            self.is_alive = False
            code = _FORK_SERVER.wait(self.pid)
        if not self._calling.locked():
            self._connection.close()
        if code >= 0:
            return f"exit code {code}"
        return f"signal {signal.Signals(-code).name}"


#: A worker process, on this host or elsewhere.
AnyWorker: TypeAlias = "Worker | RayWorker"


class WorkerPool:
    """Keeps idle workers for the next user.

    Example::

        with pool.worker() as worker:
            worker.call(function, timeout_s=1.0)
    """

    def __init__(self, size: int = sys.maxsize, make: Callable[[], AnyWorker] = Worker) -> None:
        """Set how many workers may be in use at once (further users wait), and what makes one."""
        self._size = size
        self._make = make
        self._reset()

    def _reset(self) -> None:
        self._idle: list[AnyWorker] = []
        self._free_slots = threading.Semaphore(self._size)
        self._owner = os.getpid()

    def acquire(self) -> AnyWorker:
        """Return an idle worker, or a new one."""
        if self._owner != os.getpid():  # in a forked child; the workers belong to the parent
            self._reset()
        self._free_slots.acquire()
        try:
            while self._idle:
                with contextlib.suppress(IndexError):  # another thread has just taken the last one
                    worker = self._idle.pop()
                    if worker.is_idle:
                        return worker
                    worker.kill()
            return self._make()
        except BaseException:  # such as no more processes: the slot is for the next user
            self._free_slots.release()
            raise

    def release(self, worker: AnyWorker) -> None:
        """Return a worker to the pool; a killed one is dropped."""
        if worker.is_alive:
            self._idle.append(worker)
        self._free_slots.release()

    @contextlib.contextmanager
    def worker(self) -> Iterator[AnyWorker]:
        """Lend a worker for the duration of a `with` block."""
        worker = self.acquire()
        try:
            yield worker
        finally:
            self.release(worker)
