"""The SGLang engine: implements `Engine` with one or many servers.

A turn is one `/generate` call with the whole stream, so no server holds anything that another could not compute again.
When a server dies, the turn is requested from another one, from its start. Each completion has the server's own count
of the prompt, which the agent loop checks. A turn ends as aborted when a server refuses it, or after `MAX_TRIES` tries;
when that happens to `MAX_GIVEN_UP` turns in a row, the engine raises `EngineDown`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.engines.base import Capabilities, WeightPath
from agents.engines.sglang.adapters import AdapterLoader, why_unsupported
from agents.engines.sglang.client import SGLangClient
from agents.engines.sglang.payloads import parse_scores, score_body
from agents.engines.sglang.process import Launcher
from agents.engines.sglang.servers import POLL_S, Server, ServerPool
from agents.engines.sglang.session import MAX_TRIES, SGLangSession, pause_s
from agents.engines.sglang.settings import SGLangSettings
from agents.engines.weight_servers import Adapter, EngineDown, ServerLost, ServerRefused, ServerStuck
from agents.types import ProcessedImage

#: How long a server that is back waits for a learner that is being started again.
WEIGHTS_WAIT_S = 300.0
#: Turns given up in a row, over all sessions, before the engine is down.
MAX_GIVEN_UP = 32
#: The kinds of memory that servers can free.
CACHE = "kv_cache"
WEIGHTS = "weights"


class SGLangEngine:
    """Writes turns on SGLang servers.

    Example::

        engine = SGLangEngine(SGLangSettings(model_path="path/to/checkpoint", num_servers=2), renderer.image_token_id)
        await engine.start()
        async with engine.session() as session:
            completion = await session.generate(request)
        await engine.pause()
        await engine.update_from_disk(Path("path/to/new"), version=1)
        await engine.resume()
        await engine.close()
    """

    def __init__(
        self,
        settings: SGLangSettings,
        image_token_id: int | None,
        context_length: int = 4096,
        launcher: Launcher | None = None,
    ) -> None:
        """Describe the servers; `launcher` starts them, by default on this host."""
        self.image_token_id = image_token_id
        self.context_length = context_length
        self.weight_version = 0
        #: Returns a folder with the current weights, for a server that is back; the code that pushes weights sets it.
        self.current_weights: Callable[[], Path] | None = None
        #: Called before the servers of others are let go; the code that pushes weights may set it.
        self.before_close: Callable[[], Awaitable[None]] | None = None
        #: Requests sent, and requests to be sent again.
        self.num_requests = self.num_retried = 0
        self.servers = ServerPool(settings, self._load_current_weights, image_token_id is not None, launcher)
        # Part of request ids and of image hashes: another run may have used the same servers.
        self._run = secrets.token_hex(6)
        self._numbers = itertools.count()
        #: How often a server that came back got weights.
        self.num_loaded = 0
        self._num_given_up = 0  # turns given up since the last answer
        self._num_updates = 0
        self._adapter: Adapter | None = None
        #: The name under which servers hold the adapter that writes; "" for the weights alone.
        self.adapter_name = ""
        self.adapters = AdapterLoader(settings.model_path if settings.urls else "")
        self._aborts: set[asyncio.Task[Any]] = set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        #: Set unless the engine is paused.
        self.may_write = asyncio.Event()
        self.may_write.set()

    @property
    def settings(self) -> SGLangSettings:
        """How servers are started and asked, with their key once they are launched."""
        return self.servers.settings

    @property
    def capabilities(self) -> Capabilities:
        """What the servers can do; those that others started share no GPU with the learner."""
        weights: set[WeightPath] = {"disk", "nccl", "adapter"}
        if self.are_started_here:
            weights.add("ipc")
        return Capabilities(
            frozenset(weights),
            has_servers=True,
            frees_memory=self.settings.frees_memory,
            gives_kept_ids=True,
            gives_routes=self.settings.routes is not None,
        )

    @property
    def are_started_here(self) -> bool:
        """Whether the run starts the servers; others may hold any weights."""
        return not self.settings.urls

    @property
    def gpus_per_server(self) -> int:
        """The GPUs of each server that is started here."""
        return self.settings.tensor_parallel

    def why_no_adapter(self, layers: Sequence[str]) -> str:
        """Return why SGLang cannot serve an adapter of these layers; "" if it can."""
        return why_unsupported(layers)

    def launch(self) -> None:
        """Start the processes of servers and return at once; `start` waits for them."""
        self.servers.launch()

    def adapt(self, rank: int, targets: Sequence[str]) -> None:
        """Have servers launched so that they take adapters of this rank on these layers; call it before `launch`."""
        self.servers.settings = replace(self.settings, lora_rank=rank, lora_targets=tuple(targets))

    async def start(self) -> None:
        """Start or find the servers; raises `UserError` where that fails."""
        await self.servers.start()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SGLangSession]:
        """Open a session; it stays on one server, which caches what it has read, as long as that server is up."""
        session = SGLangSession(self)
        try:
            yield session
        finally:
            session.release_server()

    async def pause(self) -> None:
        """Abort the requests on all servers; their turns continue after `resume`."""
        self.may_write.clear()
        while not self._idle.is_set():
            # Repeated, because a server may miss a request that is only just arriving.
            # On all servers, because one in recovery may still write.
            body = {"abort_all": True, "rid": ""}
            calls = [(server, server.client.call("abort_request", body, 10)) for server in self.servers.all]
            await asyncio.gather(*(self._or_lost(server, call) for server, call in calls))
            try:
                await asyncio.wait_for(self._idle.wait(), timeout=0.1)
            except TimeoutError:
                continue

    async def resume(self) -> None:
        """Continue writing; servers that freed their caches for a learner take that memory again.

        Not earlier: the learner may hold all its weights twice until they have reached every server.
        """
        with_weights = [server for server in self.servers.up if WEIGHTS not in server.freed]
        await asyncio.gather(*(self._or_lost(server, server.take_memory(CACHE)) for server in with_weights))
        self.may_write.set()

    async def _or_lost(self, server: Server, call: Awaitable[Any]) -> None:
        """Wait for a call to a server, and report the server as lost where that fails."""
        try:
            await call
        except (ServerLost, ServerRefused) as error:
            self.servers.report_lost(server, str(error), must_restart=isinstance(error, ServerStuck))

    async def free_memory(self) -> None:
        """Pause, and have servers free their memory for a learner on their GPUs: until the next `update` that of their
        weights, until the next `resume` that of their caches.

        Servers that take adapters keep their weights, since nothing brings them again.
        """
        await self.pause()
        await self.servers.free_memory((CACHE,) if self.settings.lora_rank else (CACHE, WEIGHTS))

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first, from the first server that is up."""
        return (await self.score_everywhere(ids, images))[0]

    async def score_everywhere(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> list[NDArray[np.float32]]:
        """Return the scores of every server that is up; wait while none is.

        Raises:
            EngineDown: every server has been given up.
            ServerLost, ServerRefused: none gives log-probs.
        """

        async def one(server: Server) -> NDArray[np.float32] | ServerLost:
            body = score_body(ids, images, self.image_token_id, self.adapter_name)
            try:
                return parse_scores(await self._ask(server, body, images, self.salt), len(ids))
            except ServerLost as error:
                self.servers.report_lost(server, str(error))
                return error

        for tries in range(1, MAX_TRIES + 1):
            await self.servers.pick()
            results = await asyncio.gather(*(one(server) for server in self.servers.up))
            if scores := [result for result in results if isinstance(result, np.ndarray)]:
                return scores
            await asyncio.sleep(pause_s(tries))
        raise results[0]  # type: ignore[misc]

    async def update_from_disk(self, folder: Path, version: int) -> None:
        """Load a checkpoint folder, which every server must be able to read, as weights `version`."""
        await self.update(lambda client: client.update_from_disk(str(folder.absolute()), version), version)

    async def update_adapter(self, adapter: Adapter, version: int) -> None:
        """Let an adapter over the checkpoint of `settings` write as weights `version`, on every server. Pause before.

        A server that is lost meanwhile, or refuses the adapter, gets it when it is back.
        """
        await self.update(self._give_adapter, version, adapter)

    async def offer_adapter(self, adapter: Adapter) -> str:
        """Do as `update_adapter` with version 0, if every server takes the adapter; else return why one refuses it."""
        self._use(0, adapter)

        async def one(server: Server) -> str:
            try:
                await self._give_adapter(server.client)
            except ServerLost as error:
                if await server.client.is_alive():  # one with several data-parallel ranks fails with status 500
                    return str(error)
                self.servers.report_lost(server, str(error))
            except ServerRefused as error:
                return str(error)
            return ""

        refusals = [reason for reason in await asyncio.gather(*map(one, self.servers.up)) if reason]
        if refusals:
            self._use(0, None)
        return "; ".join(refusals)

    async def update(
        self, push: Callable[[SGLangClient], Awaitable[None]], version: int, adapter: Adapter | None = None
    ) -> None:
        """Call `push(client)` for every server that is up; from then on weights `version` write. Pause before.

        A server that is lost meanwhile, or refuses the weights, loads `current_weights` when it is back.
        """
        assert self._idle.is_set(), "weights change while nothing is being written: pause first"
        self._use(version, adapter)
        # New weights empty the prefix caches, so no server knows a prompt any more.
        self.servers.router.forget()

        async def one(server: Server) -> None:
            await server.take_memory(WEIGHTS)
            await push(server.client)

        await asyncio.gather(*(self._or_lost(server, one(server)) for server in self.servers.up))
        self.servers.end_freeing()

    def _use(self, version: int, adapter: Adapter | None) -> None:
        """Let weights `version` write: an adapter under a name that no other has, or the weights alone."""
        if self._num_updates and version <= self.weight_version:
            self.num_loaded += 1  # images that the abandoned weights encoded are of no use
        self._num_updates += 1
        self.weight_version = version
        self._adapter = adapter
        self.adapter_name = ""
        if adapter:
            self.adapter_name = f"{self._run}-{version}-{next(self._numbers)}"

    async def _load_current_weights(self, client: SGLangClient) -> None:
        """Load the current weights into a server that is back, and again if they change meanwhile.

        What it reports does not tell whether it has them: a run that went back comes to the same version again.
        """
        if not self._num_updates and self.is_current(await client.weight_version()):
            return
        loaded = None
        while loaded != (self._num_updates, self.weight_version):
            loaded = self._num_updates, self.weight_version
            try:
                await self._give_current(client)
            except ServerRefused:
                if loaded == (self._num_updates, self.weight_version):  # else other weights are current by now
                    raise
            self.num_loaded += 1

    async def _give_current(self, client: SGLangClient) -> None:
        """Give a server that is back the current adapter, or the current weights from their folder."""
        if self._adapter:
            await self._give_adapter(client)
            return
        version, folder = await self._current_folder()
        await client.update_from_disk(str(folder.absolute()), version)

    async def _current_folder(self) -> tuple[int, Path]:
        """Return the current weights. What writes them may be starting again, which is no fault of the server."""
        assert self.current_weights, "the code that pushes weights must set `current_weights`"
        deadline = time.monotonic() + WEIGHTS_WAIT_S
        fault = ""
        while True:
            try:
                return self.weight_version, await asyncio.to_thread(self.current_weights)
            except Exception as error:
                if time.monotonic() > deadline:
                    raise
                if fault != str(error):
                    fault = str(error)
                    self.servers.events.append(f"a server that is back waits for weights: {fault}")
            await asyncio.sleep(POLL_S)

    async def _give_adapter(self, client: SGLangClient) -> None:
        """Load the current adapter into a server."""
        assert self._adapter is not None
        await self.adapters.give(client, self.adapter_name, self._adapter)

    @property
    def _version_name(self) -> str:
        """The version that a server with the current weights reports: the adapter's name, or the number."""
        return self.adapter_name or str(self.weight_version)

    def is_current(self, name: str) -> bool:
        """Return whether the version that a server reports is the current one; a new server reports "default"."""
        current = self._version_name
        return name == current or (name == "default" and current == "0" and not self._num_updates)

    async def close(self) -> None:
        """Stop the servers that this engine started; turns that wait fail. Others forget the adapter."""
        if self._aborts:  # an external server would continue writing
            await asyncio.wait(self._aborts, timeout=2)
        if self.settings.urls and not self._in_flight:
            await self.adapters.forget_all(server.client for server in self.servers.up)
            if self.before_close:
                await self.before_close()
        await self.servers.close()
        self.may_write.set()

    async def send(self, server: Server, body: dict[str, Any], images: Sequence[ProcessedImage], salt: str) -> Any:
        """Send a request and wait for the answer; a cancelled or failed wait also aborts the request."""
        self.num_requests += 1
        self._in_flight += 1
        self._idle.clear()
        try:
            return await self._ask(server, body, images, salt)
        except (asyncio.CancelledError, ServerLost):
            self._abort(server, body["rid"])
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _ask(self, server: Server, body: dict[str, Any], images: Sequence[ProcessedImage], salt: str) -> Any:
        """Send a request and return the answer; raise `ServerLost` for one refused by a server without the adapter."""
        adapter = body.get("lora_path", "")
        try:
            return await server.generate(body, images, salt)
        except (asyncio.CancelledError, ServerLost):
            self.adapters.note_unended(server.client, adapter)
            raise
        except ServerRefused as error:
            if adapter and (name := await server.client.weight_version()) != adapter:  # restarted behind our back
                raise ServerLost(f"{server.client.url} has weights {name}, not adapter {adapter}") from error
            raise

    def _abort(self, server: Server, rid: str) -> None:
        """Abort a request in the background; whether the server gets the call does not matter."""
        call = server.client.call("abort_request", {"rid": rid}, timeout_s=10)
        task = asyncio.get_running_loop().create_task(call)
        self._aborts.add(task)  # the event loop holds only a weak reference
        task.add_done_callback(self._aborts.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def is_paused(self) -> bool:
        """Whether requests must wait for `resume`."""
        return not self.may_write.is_set()

    def count_answer(self) -> None:
        """Count a good answer: the turns given up are no longer in a row."""
        self._num_given_up = 0

    def count_given_up(self, reason: str) -> None:
        """Count a turn that was given up.

        Raises:
            EngineDown: `MAX_GIVEN_UP` turns in a row were given up.
        """
        self.servers.events.append(f"turn given up: {reason}")
        self._num_given_up += 1
        if self._num_given_up >= MAX_GIVEN_UP:
            raise EngineDown(f"{self._num_given_up} turns in a row were given up, the last one: {reason}")

    def next_request_id(self) -> str:
        """Return a new request id, all of one length: a server aborts every request whose id begins with a given id."""
        return f"{self._run}-{next(self._numbers):012d}"

    @property
    def salt(self) -> str:
        """The salt of streams and images, which differs between runs, loads of weights, and weights but adapters.

        Adapters leave the vision tower as it is, so what a server has encoded stays right for the next one. Servers
        keep the streams that each adapter has read apart themselves.
        """
        return f"{self._run}/{'checkpoint' if self._adapter else self.weight_version}/{self.num_loaded}"
