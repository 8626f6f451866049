"""The parts of a batch of the embedded engine: cached prefixes, turns while they are written, and sampling.

Legend: B rows of a batch, T new tokens, K ids that one is drawn from, C cached columns, V vocabulary; in routes, L
layers and K experts of a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.engines.pending_turn import PendingTurn
from agents.model.mrope import num_images_within
from agents.model.stream_logprobs import kept_ids, sampling_logprobs
from agents.types import Completion, ProcessedImage, RouteShape, SamplingParams


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The part of a stream that was read: its ids and, per layer, keys and values of shape (2, heads, C, head_dim).

    A mixture also has the experts that each of its tokens took (`agents.model.routing`).
    """

    ids: tuple[int, ...] = ()
    layers: tuple[Tensor, ...] = ()
    routes_CLK: Tensor | None = None


@dataclass(eq=False)
class BatchTurn(PendingTurn):
    """A turn of the embedded engine: what is read of its stream, and who waits for it."""

    prefix: CachedPrefix
    future: asyncio.Future[Completion]

    @property
    def law(self) -> SamplingParams:
        """All parameters of sampling but the stop ids; the turns of a batch share them."""
        return replace(self.request.sampling, stop_ids=())

    @property
    def stream(self) -> tuple[int, ...]:
        """All ids so far, the prompt's first."""
        if self.ids:
            return (*self.request.ids, *self.ids)
        return self.request.ids

    def append(self, ids: Sequence[int], logprobs: Sequence[float], kept_NK: NDArray[np.int32] | None = None) -> None:
        """Append sampled ids; the last one may end the turn."""
        super().append(ids, logprobs, kept_NK)
        if self.ids[-1] in self.request.sampling.stop_ids:
            self.finish = "stop"

    def append_routes(self, shape: RouteShape) -> None:
        """Append the experts of the tokens that were read and have no known experts yet, if they are asked for."""
        if self.request.num_routed is None:
            return
        routes_CLK = self.prefix.routes_CLK
        assert routes_CLK is not None, "a mixture keeps the routes of all that it reads"
        # Those of earlier weights stay: their tokens were written with them.
        self.routes.append(routes_CLK[self.num_routed :].cpu().numpy().astype(shape.dtype))


class BatchCache:
    """Keys and values, and routes, of one batch: right-aligned columns that all rows append to at once.

    Transformers calls `update` once per layer. `layers` are of shape (2, B, heads, columns, head_dim); they have room
    for `capacity` columns after those of the prefixes.
    """

    def __init__(self, prefixes: Sequence[CachedPrefix], capacity: int, device: torch.device) -> None:
        self.length = max(len(prefix.ids) for prefix in prefixes)
        self.columns_BC = torch.zeros(len(prefixes), self.length + capacity, dtype=torch.bool, device=device)
        self.layers: list[Tensor] = []
        self._routes_BCLK: Tensor | None = None
        for row, prefix in enumerate(prefixes):
            # Prefixes end at the same column, so that new tokens of all rows go to the same one.
            first = self.length - len(prefix.ids)
            self.columns_BC[row, first : self.length] = True
            if prefix.routes_CLK is not None:
                self.routes_like(prefix.routes_CLK)[row, first : self.length] = prefix.routes_CLK
            for layer, stored in enumerate(prefix.layers):
                _, heads, _, dim = stored.shape
                if layer == len(self.layers):
                    self.layers.append(stored.new_zeros(2, len(prefixes), heads, self.num_columns, dim))
                self.layers[layer][:, row, :, first : self.length] = stored

    @property
    def num_columns(self) -> int:
        """All columns, those not written yet included."""
        return self.columns_BC.shape[1]

    @property
    def seen_BC(self) -> Tensor:
        """Which columns of a row hold tokens."""
        return self.columns_BC[:, : self.length]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append (B, heads, T, head_dim) keys and values of one layer; return all columns of that layer."""
        rows, heads, new, dim = keys.shape
        if layer == len(self.layers):
            self.layers.append(keys.new_zeros(2, rows, heads, self.num_columns, dim))
        store = self.layers[layer]
        end = self.length + new
        store[0, :, :, self.length : end] = keys
        store[1, :, :, self.length : end] = values
        return store[0, :, :, :end], store[1, :, :, :end]

    def routes_like(self, routes_TLK: Tensor) -> Tensor:
        """Return the routes of all columns, made at the first call for routes of the same layers and experts."""
        if self._routes_BCLK is None:
            self._routes_BCLK = routes_TLK.new_zeros(*self.columns_BC.shape, *routes_TLK.shape[1:])
        return self._routes_BCLK

    def add_routes(self, routes_TLK: Tensor) -> None:
        """Append the routes of the new tokens of all rows, one row after the other."""
        routes_BTLK = routes_TLK.unflatten(0, (len(self.columns_BC), -1))
        end = self.length + routes_BTLK.shape[1]
        self.routes_like(routes_TLK)[:, self.length : end] = routes_BTLK

    def get_seq_length(self, *_: object) -> int:
        """Columns so far, padding included."""
        return self.length

    def advance(self, real_BT: Tensor) -> None:
        """Count the columns just written; `real_BT` is True where they hold tokens."""
        self.columns_BC[:, self.length : self.length + real_BT.shape[1]] = real_BT
        self.length += real_BT.shape[1]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        self.columns_BC = self.columns_BC[rows]
        if self._routes_BCLK is not None:
            self._routes_BCLK = self._routes_BCLK[rows]
        for layer, store in enumerate(self.layers):
            _, _, heads, columns, dim = store.shape
            self.layers[layer] = store.new_empty(2, len(rows), heads, columns, dim)
            self.layers[layer][:, :, :, : self.length] = store[:, :, :, : self.length].index_select(1, rows)

    def row(self, row: int, is_last: bool) -> tuple[Tensor, ...]:
        """Return one row's keys and values without padding, (2, heads, C, head_dim) per layer.

        With `is_last` nothing is written after, so they may be views: a session that ends needs no copy.
        """
        columns = self.seen_BC[row].nonzero()[:, 0]
        first = int(columns[0])
        end = int(columns[-1]) + 1
        if is_last and end - first == len(columns):
            return tuple(store[:, row, :, first:end] for store in self.layers)
        return tuple(store[:, row].index_select(2, columns) for store in self.layers)

    def routes_of(self, row: int) -> Tensor | None:
        """Return the routes (C, L, K) of one row's tokens; None in a dense network."""
        if self._routes_BCLK is None:
            return None
        return self._routes_BCLK[row, : self.length][self.seen_BC[row]]


class Sampler:
    """Samples the next id of every row, with few operations for the whole batch and none for each row.

    Each turn has its own random numbers, so its ids do not depend on the other rows. A turn gets its ids when its row
    is released.

    Example::

        sampler = Sampler(turns, device)
        ids_B = sampler.draw(logits_BV)       # ids_B[i] is the next id of turns[i]
        sampler.alive                         # [True, False]: the second turn has ended
        sampler.release(1)                    # turns[1].ids, its log-probs and its end
    """

    def __init__(self, turns: Sequence[BatchTurn], device: torch.device) -> None:
        self.turns, self.alive = list(turns), [True] * len(turns)
        self._sampling = turns[0].request.sampling
        most = max(turn.num_left for turn in turns)
        uniforms_BT = np.zeros((len(turns), most))
        most_stops = max(len(turn.request.sampling.stop_ids) for turn in turns)
        # No token is -1: a row with fewer stop ids than others matches none there.
        stops_BS = np.full((len(turns), most_stops), -1)
        for row, turn in enumerate(turns):
            stop_ids = turn.request.sampling.stop_ids
            # One for each token of the whole turn: a pause changes none of them.
            uniforms = np.random.default_rng(turn.request.seed).random(turn.request.max_new_tokens)
            uniforms_BT[row, : turn.num_left] = uniforms[len(turn.ids) :]
            stops_BS[row, : len(stop_ids)] = stop_ids
        self._uniforms_BT, self._stops_BS = (torch.from_numpy(x).to(device) for x in (uniforms_BT, stops_BS))
        self._left_B = torch.tensor([turn.num_left for turn in turns], device=device)
        self._ids_BT = torch.zeros(len(turns), most, dtype=torch.long, device=device)
        self._logprobs_BT = torch.zeros(len(turns), most, device=device)
        self._kept_BTK = torch.zeros(len(turns), most, self._sampling.top_k, dtype=torch.int32, device=device)
        self._num_drawn = 0
        self._counts = [0] * len(turns)

    def draw(self, logits_BV: Tensor) -> Tensor:
        """Sample one id for each row, and return them (B,); that of a row whose turn has ended is not kept."""
        step = self._num_drawn
        kept_BK = None
        if self._sampling.top_k:
            kept_BK = kept_ids(logits_BV, self._sampling)
            self._kept_BTK[:, step] = kept_BK
        logprobs_BV = sampling_logprobs(logits_BV, self._sampling.distribution, kept_BK)
        if self._sampling.temperature == 0:
            ids_B = logprobs_BV.argmax(-1)
        else:
            # Inverse of the cumulative distribution; in double, so that the sum reaches 1.
            cumulative_BV = logprobs_BV.double().exp_().cumsum(-1)
            uniform_B1 = self._uniforms_BT[:, step, None]
            ids_B = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)[:, 0]
            ids_B = ids_B.clamp_max(logits_BV.shape[1] - 1)
        self._ids_BT[:, step] = ids_B
        self._logprobs_BT[:, step] = logprobs_BV.gather(-1, ids_B[:, None])[:, 0]
        self._num_drawn += 1
        ends_B = (ids_B[:, None] == self._stops_BS).any(-1) | (self._left_B == self._num_drawn)
        # The only place where a step waits for the GPU.
        for row, ends in enumerate(ends_B.tolist()):
            if self.alive[row]:
                self._counts[row] = self._num_drawn
                self.alive[row] = not ends
        return ids_B

    def release(self, row: int) -> BatchTurn:
        """Append what was drawn for a row to its turn, and return the turn."""
        turn = self.turns[row]
        count = self._counts[row]
        kept_NK = None
        if self._sampling.top_k:
            kept_NK = self._kept_BTK[row, :count].cpu().numpy()
        turn.append(self._ids_BT[row, :count].tolist(), self._logprobs_BT[row, :count].tolist(), kept_NK)
        return turn

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        kept = rows.tolist()
        self.turns, self.alive, self._counts = (
            [values[i] for i in kept] for values in (self.turns, self.alive, self._counts)
        )
        self._uniforms_BT, self._stops_BS, self._left_B, self._ids_BT, self._logprobs_BT = (
            values[rows]
            for values in (self._uniforms_BT, self._stops_BS, self._left_B, self._ids_BT, self._logprobs_BT)
        )
        self._kept_BTK = self._kept_BTK[rows]


def with_one_prompt(turns: Sequence[BatchTurn], image_token_id: int) -> list[list[BatchTurn]]:
    """Return the turns of new sessions that have one prompt, several a group.

    All of a prompt but its last token is read once for a group; so an image's placeholder must not be the last.
    """
    groups: dict[object, list[BatchTurn]] = {}
    for turn in turns:
        stream = turn.stream
        if not turn.prefix.ids and len(stream) > 1 and stream[-1] != image_token_id:
            groups.setdefault((stream, tuple(image.digest for image in turn.request.images)), []).append(turn)
    return [group for group in groups.values() if len(group) > 1]


def unread_images(turn: BatchTurn, image_token_id: int) -> tuple[ProcessedImage, ...]:
    """Return the images whose placeholders have not been read yet."""
    images = turn.request.images
    return images[num_images_within(turn.prefix.ids, images, image_token_id) :]
