"""The embedded engine: runs all episodes as batches through one network in this process.

A batch starts when all open sessions wait for a turn, so a run with one seed always forms the same batches; the engine
waits at most `max_wait_s` for a slow environment. Each session's keys and values are kept between turns: a later turn
reads only what is new. Sessions with the same prompt read it once. `pause` stops a batch at its next token; cancelling
`generate` stops its row.

Legend: B rows of a batch, T new tokens, C cached columns, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.engines.base import Capabilities
from agents.engines.busy import BusyTime
from agents.engines.decode_step import DecodeStep, GraphPool
from agents.engines.hf_batch import BatchCache, BatchTurn, CachedPrefix, Sampler, unread_images, with_one_prompt
from agents.model.cpu import compute
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.types import Completion, GenerateRequest, ProcessedImage


@dataclass(eq=False)
class _Session:
    """A session, and the part of its latest stream that the network has read."""

    engine: HFEngine
    order: int
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    stream: int = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        if request.stream != self.stream:
            self.stream = request.stream
            self.drop_prefix()
        prefix_ids = self.prefix.ids
        assert request.ids[: len(prefix_ids)] == prefix_ids, "the stream must extend what the session has read"
        return await self.engine.submit(self, request)

    def drop_prefix(self) -> None:
        """Drop keys and values: the next turn reads its stream from the start."""
        self.prefix = CachedPrefix()


class HFEngine:
    """Batched sampling from a `PolicyModel`.

    Example::

        engine = HFEngine(PolicyModel.load(path))
        async with engine.session() as session:
            completion = await session.generate(request)
        engine.load_weights(learner_weights, version=1)     # between rollouts, or between pause and resume
    """

    def __init__(
        self,
        model: PolicyModel,
        context_length: int = 4096,
        max_batch: int = 64,
        device: str | torch.device = "cpu",
        max_wait_s: float = 2.0,
        keeps_kv_cache: bool = False,
    ) -> None:
        self.model = model.to(device).eval()
        self._dtype = next(self.model.parameters()).dtype
        self.context_length = context_length
        self.max_batch = max_batch
        self.device = torch.device(device)
        self.max_wait_s = max_wait_s
        self.keeps_kv_cache = keeps_kv_cache
        #: A batch goes on without its ended rows once no more than this share still writes. On a GPU a step takes about
        #: as long for all rows as for half of them, and another number of rows needs another graph.
        if self.device.type == "cuda":
            self._least_alive = 0.25
            self._graphs = GraphPool(self.device)
        else:
            self._least_alive = 0.75
            self._graphs = None
        self._step: DecodeStep | None = None
        self.weight_version = 0
        self.busy = BusyTime()
        self._opened = 0
        self._open: dict[int, _Session] = {}
        self._waiting: list[tuple[_Session, BatchTurn]] = []
        self._waiting_since = 0.0
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._running: asyncio.Task[None] | None = None
        self._paused = self._closed = False

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_Session]:
        """Open a session; waits while `max_batch` are open."""
        # A semaphore belongs to one event loop, and an engine may outlive several.
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.max_batch))
        async with slots:
            session = _Session(self, self._opened)
            self._opened += 1
            self._open[session.order] = session
            try:
                yield session
            finally:
                del self._open[session.order]
                self._start_if_ready()

    async def submit(self, session: _Session, request: GenerateRequest) -> Completion:
        """Queue one turn; it runs once all open sessions wait for a turn."""
        if self._closed:
            raise RuntimeError("the engine was closed before the turn was asked for")
        turn = BatchTurn(request, session.prefix, asyncio.get_running_loop().create_future())
        self._queue(session, turn)
        try:
            return await turn.future
        except asyncio.CancelledError:
            session.drop_prefix()  # it may hold tokens that the session never got
            self._waiting = [entry for entry in self._waiting if entry[1] is not turn]
            raise

    def _queue(self, session: _Session, turn: BatchTurn) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._wait_at_most()
        self._waiting.append((session, turn))
        # One pass of the event loop lets sessions that are about to open or submit join this batch.
        loop.call_soon(self._start_if_ready)

    def _wait_at_most(self) -> None:
        """Start a batch after `max_wait_s` at the latest."""
        loop = asyncio.get_running_loop()
        self._waiting_since = loop.time()
        loop.call_later(self.max_wait_s, self._start_if_ready)

    def _start_if_ready(self) -> None:
        if self._running or self._paused or not self._waiting:
            return
        loop = asyncio.get_running_loop()
        overdue = loop.time() - self._waiting_since >= self.max_wait_s
        if len(self._waiting) < len(self._open) and not overdue:
            return
        # One draw serves all rows of a batch, so they are drawn alike.
        law = self._waiting[0][1].law
        # In the order in which sessions opened: the order in which turns arrive depends on the clock.
        batch = sorted(
            (entry for entry in self._waiting if entry[1].law == law),
            key=lambda entry: entry[0].order,
        )
        self._waiting = [entry for entry in self._waiting if entry[1].law != law]
        if self._waiting:  # turns of an evaluation, or of training beside one
            self._wait_at_most()
        self._running = loop.create_task(self._run(batch))

    async def _run(self, batch: Sequence[tuple[_Session, BatchTurn]]) -> None:
        try:
            with self.busy.request():
                await compute(self.write, [turn for _, turn in batch])
            for session, turn in batch:
                if turn.future.cancelled():
                    continue
                session.prefix = turn.prefix
                if turn.is_whole:
                    turn.future.set_result(turn.completion())
                else:  # paused: it continues from what it has
                    self._queue(session, turn)
        except Exception as error:  # every waiting episode must get it, whatever it is
            for _, turn in batch:
                if not turn.future.done():
                    turn.future.set_exception(error)
        finally:
            self._running = None
            self._start_if_ready()

    async def start(self) -> None:
        """Do nothing: the network is loaded, and batches run when turns wait."""

    async def pause(self) -> None:
        """Stop the running batch at its next token; its turns wait with what they have."""
        self._paused = True
        if self._running:
            await asyncio.wait([self._running])

    async def resume(self) -> None:
        """Continue every turn at its next token, with the random number that the token would have got anyway."""
        self._paused = False
        if self._waiting:
            self._wait_at_most()
        self._start_if_ready()

    async def close(self) -> None:
        """Stop writing and free the keys and values of all sessions; turns that wait fail."""
        self._closed = True
        await self.pause()
        for session, turn in self._waiting:
            session.drop_prefix()
            if not turn.future.done():
                turn.future.set_exception(RuntimeError("the engine was closed while the turn was being written"))
        self._waiting = []

    @property
    def capabilities(self) -> Capabilities:
        """It copies weights in memory, or reads them from disk."""
        return Capabilities(
            frozenset({"memory", "disk"}), gives_kept_ids=True, gives_routes=self.model.routing.shape is not None
        )

    def weights(self) -> Mapping[str, Tensor]:
        """Return its weights by their names in the network."""
        return dict(self.model.named_parameters())

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in place, between rollouts or while paused.

        Open sessions read their streams again, or with `keeps_kv_cache` go on from what the older weights have read,
        unless the run goes back to these.
        """
        idle = self._paused and not self._running
        assert idle or not self._open, f"weights change only while paused, {len(self._open)} sessions are open"
        own = self.weights()
        assert own.keys() == weights.keys(), sorted(own.keys() ^ weights.keys())[:3]
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)
        # A run that goes back must not use what the abandoned weights have read.
        is_next = version > self.weight_version
        self.weight_version = version
        if self.keeps_kv_cache and is_next:
            return
        for session in self._open.values():
            session.drop_prefix()
        for _, turn in self._waiting:
            turn.prefix = CachedPrefix()

    async def update_from_disk(self, folder: Path, version: int) -> None:
        """Copy the weights of a checkpoint folder, between rollouts or while paused."""
        loaded = await compute(PolicyModel.load, folder, self._dtype)
        self.load_weights(dict(loaded.named_parameters()), version)

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first, given those before it, at temperature 1; nothing suppressed."""
        return await compute(stream_logprobs, self.model, ids, images, self.device, self._dtype)

    @torch.inference_mode()
    def write(self, turns: Sequence[BatchTurn]) -> None:
        """Write these turns as one batch, each from where it stands to its end, or until `pause`."""
        laws = {turn.law for turn in turns}
        assert len(laws) == 1, f"a batch is drawn with the same parameters of sampling, got {laws}"
        for turn in turns:
            turn.note_cached(len(turn.prefix.ids))
        self._read_prompts(turns)
        # The cache never grows: it has room for the longest unread part and the longest turn.
        capacity = max(len(t.stream) - len(t.prefix.ids) for t in turns) + max(t.num_left for t in turns)
        cache = BatchCache([turn.prefix for turn in turns], capacity, self.device)
        positions_B = torch.tensor(
            [int(self.model.positions(t.stream, t.request.images).max()) + 1 for t in turns], device=self.device
        )
        self._decode(cache, self._prefill(turns, [len(turn.stream) for turn in turns], cache), positions_B, turns)
        self._step = None
        for turn in turns:
            turn.stamp(self.weight_version)

    def _read_prompts(self, turns: Sequence[BatchTurn]) -> None:
        """Read the prompts that new sessions share, all but the last token, and give them to their turns."""
        groups = with_one_prompt(turns, self.model.image_token_id)
        if not groups:
            return
        first = [group[0] for group in groups]
        # Without the last token, which each session reads itself: its logits are those to draw from.
        ends = [len(turn.stream) - 1 for turn in first]
        cache = BatchCache([turn.prefix for turn in first], max(ends), self.device)
        self._prefill(first, ends, cache)
        for row, group in enumerate(groups):
            prompt = CachedPrefix(first[row].stream[:-1], cache.row(row, is_last=True), cache.routes_of(row))
            for turn in group:
                turn.prefix = prompt

    def _next(self, cache: BatchCache, ids_B: Tensor, positions_B: Tensor, real: Sequence[bool]) -> Tensor:
        """Read one more token a row; return the logits after it, (B, V)."""
        real_B1 = torch.tensor(real, device=self.device)[:, None]
        cache.begin(real_B1)
        if self.device.type == "cuda":
            logits_BV = self._step_of(cache, len(real)).next_logits(ids_B, positions_B)
        else:
            seen_BC = torch.cat([cache.seen_BC, torch.ones_like(real_B1)], dim=-1)
            logits_BV = self.model.next_logits(ids_B, positions_B, seen_BC, cache)
        cache.advance()
        return logits_BV

    def _step_of(self, cache: BatchCache, num_rows: int) -> DecodeStep:
        """Return the decode step of this batch, captured where the network allows it."""
        if self._step is None or not self._step.fits(cache, num_rows):
            self._step = DecodeStep(self.model, cache, num_rows, self.device)
            if self._graphs and not self._step.capture(self._graphs):
                self._graphs = None
        return self._step

    def _prefill(self, turns: Sequence[BatchTurn], ends: Sequence[int], cache: BatchCache) -> Tensor:
        """Read what is new of each stream up to its end here; return the logits after it, (B, V)."""
        width = max(end - len(turn.prefix.ids) for end, turn in zip(ends, turns, strict=True))
        # Padded on the left, so that what is new ends at the same column in all rows.
        ids_BT = torch.zeros(len(turns), width, dtype=torch.long)
        positions_3BT = torch.zeros(3, len(turns), width, dtype=torch.long)
        real_BT = torch.zeros(len(turns), width, dtype=torch.bool)
        images = []
        for row, (turn, end) in enumerate(zip(turns, ends, strict=True)):
            read = len(turn.prefix.ids)
            stream = turn.stream[:end]
            new = end - read
            ids_BT[row, width - new :] = torch.tensor(stream[read:])
            positions_3BT[:, row, width - new :] = torch.from_numpy(
                self.model.positions(stream, turn.request.images)[:, read:]
            )
            real_BT[row, width - new :] = True
            images.append(unread_images(turn, self.model.image_token_id))
        ids_BT, positions_3BT, real_BT = (x.to(self.device) for x in (ids_BT, positions_3BT, real_BT))
        past_BC = cache.seen_BC
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        mask_BTC = torch.cat(
            [past_BC[:, None].expand(-1, width, -1), causal_TT & real_BT[:, None]],
            dim=-1,
        )
        # A padding query would see nothing and turn to NaN; let it see itself.
        mask_BTC[:, :, past_BC.shape[1] :] |= torch.eye(width, dtype=torch.bool, device=self.device) & ~real_BT[:, None]
        vision = VisionBatch.build(images, self.device)
        last_BT = torch.zeros_like(real_BT)
        last_BT[:, -1] = True
        cache.begin(real_BT)
        logits_BV = self.model(ids_BT, positions_3BT, mask_BTC[:, None], last_BT, vision, cache)
        cache.advance()
        return logits_BV

    def _decode(self, cache: BatchCache, logits_BV: Tensor, positions_B: Tensor, turns: Sequence[BatchTurn]) -> None:
        """Sample until every row has stopped; give each turn its new prefix."""
        sampler = Sampler(turns, self.device)
        while True:
            ids_B = sampler.draw(logits_BV)
            for index, turn in enumerate(sampler.turns):
                if self._paused or turn.future.cancelled():
                    sampler.alive[index] = False
            if not any(sampler.alive):
                self._release(sampler, cache, range(len(sampler.turns)), is_last=True)
                return
            # Rows that have ended are computed along until few are alive: leaving them out copies the cache.
            if sum(sampler.alive) <= self._least_alive * len(sampler.alive):
                self._release(sampler, cache, [i for i, alive in enumerate(sampler.alive) if not alive], is_last=False)
                keep = torch.tensor(sampler.alive, device=self.device).nonzero()[:, 0]
                cache.select(keep)
                sampler.select(keep)
                ids_B = ids_B[keep]
                positions_B = positions_B[keep]
            logits_BV = self._next(cache, ids_B, positions_B, sampler.alive)
            positions_B = positions_B + 1

    def _release(self, sampler: Sampler, cache: BatchCache, rows: Iterable[int], is_last: bool) -> None:
        """Give the turns of these rows what was drawn for them, and what the network has read."""
        for row in rows:
            turn = sampler.release(row)
            # The last sampled id has no keys yet; the next turn reads it.
            turn.prefix = CachedPrefix(turn.stream[:-1], cache.row(row, is_last), cache.routes_of(row))
            if self.model.routing.shape:
                turn.append_routes(self.model.routing.shape)
