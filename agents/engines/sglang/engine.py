"""The SGLang engine: `Engine` over one or many servers.

A turn is one `/generate` call with the whole stream, so a server keeps nothing that another could not redo: when one
dies, the turn is asked for again elsewhere, and what it had written there counts for nothing. The server's own count of
the prompt comes back with each completion and is checked by the agent loop.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.engines.sglang.client import ServerLost, SGLangClient, generate_body, score_body
from agents.engines.sglang.servers import Server, Servers, SGLangSettings
from agents.types import Completion, GenerateRequest, ProcessedImage

#: How often one turn is asked for again after answers that are no answer, before its episode is given up.
MAX_TRIES = 10


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

    def __init__(self, settings: SGLangSettings, image_token_id: int | None, context_length: int = 4096) -> None:
        self.settings, self.image_token_id, self.context_length = settings, image_token_id, context_length
        self.weight_version = 0
        #: Returns a folder with the current weights, for a server that comes back; set by whoever changes the weights.
        self.current_weights: Callable[[], Path] | None = None
        #: Requests sent, those sent again after a server was lost, and answers thrown away for their old weights.
        self.num_asked = self.num_retried = self.num_outdated = 0
        self.servers = Servers(settings, self._bring_up_to_date)
        # Names of requests, and salt of image hashes: another run may have used the same servers.
        self._run = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._in_flight = 0
        self._idle: asyncio.Event = asyncio.Event()
        self._may_write: asyncio.Event = asyncio.Event()

    async def start(self) -> None:
        """Start or find the servers; raises `UserError` where that fails."""
        self._idle, self._may_write = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._may_write.set()
        await self.servers.start()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SGLangSession]:
        """Open a session; it stays with one server, which keeps what it has read, as long as that server is up."""
        session = SGLangSession(self)
        try:
            yield session
        finally:
            session.leave()

    async def pause(self) -> None:
        """Have every server end what it writes; the turns go on after `resume`."""
        self._may_write.clear()
        while not self._idle.is_set():
            # Repeated, for a request that a server is only just taking in is not ended by the first call.
            await asyncio.gather(*(self._abort_all(server) for server in self.servers.up))
            try:
                await asyncio.wait_for(self._idle.wait(), timeout=0.1)
            except TimeoutError:
                continue

    async def resume(self) -> None:
        """Write on."""
        self._may_write.set()

    async def _abort_all(self, server: Server) -> None:
        try:
            await server.client.call("abort_request", {"abort_all": True, "rid": ""}, timeout_s=10)
        except ServerLost as error:
            self.servers.report_lost(server, str(error))

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first, as the first server that is up gives them."""
        return (await self.score_everywhere(ids, images))[0]

    async def score_everywhere(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> list[NDArray[np.float32]]:
        """Return what every server that is up gives for `score`."""
        body = score_body(ids, images, self.image_token_id, self.salt)
        answers = await asyncio.gather(*(server.client.call("generate", body) for server in self.servers.up))
        rows = [[entry[0] for entry in answer["meta_info"]["input_token_logprobs"]] for answer in answers]
        assert all(len(row) == len(ids) for row in rows), f"{[len(row) for row in rows]} log-probs for {len(ids)} ids"
        return [np.asarray(row[1:], dtype=np.float32) for row in rows]

    async def update_from_disk(self, folder: Path, version: int) -> None:
        """Load a checkpoint folder, which every server must be able to read, as weights `version`."""
        await self.update(lambda client: client.update_from_disk(str(folder.absolute()), version), version)

    async def update(self, push: Callable[[SGLangClient], Awaitable[None]], version: int) -> None:
        """Call `push` for every server that is up, while nothing is written; from then on weights `version` write.

        A server that is lost meanwhile gets `current_weights` when it is back.
        """
        assert self._idle.is_set(), "weights change while nothing is being written: pause first"
        self.weight_version = version

        async def one(server: Server) -> None:
            try:
                await push(server.client)
            except ServerLost as error:
                self.servers.report_lost(server, str(error))

        await asyncio.gather(*(one(server) for server in self.servers.up))

    async def _bring_up_to_date(self, client: SGLangClient) -> None:
        """Load the current weights into a server that is back, unless it has them."""
        while not is_version((await client.call("model_info"))["weight_version"], self.weight_version):
            assert self.current_weights, "whoever changes the weights must be able to give them again"
            version, folder = self.weight_version, await asyncio.to_thread(self.current_weights)
            await client.update_from_disk(str(folder.absolute()), version)

    async def close(self) -> None:
        """Stop the servers that were started here."""
        await self.servers.close()

    async def ask(self, server: Server, body: dict[str, Any]) -> Any:
        """Send a request and wait for the answer; a wait that is given up ends the writing too."""
        self.num_asked += 1
        self._in_flight += 1
        self._idle.clear()
        try:
            return await server.client.call("generate", body)
        except (asyncio.CancelledError, ServerLost):
            abort = server.client.call("abort_request", {"rid": body["rid"]}, timeout_s=10)
            _forget(asyncio.ensure_future(abort))
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def may_write(self) -> None:
        """Wait while the engine is paused."""
        await self._may_write.wait()

    def next_name(self) -> str:
        """Return a name for a request, never used before."""
        return f"{self._run}-{next(self._numbers)}"

    @property
    def salt(self) -> str:
        """What makes image hashes those of this run and these weights."""
        return f"{self._run}/{self.weight_version}/{self.num_outdated}"


class SGLangSession:
    """One episode's turns."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine
        self._server: Server | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Write one turn, over pauses for new weights and deaths of servers."""
        engine = self._engine
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[tuple[int, int]] = []
        prompt_length, num_cached, finish, tries = len(request.ids), 0, "abort", 0
        while tries < MAX_TRIES:
            await engine.may_write()
            server = await self._place()
            version = engine.weight_version
            body = generate_body(request, ids, engine.next_name(), engine.image_token_id, engine.salt)
            try:
                answer = await engine.ask(server, body)
            except ServerLost as error:
                engine.servers.report_lost(server, str(error))
                engine.num_retried, tries = engine.num_retried + 1, tries + 1
                continue
            part = Answer(answer)
            if not is_version(part.version, version):
                engine.servers.report_lost(server, f"wrote with weights {part.version}, not {version}")
                tries, engine.num_outdated = tries + 1, engine.num_outdated + 1
                continue
            prompt_length = part.prompt_length - len(ids)
            num_cached = num_cached if ids else part.num_cached
            ids += part.ids
            logprobs += part.logprobs
            versions += [(version, len(part.ids))] if part.ids else []
            finish = part.finish
            if finish != "abort" or len(ids) >= request.max_new_tokens:
                break
            tries += not part.ids
        finish = "length" if finish == "abort" and len(ids) >= request.max_new_tokens else finish
        return Completion(tuple(ids), tuple(logprobs), finish, prompt_length, _joined(versions), num_cached)  # type: ignore[arg-type]

    async def _place(self) -> Server:
        """Return the session's server, another one where it is not up."""
        if self._server is None or not self._server.is_up:
            self.leave()
            self._server = await self._engine.servers.pick()
            self._server.num_sessions += 1
        return self._server

    def leave(self) -> None:
        """Give the place at the server up."""
        if self._server is not None:
            self._server.num_sessions -= 1
            self._server = None


class Answer:
    """What `/generate` gave, read: ids and log-probs of the tokens written, why it ended, counts, weights."""

    def __init__(self, answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        self.ids = [int(token) for _, token, *_ in pairs]
        self.logprobs = [math.nan if logprob is None else float(logprob) for logprob, *_ in pairs]  # NaN is no JSON
        self.finish = meta["finish_reason"]["type"]
        self.prompt_length = int(meta["prompt_tokens"])
        self.num_cached = int(meta.get("cached_tokens") or 0)
        self.version = str(meta["weight_version"])
        assert self.ids == answer["output_ids"], f"log-probs are of {self.ids}, the answer is {answer['output_ids']}"


def is_version(given: str, version: int) -> bool:
    """Whether a server's name for its weights means this version; one that was never told says "default"."""
    return given == str(version) or (given == "default" and version == 0)


def _joined(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return runs of (version, tokens) with neighbours of one version as one."""
    joined: list[tuple[int, int]] = []
    for version, count in runs:
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + count)
        else:
            joined.append((version, count))
    return tuple(joined)


def _forget(task: asyncio.Future[Any]) -> None:
    """Let a task run whose outcome nobody needs."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
