"""Starts SGLang servers, or finds running ones, and replaces those that fail.

A server that we started is a process (`agents.engines.sglang.process`) on this host or another. One that dies is
restarted with the current weights. An external server is polled until it is back, and gets the weights too. Meanwhile
its episodes continue on the other servers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from agents.engines.busy import BusyTime
from agents.engines.sglang.client import SGLangClient, authorization
from agents.engines.sglang.images import SentImages, image_fields, missed_images
from agents.engines.sglang.process import Launcher, LocalLauncher, ReservedPorts, ServerProcess, listens
from agents.engines.sglang.routing import PromptRouter
from agents.engines.sglang.settings import SGLangSettings
from agents.engines.weight_servers import EngineDown, ServerLost, ServerRefused
from agents.types import ProcessedImage
from envs.errors import UserError

POLL_S = 0.5
#: Seconds between two looks at the processes of servers. A host that is gone may leave requests without an answer.
WATCH_S = 2.0
#: How often a request is sent to a server that has forgotten its images.
MAX_SENDS = 3


@dataclass(eq=False)
class Server:
    """One server: its client once `ServerPool.start` was called, its process if we started it, whether it is up."""

    url: str
    number: int
    client: SGLangClient = field(init=False)
    process: ServerProcess | None = None
    is_up: bool = False
    num_sessions: int = 0
    num_restarts: int = 0
    busy: BusyTime = field(default_factory=BusyTime, repr=False)
    recovery: asyncio.Task[None] | None = field(default=None, repr=False)
    #: What it has been sent, if it keeps images.
    sent_images: SentImages | None = field(default=None, repr=False)
    #: The kinds of memory that it has freed for the learner, and not taken again yet.
    freed: tuple[str, ...] = ()

    async def generate(self, body: dict[str, Any], images: Sequence[ProcessedImage], salt: str) -> Any:
        """Return the answer of `/generate` to a body with its images. Those that the server forgot are sent again.

        Of what the server has read before, it uses what had the same `salt`.

        Raises:
            ServerLost, ServerRefused: as `SGLangClient.call`.
        """
        sent = self.sent_images
        for _ in range(MAX_SENDS):
            try:
                with self.busy.request():
                    fields = image_fields(images, salt, sent, self.client.release)
                    return await self.client.call("generate", body | fields | {"extra_key": salt})
            except ServerRefused as error:
                missed = missed_images(str(error))
                if sent is None or not missed:
                    raise
                sent.forget(missed)
        raise ServerLost(f"{self.client.url} forgets images as soon as it has been sent them")

    async def take_memory(self, kind: str) -> None:
        """Take a kind of memory again, if it was freed.

        Raises:
            ServerLost, ServerRefused: as `SGLangClient.call`.
        """
        if kind in self.freed:
            await self.client.take_memory(kind)
            self.freed = tuple(other for other in self.freed if other != kind)


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
        has_images: bool = True,
        launcher: Launcher | None = None,
    ) -> None:
        self.settings = settings
        self._on_return = on_return
        self._has_images = has_images
        self._launcher = launcher or LocalLauncher()
        self.all: list[Server] = []
        self.events: list[str] = []  # messages about servers, in order
        self._http: aiohttp.ClientSession | None = None
        self.router = PromptRouter()
        self._changed = asyncio.Condition()
        #: Set unless the learner has the memory of servers.
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._watching: asyncio.Task[None] | None = None
        self._ports: ReservedPorts | None = None

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
        self._launcher.check(self.settings)  # what cannot start must not start others first
        self.settings = self.settings.with_key()
        self._ports = ReservedPorts(self.settings.num_servers)
        for number, port in enumerate(self._ports.numbers):
            process = self._launcher.launch(self.settings, number, port)
            self.all.append(Server(process.url, number, process=process))

    def starting(self) -> list[int]:
        """Return the numbers of the launched servers that do not listen yet.

        Raises:
            UserError: the process of one has ended; names its log.
        """
        return [server.number for server in self.all if self._has_process(server) and not listens(server.url)]

    async def start(self) -> None:
        """Start or find every server, and wait until all answer.

        Raises:
            UserError: one does not answer; names its log. Or those to start cannot share their GPU.
        """
        if self.settings.urls:
            self.all = [Server(url, number) for number, url in enumerate(self.settings.urls)]
        self.launch()
        settings = self.settings
        # Shorter than servers keep theirs: a request on one that is just being closed would be lost.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        http = self._http = aiohttp.ClientSession(connector=connector, headers=authorization(settings.api_key))
        for server in self.all:
            server.client = SGLangClient(server.url, http, settings.request_timeout_s, settings.keeps_kv_cache)
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
        self._watching = asyncio.create_task(self._watch())

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
                # It may have changed before the lock was ours.
                if not self.up:
                    await self._changed.wait()
        return self.router.choose(self.up, prompt)

    def report_lost(self, server: Server, reason: str, must_restart: bool = False) -> None:
        """Take a server that gave no answer out of service and start to recover it, unless that has happened before.

        It is restarted if it does not answer, or at once if it `must_restart`.
        """
        if server.is_up:
            server.is_up = False
            self.events.append(f"server {server.number} lost: {reason}")
            server.recovery = asyncio.create_task(self._recover(server, must_restart))

    async def free_memory(self, kinds: Sequence[str]) -> None:
        """Have the servers that are up, and idle, free kinds of memory. None starts until `end_freeing`."""
        self._may_start.clear()
        await asyncio.gather(*(self._free(server, tuple(kinds)) for server in self.up))

    async def _free(self, server: Server, kinds: tuple[str, ...]) -> None:
        if server.freed == kinds:
            return
        # Before the call: a server that is lost in it may have freed a part, and must start anew.
        server.freed = kinds
        try:
            await server.client.free_memory(kinds)
        except (ServerLost, ServerRefused) as error:
            self.report_lost(server, str(error))
            if server.process:
                await asyncio.to_thread(server.process.stop)

    def end_freeing(self) -> None:
        """Let lost servers start again: the learner has left their memory."""
        self._may_start.set()

    async def _watch(self) -> None:
        """Report the servers whose process or host has ended, also if no request fails by it."""
        while True:
            await asyncio.sleep(WATCH_S)
            for server in self.up:
                try:
                    self._has_process(server)
                except UserError as error:
                    self.report_lost(server, str(error.got))

    async def close(self) -> None:
        """Stop the servers that we started; a `pick` that waits raises `EngineDown`."""
        servers = self.all
        self.all = []
        for server in servers:
            server.is_up = False
        recoveries = [task for task in (self._watching, *(server.recovery for server in servers)) if task]
        for task in recoveries:
            task.cancel()
        await asyncio.gather(*recoveries, asyncio.to_thread(self._end, servers), return_exceptions=True)
        if self._http:
            await self._http.close()

    def end(self) -> None:
        """End the processes that `launch` has started; does nothing after `close`."""
        servers = self.all
        self.all = []
        self._end(servers)

    def _end(self, servers: Sequence[Server]) -> None:
        if processes := [server.process for server in servers if server.process]:
            with ThreadPoolExecutor(len(processes)) as pool:
                list(pool.map(lambda process: process.stop(), processes))
        if self._ports:
            self._ports.release()

    async def _wait_until_up(self, server: Server) -> None:
        """Wait until a server answers; raise `UserError` where its process ends or the time is up."""
        deadline = time.monotonic() + self.settings.start_timeout_s
        while silence := await self._silence(server):
            if time.monotonic() > deadline:
                raise self._cannot_start(server, f"no answer in {self.settings.start_timeout_s:g} s: {silence}")
            await asyncio.sleep(POLL_S)
        if doubt := server.client.release.doubt:
            self.events.append(f"server {server.number}: {doubt}")
        if self.settings.frees_memory and not server.client.frees_memory:
            note = "keeps its memory while the learner trains: its host lacks the package torch_memory_saver"
            self.events.append(f"server {server.number} {note}")
        keeps = self._has_images and await server.client.keeps_images()
        if keeps:
            server.sent_images = SentImages()
        else:
            server.sent_images = None

    async def _silence(self, server: Server) -> str:
        """Return why a server does not answer; "" if it does. Raise `UserError` if its process has ended."""
        if self._has_process(server) and server.process:
            if not server.url:
                return "it has no address yet"
            server.client.url = server.url
            server.client.node = server.process.node
        return await server.client.silence()

    def _has_process(self, server: Server) -> bool:
        """Whether a server is a process of ours, which may have moved; raise `UserError` if it has ended."""
        if server.process is None:
            return False
        if how := server.process.ended():
            raise self._cannot_start(server, how)
        server.url = server.process.url
        return True

    def _cannot_start(self, server: Server, reason: str) -> UserError:
        if server.process is None:
            fix = "start the server, or leave --engine-url out to have one started"
            return UserError("--engine-url", "must answer", server.url, f"{fix} ({reason})")
        return UserError("--engine sglang", "must start a server", reason, server.process.log())

    async def _recover(self, server: Server, must_restart: bool) -> None:
        """Take a lost server back into service with the current weights, restarted unless it answers after all.

        A server that is lost again meanwhile is restarted again (an external one polled again), up to `max_restarts`
        times.
        """
        tries = 0
        try:
            while not server.is_up:
                try:
                    await self._bring_up(server, restart=must_restart or tries > 0)
                    server.is_up = True
                    self.events.append(f"server {server.number} is back")
                except Exception as error:  # the others continue; `pick` raises when none is left
                    tries += 1
                    # One that others started was waited for as long as it may take.
                    is_gone = server.process is None and isinstance(error, UserError)
                    if is_gone or max(tries, server.num_restarts) > self.settings.max_restarts:
                        self.events.append(f"server {server.number} given up: {error}")
                        return
                    self.events.append(f"server {server.number} lost again: {error}")
                    await asyncio.sleep(POLL_S)
        finally:
            server.recovery = None
            async with self._changed:
                self._changed.notify_all()

    async def _bring_up(self, server: Server, restart: bool) -> None:
        # A server whose memory was freed has no weights to go on with.
        has_ended = server.process is not None and bool(server.process.ended())
        if restart or has_ended or server.freed or not await server.client.is_alive():
            server.client.time_out_calls()
            if server.process is not None:
                await self._restart(server, server.process)
            await self._wait_until_up(server)
        await self._on_return(server.client)

    async def _restart(self, server: Server, process: ServerProcess) -> None:
        """Replace the process of a server, once the learner has left its memory."""
        if server.num_restarts >= self.settings.max_restarts:
            raise RuntimeError(f"restarted {server.num_restarts} times already; {process.log()}")
        server.num_restarts += 1
        await asyncio.to_thread(process.stop)
        await self._may_start.wait()
        # The same port: it is still reserved for this server.
        port = int(server.url.rpartition(":")[2] or 0)
        server.process = self._launcher.launch(self.settings, server.number, port)
        server.freed = ()
