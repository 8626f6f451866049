"""The parts of a batch of the embedded engine: cached prefixes, turns while they are written, and sampling.

Legend: B rows of a batch, T new tokens, K ids that one is drawn from, C cached columns, V vocabulary, H hidden size; in
routes, L layers and K experts of a token.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.engines.pending_turn import PendingTurn
from agents.model.attention import Span
from agents.model.delta_net import States, delta_net_forward, delta_net_step
from agents.model.mrope import num_images_within
from agents.model.state_plan import StatePlan
from agents.model.stream_logprobs import kept_ids, sampling_logprobs
from agents.types import Completion, ProcessedImage, RouteShape, SamplingParams


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The part of a stream that was read: its ids and what each layer keeps of them.

    An attention layer keeps keys and values, (2, heads, C, head_dim), a state layer its states after the last id. A
    mixture also has the experts that each of its tokens took (`agents.model.routing`).
    """

    ids: tuple[int, ...] = ()
    layers: tuple[Tensor | States, ...] = ()
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


@dataclass(frozen=True, eq=False)
class NewTokens:
    """The tokens of one forward pass: `real_BT` is False at padding, and in rows that have ended."""

    real_BT: Tensor

    @functools.cached_property
    def places_N(self) -> Tensor:
        """The places of the tokens in all rows, one row behind the other."""
        return self.real_BT.flatten().nonzero()[:, 0]

    @functools.cached_property
    def plan(self) -> StatePlan:
        """The tokens packed without padding: each row of the batch is a sequence."""
        spans: list[Span] = []
        start = 0
        for length in self.real_BT.sum(-1).tolist():
            spans.append(Span(start, length))
            start += length
        return StatePlan.build(spans, self.real_BT.device)


class KeysAndValues:
    """What an attention layer keeps of a batch: `store` of shape (2, B, heads, columns, head_dim)."""

    def __init__(self, like: Tensor, num_rows: int, num_columns: int) -> None:
        """Make room; heads and head_dim are those of `like`, (..., heads, C, head_dim)."""
        *_, heads, _, dim = like.shape
        self.store = like.new_zeros(2, num_rows, heads, num_columns, dim)

    def put(self, row: int, kept: Tensor, columns: slice) -> None:
        """Fill columns of one row."""
        self.store[:, row, :, columns] = kept

    def append(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write (B, heads, T, head_dim) keys and values from a column on; return all columns up to their end."""
        end = start + keys.shape[2]
        self.store[0, :, :, start:end] = keys
        self.store[1, :, :, start:end] = values
        return self.store[0, :, :, :end], self.store[1, :, :, :end]

    def select(self, rows: Tensor, length: int) -> None:
        """Keep only these rows, and the columns written so far."""
        before = self.store
        _, _, heads, columns, dim = before.shape
        self.store = before.new_empty(2, len(rows), heads, columns, dim)
        self.store[:, :, :, :length] = before[:, :, :, :length].index_select(1, rows)

    def row(self, row: int, columns: Tensor | slice, is_last: bool) -> Tensor:
        """Return columns of one row, (2, heads, C, head_dim): a view of a slice, a copy of others."""
        return self.store[:, row][:, :, columns]


class LayerStates:
    """What a state layer keeps of a batch: `states`, one row for each row of the batch."""

    def __init__(self, like: States, num_rows: int, num_columns: int) -> None:
        """Begin with zeros: every row is before its first token. States need no columns."""
        conv_SCW, recurrent_SHKV = like.conv_SCW, like.recurrent_SHKV
        self.states = States(
            conv_SCW.new_zeros(num_rows, *conv_SCW.shape[1:]),
            recurrent_SHKV.new_zeros(num_rows, *recurrent_SHKV.shape[1:]),
        )

    def put(self, row: int, kept: States, columns: slice) -> None:
        """Set the states of one row."""
        self.states.conv_SCW[row] = kept.conv_SCW[0]
        self.states.recurrent_SHKV[row] = kept.recurrent_SHKV[0]

    def forward(self, module: Any, hidden_BTH: Tensor, new: NewTokens) -> Tensor:
        """Return the layer's output, 0 at padding, and take the states of each row through its new tokens."""
        if hidden_BTH.shape[1] == 1:
            out_BTH, after = delta_net_step(module, hidden_BTH, self.states, new.real_BT[:, 0])
        else:
            rows_XH = hidden_BTH.flatten(0, 1)
            out_1NH, after = delta_net_forward(module, rows_XH[None, new.places_N], new.plan, self.states)
            out_BTH = torch.zeros_like(rows_XH).index_copy(0, new.places_N, out_1NH[0]).view_as(hidden_BTH)
        # In place: each replay of a CUDA graph reads and writes the same memory.
        self.states.conv_SCW.copy_(after.conv_SCW)
        self.states.recurrent_SHKV.copy_(after.recurrent_SHKV)
        return out_BTH

    def select(self, rows: Tensor, length: int) -> None:
        """Keep only these rows."""
        self.states = States(self.states.conv_SCW[rows], self.states.recurrent_SHKV[rows])

    def row(self, row: int, columns: Tensor | slice, is_last: bool) -> States:
        """Return the states of one row, of one sequence: a view if they are written no more."""
        one = States(self.states.conv_SCW[row, None], self.states.recurrent_SHKV[row, None])
        if is_last:
            return one
        return States(one.conv_SCW.clone(), one.recurrent_SHKV.clone())


class BatchCache:
    """What the layers keep of one batch: right-aligned columns that all rows append to, states, and routes.

    `begin` comes before each forward pass and `advance` after it. In between, Transformers calls `update` once per
    attention layer, and state layers call `state_forward`. There is room for `capacity` columns after those of the
    prefixes.
    """

    def __init__(self, prefixes: Sequence[CachedPrefix], capacity: int, device: torch.device) -> None:
        self.length = max(len(prefix.ids) for prefix in prefixes)
        self.columns_BC = torch.zeros(len(prefixes), self.length + capacity, dtype=torch.bool, device=device)
        self.new = NewTokens(self.columns_BC[:, :0])
        self.layers: list[Any] = []
        self._routes_BCLK: Tensor | None = None
        for row, prefix in enumerate(prefixes):
            # Prefixes end at the same column, so that new tokens of all rows go to the same one.
            columns = slice(self.length - len(prefix.ids), self.length)
            self.columns_BC[row, columns] = True
            if prefix.routes_CLK is not None:
                self.routes_like(prefix.routes_CLK)[row, columns] = prefix.routes_CLK
            for layer, kept in enumerate(prefix.layers):
                self._layer(layer, kept).put(row, kept, columns)

    def _layer(self, layer: int, like: Tensor | States) -> Any:
        """Return what a layer keeps; room for it is made when it is asked for first."""
        if layer == len(self.layers):
            kind = KeysAndValues if isinstance(like, Tensor) else LayerStates
            self.layers.append(kind(like, *self.columns_BC.shape))  # type: ignore[arg-type]
        return self.layers[layer]

    @property
    def num_columns(self) -> int:
        """All columns, those not written yet included."""
        return self.columns_BC.shape[1]

    @property
    def seen_BC(self) -> Tensor:
        """Which columns of a row hold tokens."""
        return self.columns_BC[:, : self.length]

    def begin(self, real_BT: Tensor) -> None:
        """Say where the next forward pass has tokens to read: `real_BT` is True there."""
        self.new = NewTokens(real_BT)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append (B, heads, T, head_dim) keys and values of one layer; return all columns of that layer."""
        return self._layer(layer, keys).append(keys, values, self.length)

    def state_forward(self, module: Any, hidden_BTH: Tensor) -> Tensor:
        """Return the output of a state layer for the new tokens, and keep its states after them."""
        if module.layer_idx == len(self.layers):
            self._layer(module.layer_idx, States.zeros(module, 1, hidden_BTH))
        return self.layers[module.layer_idx].forward(module, hidden_BTH, self.new)

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

    def has_previous_state(self, *_: object) -> bool:
        """Keep Transformers 5.12 from making a mask for state layers: it would wait for the GPU, and none reads it."""
        return True

    def advance(self) -> None:
        """Count the columns just written."""
        width = self.new.real_BT.shape[1]
        self.columns_BC[:, self.length : self.length + width] = self.new.real_BT
        self.length += width

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        self.columns_BC = self.columns_BC[rows]
        if self._routes_BCLK is not None:
            self._routes_BCLK = self._routes_BCLK[rows]
        for layer in self.layers:
            layer.select(rows, self.length)

    def row(self, row: int, is_last: bool) -> tuple[Tensor | States, ...]:
        """Return what the layers keep of one row, without padding.

        With `is_last` nothing is written after, so they may be views: a session that ends needs no copy.
        """
        columns: Tensor | slice = self.seen_BC[row].nonzero()[:, 0]
        first = int(columns[0])
        end = int(columns[-1]) + 1
        if is_last and end - first == len(columns):
            columns = slice(first, end)
        return tuple(layer.row(row, columns, is_last) for layer in self.layers)

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
