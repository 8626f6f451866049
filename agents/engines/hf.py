"""The embedded engine: batches every live episode through one network in this process.

A batch starts when all open sessions wait for a turn, so a run with one seed always forms the same batches; only an
environment slower than `max_wait_s` is not waited for. Each session's keys and values are kept between turns: a later
turn reads only what is new. Sessions with one prompt read it once.

Legend: B rows of a batch, T new tokens, C cached columns, V vocabulary.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.model import PolicyModel, VisionBatch
from agents.positions import mrope_positions
from agents.types import Completion, GenerateRequest


@dataclass(eq=False)
class _Session:
    """What a session has read: its ids and, per layer, keys and values of shape (2, heads, C, head_dim)."""

    engine: HFEngine
    order: int
    ids: tuple[int, ...] = ()
    layers: list[Tensor] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> Completion:
        assert request.ids[: len(self.ids)] == self.ids, "the stream must extend what the session has read"
        return await self.engine.submit(self, request)


class _BatchCache:
    """Keys and values of one batch: right-aligned columns that all rows append to at once.

    Transformers calls `update` once a layer; `columns_BC` says which columns of a row hold tokens.
    """

    def __init__(self, sessions: Sequence[_Session], capacity: int, device: torch.device) -> None:
        self.length = max((len(s.ids) for s in sessions), default=0)
        self.columns_BC = torch.zeros(len(sessions), self.length + capacity, dtype=torch.bool, device=device)
        self.layers: list[Tensor] = []
        depth = max((len(s.layers) for s in sessions), default=0)
        self._capacity = self.length + capacity
        for row, session in enumerate(sessions):
            self.columns_BC[row, self.length - len(session.ids) : self.length] = True
        for layer in range(depth):
            _, heads, _, dim = next(s.layers[layer] for s in sessions if s.layers).shape
            dtype = next(s.layers[layer].dtype for s in sessions if s.layers)
            store = torch.zeros(2, len(sessions), heads, self._capacity, dim, dtype=dtype, device=device)
            for row, session in enumerate(sessions):
                if session.layers:
                    store[:, row, :, self.length - len(session.ids) : self.length] = session.layers[layer]
            self.layers.append(store)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append (B, heads, T, head_dim) keys and values of one layer; return all of that layer."""
        rows, heads, new, dim = keys.shape
        if layer == len(self.layers):
            self.layers.append(keys.new_zeros(2, rows, heads, self._capacity, dim))
        store = self.layers[layer]
        end = self.length + new
        store[0, :, :, self.length : end] = keys
        store[1, :, :, self.length : end] = values
        return store[0, :, :, :end], store[1, :, :, :end]

    def get_seq_length(self, *_: object) -> int:
        """Columns written so far, padding included."""
        return self.length

    def advance(self, real_BT: Tensor) -> None:
        """Count the columns just written; `real_BT` is True where they hold tokens."""
        self.columns_BC[:, self.length : self.length + real_BT.shape[1]] = real_BT
        self.length += real_BT.shape[1]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (repeats allowed)."""
        self.columns_BC = self.columns_BC[rows]
        self.layers = [store[:, rows] for store in self.layers]

    def read(self, row: int) -> list[Tensor]:
        """Return one row's keys and values without padding, a (2, heads, C, head_dim) tensor a layer."""
        columns = self.columns_BC[row, : self.length].nonzero()[:, 0]
        return [store[:, row].index_select(2, columns) for store in self.layers]


class HFEngine:
    """Batched sampling from a `PolicyModel`.

    Example::

        engine = HFEngine(PolicyModel.load(path))
        async with engine.session() as session:
            completion = await session.generate(request)
        engine.load_weights(learner_weights, version=1)
    """

    def __init__(
        self,
        model: PolicyModel,
        context_length: int = 4096,
        max_batch: int = 64,
        device: str | torch.device = "cpu",
        max_wait_s: float = 2.0,
    ) -> None:
        self.model = model.to(device).eval()
        self.context_length, self.max_batch, self.device = context_length, max_batch, torch.device(device)
        self.max_wait_s = max_wait_s
        self.weight_version = 0
        self.busy_s = 0.0
        self._opened = 0
        self._open: set[int] = set()
        self._waiting: list[tuple[_Session, GenerateRequest, asyncio.Future[Completion]]] = []
        self._waiting_since = 0.0
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[_Session]:
        """Open a session; waits while `max_batch` are open."""
        async with self._slots_of_loop():
            session = _Session(self, self._opened)
            self._opened += 1
            self._open.add(session.order)
            try:
                yield session
            finally:
                self._open.discard(session.order)
                self._start_if_ready()

    def _slots_of_loop(self) -> asyncio.Semaphore:
        """Return the places for sessions; a semaphore belongs to one event loop, an engine may outlive several."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._loop is not loop:
            self._slots, self._loop = asyncio.Semaphore(self.max_batch), loop
        return self._slots

    async def submit(self, session: _Session, request: GenerateRequest) -> Completion:
        """Queue one turn; it runs as soon as no open session is still busy elsewhere."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        entry = (session, request, future)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._waiting_since = loop.time()
            loop.call_later(self.max_wait_s, self._start_if_ready)
        self._waiting.append(entry)
        # One turn of the loop lets sessions that are about to open or submit join this batch.
        loop.call_soon(self._start_if_ready)
        try:
            return await future
        finally:
            if entry in self._waiting:  # cancelled before its batch began
                self._waiting.remove(entry)

    def _start_if_ready(self) -> None:
        if self._running or not self._waiting:
            return
        loop = asyncio.get_running_loop()
        overdue = loop.time() - self._waiting_since >= self.max_wait_s
        if len(self._waiting) < len(self._open) and not overdue:
            return
        batch, self._waiting = sorted(self._waiting, key=lambda entry: entry[0].order), []
        self._running = loop.create_task(self._run(batch))

    async def _run(self, batch: list[tuple[_Session, GenerateRequest, asyncio.Future[Completion]]]) -> None:
        try:
            start = time.perf_counter()
            completions = await asyncio.to_thread(self.generate, [(s, r) for s, r, _ in batch])
            self.busy_s += time.perf_counter() - start
            for (_, _, future), completion in zip(batch, completions, strict=True):
                if not future.done():
                    future.set_result(completion)
        except Exception as error:  # every waiting episode must learn of it, whatever it is
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._running = None
            self._start_if_ready()

    def load_weights(self, weights: dict[str, Tensor], version: int) -> None:
        """Copy new weights in place; sessions opened before must be closed first."""
        assert not self._open, "weights change only between rollouts"
        own = dict(self.model.named_parameters())
        assert own.keys() == weights.keys(), sorted(own.keys() ^ weights.keys())[:3]
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)
        self.weight_version = version

    @torch.inference_mode()
    def generate(self, turns: Sequence[tuple[_Session, GenerateRequest]]) -> list[Completion]:
        """Write one turn for each session, all together."""
        sessions = [session for session, _ in turns]
        requests = [request for _, request in turns]
        kept = [len(session.ids) for session in sessions]
        laws = {(r.sampling.temperature, r.sampling.suppressed_ids) for r in requests}
        assert len(laws) == 1, f"a batch is drawn with one temperature and one set of suppressed ids, got {laws}"
        capacity = max(len(r.ids) - len(s.ids) for s, r in turns) + max(r.max_new_tokens for r in requests)
        representative, row_of = _unique_prompts(turns)
        cache = _BatchCache([sessions[i] for i in representative], capacity, self.device)
        logits_BV = self._prefill([turns[i] for i in representative], cache)
        rows = torch.tensor(row_of, device=self.device)
        if len(representative) < len(turns):
            cache.select(rows)
        positions_B = torch.tensor([self._next_position(r) for r in requests], device=self.device)
        sampled = _Sampler(requests, self.device)
        self._decode(cache, logits_BV[rows], positions_B, sampled, sessions)
        return [
            Completion(
                tuple(ids), tuple(logprobs), finish, len(request.ids), ((self.weight_version, len(ids)),), cached
            )
            for ids, logprobs, finish, request, cached in zip(
                sampled.ids, sampled.logprobs, sampled.finishes, requests, kept, strict=True
            )
        ]

    def _positions(self, request: GenerateRequest) -> np.ndarray:
        ids_T = np.asarray(request.ids, dtype=np.int64)
        grids = [image.grid_thw for image in request.images]
        return mrope_positions(ids_T, grids, self.model.image_token_id, self.model.merge_size)

    def _next_position(self, request: GenerateRequest) -> int:
        return int(self._positions(request).max()) + 1

    def _prefill(self, turns: Sequence[tuple[_Session, GenerateRequest]], cache: _BatchCache) -> Tensor:
        """Read what is new of each stream; return the logits after each, (B, V)."""
        width = max(len(r.ids) - len(s.ids) for s, r in turns)
        ids_BT = torch.zeros(len(turns), width, dtype=torch.long)
        positions_3BT = torch.zeros(3, len(turns), width, dtype=torch.long)
        real_BT = torch.zeros(len(turns), width, dtype=torch.bool)
        images = []
        for row, (session, request) in enumerate(turns):
            read = len(session.ids)
            new = len(request.ids) - read
            ids_BT[row, width - new :] = torch.tensor(request.ids[read:])
            positions_3BT[:, row, width - new :] = torch.from_numpy(self._positions(request)[:, read:])
            real_BT[row, width - new :] = True
            images.append(_unread_images(session.ids, request, self.model.image_token_id))
        ids_BT, positions_3BT, real_BT = (x.to(self.device) for x in (ids_BT, positions_3BT, real_BT))
        past_BC = cache.columns_BC[:, : cache.length]
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        mask_BTC = torch.cat(
            [past_BC[:, None].expand(-1, width, -1), causal_TT & real_BT[:, None]],
            dim=-1,
        )
        # A padding query would see nothing and turn to NaN; let it see itself.
        mask_BTC[:, :, cache.length :] |= torch.eye(width, dtype=torch.bool, device=self.device) & ~real_BT[:, None]
        vision = VisionBatch.build(images, self.device)
        last_BT = torch.zeros_like(real_BT)
        last_BT[:, -1] = True
        logits_BV = self.model(ids_BT, positions_3BT, mask_BTC[:, None], last_BT, vision, cache)
        cache.advance(real_BT)
        return logits_BV

    def _decode(
        self,
        cache: _BatchCache,
        logits_BV: Tensor,
        positions_B: Tensor,
        sampled: _Sampler,
        sessions: Sequence[_Session],
    ) -> None:
        """Sample until every row has stopped; leave in each session what it has now read."""
        rows = list(range(len(sessions)))
        alive = [True] * len(rows)
        while True:
            ids_B = sampled.draw(rows, alive, logits_BV)
            for index, row in enumerate(rows):
                if alive[index] and sampled.finishes[row] != "":
                    alive[index] = False
                    # The last sampled id has no keys yet; the next turn reads it with what follows.
                    sessions[row].layers = cache.read(index)
                    sessions[row].ids = sampled.requests[row].ids + tuple(sampled.ids[row][:-1])
            if not any(alive):
                return
            if sum(alive) <= 0.75 * len(alive):
                keep = torch.tensor([i for i, living in enumerate(alive) if living], device=self.device)
                cache.select(keep)
                ids_B, positions_B = ids_B[keep], positions_B[keep]
                rows, alive = [rows[i] for i in keep.tolist()], [True] * len(keep)
            real_B1 = torch.tensor(alive, device=self.device)[:, None]
            mask_BC = torch.cat([cache.columns_BC[:, : cache.length], torch.ones_like(real_B1)], dim=-1)
            positions_3B1 = positions_B[None, :, None].expand(3, -1, -1)
            select_B1 = torch.ones_like(real_B1)
            logits_BV = self.model(ids_B[:, None], positions_3B1, mask_BC[:, None, None], select_B1, None, cache)
            cache.advance(real_B1)
            positions_B = positions_B + 1


class _Sampler:
    """Draws ids row by row with each request's own random stream, so that a row does not depend on its neighbours."""

    def __init__(self, requests: Sequence[GenerateRequest], device: torch.device) -> None:
        self.requests = requests
        self.ids: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.finishes: list[Any] = [""] * len(requests)  # "" until the turn ends with "stop" or "length"
        self._device = device
        # One uniform number per token, drawn ahead: the i-th token of a turn always sees the same one.
        self._uniforms = [np.random.default_rng(r.seed).random(r.max_new_tokens) for r in requests]

    def draw(self, rows: Sequence[int], alive: Sequence[bool], logits_BV: Tensor) -> Tensor:
        """Sample one id for each living row, note it with its log-prob, and return the ids (B,)."""
        requests = [self.requests[row] for row in rows]
        sampling = requests[0].sampling
        logprobs_BV = sampling_logprobs(logits_BV, sampling.logprob_temperature, sampling.suppressed_ids)
        if sampling.temperature == 0:
            ids_B = logprobs_BV.argmax(-1)
        else:
            step = [len(self.ids[row]) if living else 0 for row, living in zip(rows, alive, strict=True)]
            uniform_B1 = torch.tensor(
                [[self._uniforms[row][k]] for row, k in zip(rows, step, strict=True)], device=self._device
            )
            # Inverse of the cumulative distribution; in double, so that the sum reaches 1.
            cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
            ids_B = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)[:, 0]
            ids_B = ids_B.clamp_max(logits_BV.shape[1] - 1)
        chosen_B = logprobs_BV.gather(-1, ids_B[:, None])[:, 0]
        for row, living, token, logprob in zip(rows, alive, ids_B.tolist(), chosen_B.tolist(), strict=True):
            if not living:
                continue
            self.ids[row].append(token)
            self.logprobs[row].append(logprob)
            if token in self.requests[row].sampling.stop_ids:
                self.finishes[row] = "stop"
            elif len(self.ids[row]) >= self.requests[row].max_new_tokens:
                self.finishes[row] = "length"
        return ids_B


def sampling_logprobs(logits_NV: Tensor, temperature: float, suppressed_ids: Sequence[int]) -> Tensor:
    """Return the log-probs that tokens are drawn from, float32 (N, V): the one definition for engine and trainer."""
    logits_NV = logits_NV.float() / temperature
    if suppressed_ids:
        index = torch.tensor(suppressed_ids, device=logits_NV.device)
        logits_NV = logits_NV.index_fill(-1, index, float("-inf"))
    return logits_NV.log_softmax(-1)


def _unique_prompts(turns: Sequence[tuple[_Session, GenerateRequest]]) -> tuple[list[int], list[int]]:
    """Return the rows to read and, for every turn, which of them it shares: fresh sessions with one prompt share."""
    first: dict[object, int] = {}
    representative: list[int] = []
    row_of: list[int] = []
    for index, (session, request) in enumerate(turns):
        key = index if session.ids else (request.ids, tuple(image.digest for image in request.images))
        if key not in first:
            first[key] = len(representative)
            representative.append(index)
        row_of.append(first[key])
    return representative, row_of


def _unread_images(read: tuple[int, ...], request: GenerateRequest, image_token_id: int) -> tuple:
    """Return the images whose placeholders the session has not read yet."""
    seen = sum(token == image_token_id for token in read)
    index = 0
    while seen > 0:
        seen -= request.images[index].num_tokens
        index += 1
    return request.images[index:]
