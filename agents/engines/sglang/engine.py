"""The SGLang engine: `Engine` over one or many servers.

A turn is one `/generate` call with the whole stream, so a server keeps nothing that another could not redo: when one
dies, the turn is asked for again elsewhere, and what it had written there counts for nothing. The server's own count of
the prompt comes back with each completion and is checked by the agent loop. A turn that is refused, or asked for in
vain again and again, ends as aborted; when that happens to many in a row, the engine is down.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.engines.sglang.client import ServerLost, ServerRefused, SGLangClient, generate_body, score_body
from agents.engines.sglang.servers import EngineDown, Server, Servers, SGLangSettings
from agents.types import Completion, GenerateRequest, ProcessedImage, add_run

#: How often one turn is asked for, where no answer makes sense, before its episode is given up: over half a minute.
MAX_TRIES = 10
#: How many turns are given up in a row, over all sessions, before the engine is.
MAX_GIVEN_UP = 32


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
        #: Requests sent, those to be sent again, and answers thrown away for their old weights.
        self.num_asked = self.num_retried = self.num_outdated = 0
        self.servers = Servers(settings, self._bring_up_to_date)
        # Names of requests, and salt of image hashes: another run may have used the same servers.
        self._run = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._num_loaded = 0  # how often a server that came back was given weights
        self._num_given_up = 0  # turns, since the last that was written
        self._were_weights_given = False
        self._aborts: set[asyncio.Task[Any]] = set()
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
            # And on all servers, for one that is being mended may still write.
            await asyncio.gather(*(self._abort_all(server) for server in self.servers.all))
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
        except (ServerLost, ServerRefused) as error:
            self.servers.report_lost(server, str(error))

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first, as the first server that is up gives them."""
        return (await self.score_everywhere(ids, images))[0]

    async def score_everywhere(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> list[NDArray[np.float32]]:
        """Return what every server that is up gives for `score`; waits for one where none is.

        Raises:
            EngineDown: every server has been given up.
            ServerLost, ServerRefused: none gives log-probs.
        """

        async def one(server: Server) -> NDArray[np.float32] | ServerLost:
            body = score_body(ids, images, self.image_token_id, self.salt)
            try:
                return input_logprobs(await server.client.call("generate", body), len(ids))
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

    async def update(self, push: Callable[[SGLangClient], Awaitable[None]], version: int) -> None:
        """Call `push` for every server that is up, while nothing is written; from then on weights `version` write.

        A server that is lost meanwhile, or refuses them, is given `current_weights` when it is back.
        """
        assert self._idle.is_set(), "weights change while nothing is being written: pause first"
        self.weight_version, self._were_weights_given = version, True

        async def one(server: Server) -> None:
            try:
                await push(server.client)
            except (ServerLost, ServerRefused) as error:
                self.servers.report_lost(server, str(error))

        await asyncio.gather(*(one(server) for server in self.servers.up))

    async def _bring_up_to_date(self, client: SGLangClient) -> None:
        """Load the current weights into a server that is back, unless it has them."""
        loaded = None
        while not self.is_current(name := await client.weight_version()):
            if loaded == self.weight_version:
                raise ServerRefused(f"{client.url} was told that it has loaded weights {loaded} and says {name!r}")
            assert self.current_weights, "whoever changes the weights must be able to give them again"
            loaded, folder = self.weight_version, await asyncio.to_thread(self.current_weights)
            try:
                await client.update_from_disk(str(folder.absolute()), loaded)
            except ServerRefused:
                if loaded == self.weight_version:  # else newer ones have taken the folder's place meanwhile
                    raise
            self._num_loaded += 1

    def is_current(self, name: str) -> bool:
        """Whether a server's name for its weights means the current ones; one that was never told says "default"."""
        current = str(self.weight_version)
        return name == current or (name == "default" and current == "0" and not self._were_weights_given)

    async def close(self) -> None:
        """Stop the servers that were started here; turns that wait fail."""
        if self._aborts:  # servers that others started would write on
            await asyncio.wait(self._aborts, timeout=2)
        await self.servers.close()
        self._may_write.set()

    async def ask(self, server: Server, body: dict[str, Any]) -> Any:
        """Send a request and wait for the answer; a wait that is given up ends the writing too."""
        self.num_asked += 1
        self._in_flight += 1
        self._idle.clear()
        try:
            return await server.client.call("generate", body)
        except (asyncio.CancelledError, ServerLost):
            self._abort(server, body["rid"])
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _abort(self, server: Server, rid: str) -> None:
        """End a request that nobody waits for; whether that arrives, nobody waits for either."""
        call = server.client.call("abort_request", {"rid": rid}, timeout_s=10)
        task = asyncio.get_running_loop().create_task(call)
        self._aborts.add(task)  # the loop alone would not keep it
        task.add_done_callback(self._aborts.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def may_write(self) -> None:
        """Wait while the engine is paused."""
        await self._may_write.wait()

    @property
    def is_paused(self) -> bool:
        """Whether nothing may be sent now."""
        return not self._may_write.is_set()

    def note_answer(self) -> None:
        """Note that a server answers as it should."""
        self._num_given_up = 0

    def give_up(self, reason: str) -> None:
        """Note that a turn was given up.

        Raises:
            EngineDown: as were so many before it that no turn can be expected any more.
        """
        self.servers.events.append(f"turn given up: {reason}")
        self._num_given_up += 1
        if self._num_given_up >= MAX_GIVEN_UP:
            raise EngineDown(f"{self._num_given_up} turns in a row were given up, the last one: {reason}")

    def next_name(self) -> str:
        """Return a name for a request, never used before; none begins another, for an abort is of all that do so."""
        return f"{self._run}-{next(self._numbers):012d}"

    @property
    def salt(self) -> str:
        """What makes image hashes those of this run and these weights."""
        return f"{self._run}/{self.weight_version}/{self._num_loaded}"


class SGLangSession:
    """One episode's turns."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine
        self._server: Server | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Write one turn, over pauses for new weights and deaths of servers."""
        engine, turn, tries = self._engine, _Turn(request), 0
        while not turn.is_whole:
            server = await self._place()
            body = generate_body(request, turn.ids, engine.next_name(), engine.image_token_id, engine.salt)
            try:
                part = read_answer(await engine.ask(server, body))
                if not engine.is_current(part.version):
                    engine.num_outdated += 1
                    raise ServerLost(f"wrote with weights {part.version}, not {engine.weight_version}")
                turn.add(part, engine.weight_version)
                if part.ids or turn.is_whole or engine.is_paused:
                    engine.note_answer()
                    continue
                fault = f"{server.client.url} ended it before it wrote anything"
            except ServerLost as error:
                engine.servers.report_lost(server, str(error))
                engine.num_retried += 1
                fault = str(error)
            except ServerRefused as error:
                tries, fault = MAX_TRIES - 1, str(error)
            tries += 1
            if tries == MAX_TRIES:
                engine.give_up(fault)
                break
            await asyncio.sleep(pause_s(tries))
        return turn.completion()

    async def _place(self) -> Server:
        """Return the session's server, another one where it is not up, once the engine is not paused."""
        while True:
            await self._engine.may_write()
            if self._server is None or not self._server.is_up:
                self.leave()
                self._server = await self._engine.servers.pick()
                self._server.num_sessions += 1
            if not self._engine.is_paused:  # it may be by now
                return self._server

    def leave(self) -> None:
        """Give the place at the server up."""
        if self._server is not None:
            self._server.num_sessions -= 1
            self._server = None


@dataclass(eq=False)
class _Turn:
    """A turn that is being written, in parts where the engine was paused."""

    request: GenerateRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    num_misread: int = 0
    num_cached: int = 0
    finish: str = "abort"

    @property
    def is_whole(self) -> bool:
        return self.finish != "abort" or len(self.ids) >= self.request.max_new_tokens

    def add(self, part: Answer, version: int) -> None:
        """Append what was written by these weights."""
        if part.prompt_length is not None and not self.num_misread:
            self.num_misread = part.prompt_length - len(self.request.ids) - len(self.ids)
        self.num_cached = self.num_cached if self.ids else part.num_cached
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.finish = part.finish
        add_run(self.versions, version, len(part.ids))

    def completion(self) -> Completion:
        return Completion(
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish="length" if self.is_whole and self.finish == "abort" else self.finish,  # type: ignore[arg-type]
            prompt_length=len(self.request.ids) + self.num_misread,
            versions=tuple(self.versions),
            num_cached=self.num_cached,
        )


class Answer:
    """What `/generate` gave, read: ids and log-probs of the tokens written, why it ended, counts, weights."""

    def __init__(self, answer: dict[str, Any]) -> None:
        meta = answer["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        self.ids = [int(token) for _, token, *_ in pairs]
        self.logprobs = [math.nan if logprob is None else float(logprob) for logprob, *_ in pairs]  # NaN is no JSON
        self.finish = meta["finish_reason"]["type"]
        # A request that is ended in the server's queue has read nothing, and comes back without a count.
        counted = self.finish != "abort" or "prompt_tokens" in meta
        self.prompt_length = int(meta["prompt_tokens"]) if counted else None
        self.num_cached = int(meta.get("cached_tokens") or 0)
        self.version = str(meta["weight_version"])
        if self.finish not in ("stop", "length", "abort"):
            raise ValueError(f"finish {self.finish!r}")
        if self.ids != answer["output_ids"]:
            raise ValueError(f"log-probs are of {self.ids}, the answer is {answer['output_ids']}")


def read_answer(answer: Any) -> Answer:
    """Return what `/generate` gave; raises `ServerLost` where that is not an answer."""
    try:
        return Answer(answer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ServerLost(f"no answer: {type(error).__name__} {error} in {answer!r:.500}") from error


def input_logprobs(answer: Any, num_ids: int) -> NDArray[np.float32]:
    """Return the log-prob of each id of a scored stream but the first; raises `ServerLost` where they are not there."""
    try:
        row = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
        if len(row) != num_ids:
            raise ValueError(f"{len(row)} log-probs for {num_ids} ids")
        return np.asarray(row[1:], dtype=np.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise ServerLost(f"no scores: {type(error).__name__} {error} in {answer!r:.500}") from error


def pause_s(tries: int) -> float:
    """Return how long to wait before another try: 0.1 s, then twice that each time, 10 s at most."""
    return min(0.05 * 2**tries, 10.0)
