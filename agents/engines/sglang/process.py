"""Server processes: what a pool asks of one wherever it runs (`ServerProcess`), and those of this host."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from agents.engines.sglang.server_arguments import choose_arguments, choose_variables, launch_command, server_gpus
from agents.engines.sglang.server_facts import Host
from agents.engines.sglang.settings import ServerPlace, SGLangSettings
from agents.model.kernel_cache import keep_kernels
from envs.errors import UserError

STOP_S = 10.0
#: Longest wait for the end of a log once its server has ended, and the longest line that is read as one.
LOG_S = 2.0
LONGEST_LINE = 2**20


class ServerProcess(Protocol):
    """A server that we started, on this host or on another."""

    @property
    def url(self) -> str:
        """Where it listens; "" until its host has started it."""
        ...

    @property
    def node(self) -> str:
        """The node of the Ray cluster that it runs on; "" without one."""
        ...

    def ended(self) -> str:
        """Return how it ended: "its process ended with status 1"; "" while it runs. Returns at once.

        Raises:
            UserError: its host cannot start it with what the user gave.
        """
        ...

    def log(self) -> str:
        """Return where its log is, and the end of it."""
        ...

    def stop(self) -> None:
        """End it and every process that it started."""
        ...


class Launcher(Protocol):
    """Starts server processes."""

    def check(self, settings: SGLangSettings) -> None:
        """Raise `UserError` if what this host knows already says that the servers cannot start."""
        ...

    def launch(self, settings: SGLangSettings, number: int, port: int) -> ServerProcess:
        """Start the `number`-th server, which listens at `port` if that is free, and return at once."""
        ...


class LocalLauncher:
    """Starts servers on this host."""

    def check(self, settings: SGLangSettings) -> None:
        """Raise `UserError` if this host has too few GPUs for the servers."""
        host = Host.here()
        used = [gpu for number in range(settings.num_servers) for gpu in _gpus(settings, number)]
        if host.num_gpus and len(set(used)) < len(used):
            # While it starts, a server counts what others on its GPU take as its own.
            rule = f"must leave each server GPUs of its own: this host has {host.num_gpus}"
            raise UserError("--num-servers", rule, settings.num_servers, "give less")

    def launch(self, settings: SGLangSettings, number: int, port: int) -> LocalProcess:
        """Start a server on its GPUs of this host."""
        return LocalProcess(settings, number, ServerPlace(port, first_gpu=_gpus(settings, number)[0]))


def _gpus(settings: SGLangSettings, number: int) -> range:
    return server_gpus(settings.first_gpu, number, settings.tensor_parallel, Host.here().num_gpus)


class LocalProcess:
    """A server on this host: a process in its own process group, with a log file."""

    node = ""

    def __init__(self, settings: SGLangSettings, number: int, place: ServerPlace) -> None:
        """Start the server, which asks for the key of `settings`."""
        keep_kernels()
        self.url = f"http://{place.address}:{place.port}"
        chosen = choose_arguments(settings, place, Host.here())
        settings.log_folder.mkdir(parents=True, exist_ok=True)
        self.log_path = settings.log_folder / f"sglang-{number}.log"
        command = launch_command(settings, chosen)
        inherited = []
        self.key_file = None
        if settings.gives_key:
            self.key_file, key = _pipe_with(settings.api_key)
            command += ["--config", str(self.key_file)]
            inherited.append(key)
        log = self.log_path.open("ab", buffering=0)
        log.write(_without_key(f"$ {shlex.join(command)}\n".encode(), settings.api_key))
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C reaches the run alone, and `stop` every process of the server.
            start_new_session=True,
            # What the user has set comes first.
            env=choose_variables(settings.dtype) | os.environ,
            pass_fds=inherited,
        )
        for key in inherited:
            os.close(key)
        given = (self.popen.stdout, log, settings.api_key)
        self._log = threading.Thread(target=_write_log, args=given, name="sglang log", daemon=True)
        self._log.start()

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group."""
        return self.popen.pid

    def ended(self) -> str:
        """Return the exit status once there is one."""
        status = self.popen.poll()
        if status is None:
            return ""
        return f"its process ended with status {status}"

    def log(self) -> str:
        """Return the log's path and its end."""
        if self.popen.poll() is not None:
            self._log.join(LOG_S)
        tail = self.log_path.read_text(encoding="utf-8", errors="replace")[-600:].strip()
        return f"see {self.log_path}; its end: {tail}"

    def stop(self) -> None:
        """End the process group."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            # SIGKILL follows in any case: processes of the server may outlive the first one.
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_S)
                if signal_number == signal.SIGKILL:
                    break
        if self.key_file:
            self.key_file.unlink(missing_ok=True)


def _pipe_with(api_key: str) -> tuple[Path, int]:
    """Return the reading end of a pipe that holds the key, and a link that leads to it in a process that inherits it.

    All users see arguments, and a file with the key would stay where this process is killed. The link is there because
    SGLang takes only files of this ending.
    """
    reading, writing = os.pipe()
    os.write(writing, json.dumps({"api-key": api_key}).encode())
    os.close(writing)
    link = Path(tempfile.gettempdir()) / f"sglang-{secrets.token_hex(8)}.yaml"
    link.symlink_to(f"/dev/fd/{reading}")
    return link, reading


def _write_log(source: IO[bytes], log: IO[bytes], api_key: str) -> None:
    """Write what a server prints into its log, to its end."""
    with source, log:
        while line := source.readline(LONGEST_LINE):
            with contextlib.suppress(OSError):  # a full disk must not stop the server
                log.write(_without_key(line, api_key))


def _without_key(text: bytes, api_key: str) -> bytes:
    """Return what a server prints without its key: SGLang logs all its arguments."""
    if api_key:
        return text.replace(api_key.encode(), b"(key)")
    return text


def listens(url: str) -> bool:
    """Return whether a port of a URL takes connections."""
    host, _, port = url.rpartition("/")[2].rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False


class ReservedPorts:
    """Free ports of this host. Nobody else chooses them here until `release`, while a server may listen there (Linux).

    A port is held by a socket that never listens: a plain bind fails beside it, and a server's, which sets
    SO_REUSEADDR, does not. Without that, another run could choose the port of a server that is only just starting, or
    starting again, and both would take one server for theirs.

    Ports are at least 100 apart, because a server also uses a few more that are counted up from its own, up to 10,000.
    They lie below 32,768: Linux gives outgoing connections theirs above.

    Example::

        ports = ReservedPorts(2)
        ports.numbers      # [23100, 30700]
        ports.release()
    """

    def __init__(self, count: int, address: str = "127.0.0.1", preferred: Sequence[int] = ()) -> None:
        """Reserve `preferred` ports where those are free, and others at random, whatever the seed of the run."""
        self.numbers: list[int] = []
        self._sockets: list[socket.socket] = []
        choices = range(20_000, 32_700, 100)
        for port in (*preferred, *random.SystemRandom().sample(choices, len(choices))):
            if len(self.numbers) < count and self._reserve(address, port):
                self.numbers.append(port)
        if len(self.numbers) < count:
            self.release()
            raise OSError("no free port between 20000 and 32700")

    def _reserve(self, address: str, port: int) -> bool:
        held = socket.socket()
        try:
            held.bind((address, port))
        except OSError:
            held.close()
            return False
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on
        self._sockets.append(held)
        return True

    def release(self) -> None:
        """Let others choose the ports."""
        for held in self._sockets:
            held.close()
        self._sockets.clear()
