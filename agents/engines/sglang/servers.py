"""Starts SGLang servers, or finds running ones, and replaces those that fail.

A local server is a process in its own process group with a log file. One that dies is restarted with the current
weights. An external server is polled until it is back, and gets the weights too. Meanwhile its episodes continue on the
other servers.
"""

from __future__ import annotations

import asyncio
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
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agents.engines.busy import BusyTime
from agents.engines.sglang.client import ServerLost, ServerRefused, SGLangClient, authorization, uses_proxy
from agents.engines.sglang.pictures import SentPictures, image_fields, missed_pictures
from agents.engines.sglang.routing import PromptRouter
from agents.engines.sglang.server_arguments import (
    choose_variables,
)
from agents.engines.sglang.server_facts import Host
from agents.engines.sglang.settings import SGLangSettings
from agents.model.kernel_cache import keep_kernels
from agents.types import ProcessedImage
from envs.errors import UserError

POLL_S = 0.5
STOP_S = 10.0
#: How often a request is sent to a server that has forgotten its pictures.
MAX_SENDS = 3


@dataclass(eq=False)
class Server:
    """One server: its client once `ServerPool.start` was called, its process if we started it, and whether it may get
    work.
    """

    url: str
    number: int
    client: SGLangClient = field(init=False)
    process: subprocess.Popen[bytes] | None = None
    log_path: Path | None = None
    is_up: bool = False
    num_sessions: int = 0
    num_restarts: int = 0
    busy: BusyTime = field(default_factory=BusyTime, repr=False)
    recovery: asyncio.Task[None] | None = field(default=None, repr=False)
    #: What it has been sent, if it keeps pictures.
    sent_pictures: SentPictures | None = field(default=None, repr=False)

    async def generate(self, body: dict[str, Any], images: Sequence[ProcessedImage], salt: str) -> Any:
        """Return the answer of `/generate` to a body with its pictures. Those that the server forgot are sent again.

        Raises:
            ServerLost, ServerRefused: as `SGLangClient.call`.
        """
        sent = self.sent_pictures
        for _ in range(MAX_SENDS):
            try:
                with self.busy.request():
                    fields = image_fields(images, salt, sent, self.client.release)
                    return await self.client.call("generate", body | fields)
            except ServerRefused as error:
                missed = missed_pictures(str(error))
                if sent is None or not missed:
                    raise
                sent.forget(missed)
        raise ServerLost(f"{self.client.url} forgets pictures as soon as it has been sent them")


class ServerPool:
    """All servers of a run. Calls `on_return(client)` before a server that was lost gets work again.

    Example::

        servers = ServerPool(SGLangSettings(model_path="path/to/checkpoint"), on_return=load_current_weights)
        servers.launch()                       # returns at once
        await servers.start()                  # waits
        server = await servers.pick()          # the one with the fewest sessions; waits while none is up
        server = await servers.pick(prompt=7)  # the one that has read prompt 7, unless it has too many sessions
        servers.report_lost(server, "status 500")   # polls it, restarts it if needed, and takes it back
        await servers.close()
    """

    def __init__(
        self,
        settings: SGLangSettings,
        on_return: Callable[[SGLangClient], Awaitable[None]],
        has_pictures: bool = True,
    ) -> None:
        self.settings, self._on_return, self._has_pictures = settings, on_return, has_pictures
        self.all: list[Server] = []
        self.events: list[str] = []  # messages about servers, in order
        self._http: dict[bool, aiohttp.ClientSession] = {}  # by whether proxies count
        self._api_key = settings.api_key
        self._key_file: Path | None = None
        self.router: PromptRouter[Server] = PromptRouter()
        self._changed: asyncio.Condition = asyncio.Condition()

    @property
    def up(self) -> list[Server]:
        """The servers that may get work."""
        return [server for server in self.all if server.is_up]

    def launch(self) -> None:
        """Start the processes of the servers and return at once; `start` waits for them, `end` ends them.

        Does nothing where servers run already.
        """
        if self.all or self.settings.urls:
            return
        keep_kernels()
        host = Host.here()
        for number in range(self.settings.num_servers):  # what cannot start must not start others first
            self.settings.chosen_arguments(number, 0, host)
        self._api_key = self._make_key()
        for number, port in enumerate(free_ports(self.settings.num_servers)):
            self.all.append(Server(f"http://127.0.0.1:{port}", number))
            self._launch(self.all[-1])

    def starting(self) -> list[int]:
        """Return the numbers of the launched servers that do not listen yet.

        Raises:
            UserError: the process of one has ended; names its log.
        """
        return [server.number for server in self.all if self._has_process(server) and not _listens(server.url)]

    async def start(self) -> None:
        """Start or find every server, and wait until all answer.

        Raises:
            UserError: one does not answer; names its log. Or those to start cannot share their GPU.
        """
        self._changed = asyncio.Condition()
        settings = self.settings
        if settings.urls:
            self.all = [Server(url, number) for number, url in enumerate(settings.urls)]
        self.launch()
        for proxied in {uses_proxy(server.url) for server in self.all}:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
            headers = authorization(self._api_key)
            self._http[proxied] = aiohttp.ClientSession(connector=connector, trust_env=proxied, headers=headers)
        for server in self.all:
            server.client = SGLangClient(server.url, self._http[uses_proxy(server.url)], settings.request_timeout_s)
        waits = [asyncio.ensure_future(self._wait_until_up(server)) for server in self.all]
        try:
            await asyncio.gather(*waits)
        except BaseException:  # the first error ends the others
            for wait in waits:
                wait.cancel()
            await self.close()
            raise
        for server in self.all:
            server.is_up = True

    async def pick(self, prompt: int | None = None) -> Server:
        """Return the server that is up and has read the prompt or, in balance, has the fewest sessions; wait while none
        is up.

        Raises:
            EngineDown: every server has been given up.
        """
        while not self.up:
            if all(server.recovery is None for server in self.all):
                raise EngineDown(f"no SGLang server is left: {'; '.join(self.events[-6:])}")
            async with self._changed:
                if not self.up:
                    await self._changed.wait()
        return self.router.choose(self.up, prompt)

    def report_lost(self, server: Server, reason: str) -> None:
        """Take a server that gave no answer out of service and start to recover it, unless that has happened before."""
        if server.is_up:
            server.is_up = False
            self.events.append(f"server {server.number} lost: {reason}")
            server.recovery = asyncio.create_task(self._recover(server))

    async def close(self) -> None:
        """Stop the servers that we started; a `pick` that waits raises `EngineDown`."""
        servers, self.all = self.all, []
        for server in servers:
            server.is_up = False
        recoveries = [server.recovery for server in servers if server.recovery]
        for task in recoveries:
            task.cancel()
        await asyncio.gather(*recoveries, asyncio.to_thread(self._end, servers), return_exceptions=True)
        for http in self._http.values():
            await http.close()
        self._http = {}

    def end(self) -> None:
        """End the processes that `launch` has started; does nothing after `close`."""
        servers, self.all = self.all, []
        self._end(servers)

    def _end(self, servers: Sequence[Server]) -> None:
        if processes := [server.process for server in servers if server.process]:
            with ThreadPoolExecutor(len(processes)) as pool:
                list(pool.map(_stop, processes))
        if self._key_file:
            self._key_file.unlink(missing_ok=True)

    def _make_key(self) -> str:
        """Return the key of the started servers. They read it from a file of this user, as all users see arguments."""
        arguments = self.settings.arguments
        for place, word in enumerate(arguments):
            name, _, value = word.partition("=")
            if name == "--api-key":
                return value or arguments[place + 1]
        if "--config" in arguments:  # SGLang takes one such file, which may hold the key
            return self.settings.api_key
        api_key = self.settings.api_key or secrets.token_hex(32)
        with tempfile.NamedTemporaryFile("w", prefix="sglang-", suffix=".yaml", delete=False) as file:  # of mode 600
            json.dump({"api-key": api_key}, file)
        self._key_file = Path(file.name)
        return api_key

    def _launch(self, server: Server) -> None:
        port = int(server.url.rsplit(":", 1)[1])
        self.settings.log_folder.mkdir(parents=True, exist_ok=True)
        server.log_path = self.settings.log_folder / f"sglang-{server.number}.log"
        chosen = self.settings.chosen_arguments(server.number, port, Host.here())
        command = self.settings.launch_command(chosen)
        command += ["--config", str(self._key_file)] if self._key_file else []
        variables = choose_variables(self.settings.dtype)
        reasons = [f"{shlex.join(argument.words)}: {argument.reason}" for argument in chosen if argument.reason]
        reasons += [f"{name}={value}: {why}" for name, (value, why) in variables.items() if name not in os.environ]
        with server.log_path.open("ab") as log:
            log.write("".join([f"$ {shlex.join(command)}\n", *(f"# {reason}\n" for reason in reasons)]).encode())
            log.flush()
            server.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**{name: value for name, (value, _) in variables.items()}, **os.environ},
            )

    async def _wait_until_up(self, server: Server) -> None:
        """Wait until a server answers; raise `UserError` where its process ends or the time is up."""
        deadline = time.monotonic() + self.settings.start_timeout_s
        while not await server.client.is_alive():
            self._has_process(server)
            if time.monotonic() > deadline:
                raise self._cannot_start(server, f"no answer in {self.settings.start_timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        await server.client.read_release()
        if doubt := server.client.release.doubt:
            self.events.append(f"server {server.number}: {doubt}")
        keeps = self._has_pictures and await server.client.keeps_pictures()
        server.sent_pictures = SentPictures() if keeps else None

    def _has_process(self, server: Server) -> bool:
        """Whether a server is a process of ours; raise `UserError` if that has ended."""
        if server.process and server.process.poll() is not None:
            raise self._cannot_start(server, f"its process ended with status {server.process.returncode}")
        return server.process is not None

    def _cannot_start(self, server: Server, reason: str) -> UserError:
        if server.log_path is None:
            fix = "start the server, or leave --engine-url out to have one started"
            return UserError("--engine-url", "must answer", server.url, f"{fix} ({reason})")
        tail = server.log_path.read_text(encoding="utf-8", errors="replace")[-600:].strip()
        fix = f"see {server.log_path}; its end: {tail}"
        return UserError("--engine sglang", "must start a server", reason, fix)

    async def _recover(self, server: Server) -> None:
        """Take a lost server back into service with the current weights, restarted unless it answers after all.

        A server that is lost again meanwhile is restarted again (an external one polled again), up to `max_restarts`
        times.
        """
        tries = 0
        try:
            while not server.is_up:
                try:
                    await self._bring_up(server, restart=tries > 0)
                    server.is_up = True
                    self.events.append(f"server {server.number} is back")
                except Exception as error:  # the others continue; `pick` raises when none is left
                    tries += 1
                    is_external = server.process is None
                    num_used = tries if is_external else server.num_restarts
                    was_waited_for = is_external and isinstance(error, UserError)
                    if was_waited_for or num_used >= self.settings.max_restarts:
                        self.events.append(f"server {server.number} given up: {error}")
                        return
                    self.events.append(f"server {server.number} lost again: {error}")
                    await asyncio.sleep(POLL_S)
        finally:
            server.recovery = None
            async with self._changed:
                self._changed.notify_all()

    async def _bring_up(self, server: Server, restart: bool) -> None:
        has_ended = server.process is not None and server.process.poll() is not None
        if restart or has_ended or not await server.client.is_alive():
            server.client.time_out_calls()
            if server.process is not None:
                if server.num_restarts >= self.settings.max_restarts:
                    raise RuntimeError(f"restarted {server.num_restarts} times already; see {server.log_path}")
                server.num_restarts += 1
                await asyncio.to_thread(_stop, server.process)
                self._launch(server)
            await self._wait_until_up(server)
        await self._on_return(server.client)


class EngineDown(Exception):
    """No server is left that can write."""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and every process that it started."""
    for signal_number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            if signal_number == signal.SIGKILL:
                return


def _listens(url: str) -> bool:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False


def free_ports(count: int) -> list[int]:
    """Return free ports at least 100 apart, because SGLang also uses a few more that it counts up from its own.

    It adds up to 10,000, so the ports must be low. Runs of one seed that start at the same time get different ports.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 50_000, 100), 300):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError("no free port between 20000 and 50000")
