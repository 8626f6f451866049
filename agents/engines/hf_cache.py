"""Keys and values of the embedded engine: of one batch, and of each session between its turns.

Legend: B rows of a batch, C cached columns, G prompts that rows share, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agents.model.next_token import CachePart, Sharing


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """The part of a stream that was read: its ids and, per layer, keys and values of shape (2, heads, C, head_dim).

    `prompt` are those of its first columns, one object for all sessions that share them; `layers` those of the others.
    """

    ids: tuple[int, ...] = ()
    layers: tuple[Tensor, ...] = ()
    prompt: tuple[Tensor, ...] = ()


class BatchCache:
    """Keys and values of one batch: columns of prompts that rows share, then columns that all rows append to at once.

    Transformers calls `update` once per layer, `agents.model.next_token` calls `append`. `columns_BC` says which
    columns of a row hold tokens.
    """

    def __init__(self, prefixes: Sequence[CachedPrefix], capacity: int, device: torch.device) -> None:
        prompts = {id(prefix.prompt): prefix.prompt for prefix in prefixes}
        is_shared = any(prompts.values()) and len(prompts) < len(prefixes)
        rows = [(prefix.layers,) if is_shared else (prefix.prompt, prefix.layers) for prefix in prefixes]
        own = max((sum(map(_num_columns, pieces)) for pieces in rows), default=0)
        self._start = max(map(_num_columns, prompts.values())) if is_shared else 0  # of the columns that rows append to
        self.length = self._start + own
        self._capacity = self.length + capacity
        self.layers = _stacked(rows, own, own + capacity)
        self._prompts, self._common = [()], list[Tensor]()
        self._sharing: Sharing | None = None
        self.columns_BC = torch.zeros(len(prefixes), self._capacity, dtype=torch.bool, device=device)
        for row, pieces in enumerate(rows):
            self.columns_BC[row, self.length - sum(map(_num_columns, pieces)) : self.length] = True
        if is_shared:
            self._prompts = list(prompts.values())
            self._common = _stacked([(prompt,) for prompt in self._prompts], self._start, self._start)
            places = {key: place for place, key in enumerate(prompts)}
            prompt_B = torch.tensor([places[id(prefix.prompt)] for prefix in prefixes])
            self._sharing = Sharing.of(prompt_B, len(prompts))
            for row, prefix in enumerate(prefixes):
                self.columns_BC[row, self._start - _num_columns(prefix.prompt) : self._start] = True

    def append(self, keys: Tensor, values: Tensor, layer: int) -> list[CachePart]:
        """Append (B, heads, T, head_dim) keys and values of one layer; return all columns of that layer."""
        rows, heads, new, dim = keys.shape
        if layer == len(self.layers):
            self.layers.append(keys.new_zeros(2, rows, heads, self._capacity - self._start, dim))
        store = self.layers[layer]
        end = self.length + new - self._start
        store[0, :, :, end - new : end] = keys
        store[1, :, :, end - new : end] = values
        own = CachePart(store[:, :, :, :end])
        return [CachePart(self._common[layer], self._sharing), own] if self._sharing else [own]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append as `append` does; return the keys and values of all columns, with shared ones copied for each row."""
        store = self.append(keys, values, layer)[-1].store
        if self._sharing:
            store = torch.cat([self._common[layer][:, self._sharing.prompt_B], store], dim=3)
        return store[0], store[1]

    def get_seq_length(self, *_: object) -> int:
        """Columns written so far, padding included."""
        return self.length

    def advance(self, real_BT: Tensor) -> None:
        """Count the columns just written; `real_BT` is True where they hold tokens."""
        self.columns_BC[:, self.length : self.length + real_BT.shape[1]] = real_BT
        self.length += real_BT.shape[1]

    def share(self, rows: Tensor) -> None:
        """Let each of these rows go on from what it names, rows that were read so far.

        In float32 on a CPU they share its columns (`agents.model.next_token`), elsewhere each gets a copy.
        """
        is_read_once = self.columns_BC.device.type == "cpu" and self.layers[0].dtype == torch.float32
        if self._sharing or not is_read_once:
            self.select(rows)
            return
        self._common = [store[:, :, :, : self.length] for store in self.layers]
        self._prompts = [self._own(row, is_last=True) for row in range(len(self.columns_BC))]
        self._sharing = Sharing.of(rows, len(self._prompts))
        self.columns_BC, self.layers, self._start = self.columns_BC[rows], [], self.length

    def select(self, rows: Tensor) -> None:
        """Keep only these rows (repeats allowed)."""
        self.columns_BC = self.columns_BC[rows]
        if self._sharing:
            self._sharing = Sharing.of(self._sharing.prompt_B[rows], len(self._prompts))
        written = self.length - self._start
        for layer, store in enumerate(self.layers):
            _, _, heads, columns, dim = store.shape
            self.layers[layer] = store.new_empty(2, len(rows), heads, columns, dim)
            self.layers[layer][:, :, :, :written] = store[:, :, :, :written].index_select(1, rows)

    def prefix(self, row: int, ids: tuple[int, ...], is_last: bool) -> CachedPrefix:
        """Return what was read of one row, whose ids these are.

        With `is_last` nothing is written after, so its tensors may be views: a session that ends needs no copy.
        """
        prompt = self._prompts[int(self._sharing.prompt_B[row])] if self._sharing else ()
        return CachedPrefix(ids, self._own(row, is_last), prompt)

    def _own(self, row: int, is_last: bool) -> tuple[Tensor, ...]:
        """Return the columns that a row shares with no other."""
        columns = self.columns_BC[row, self._start : self.length].nonzero()[:, 0]
        first, end = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 0)
        if is_last and end - first == len(columns):
            return tuple(store[:, row, :, first:end] for store in self.layers)
        return tuple(store[:, row].index_select(2, columns) for store in self.layers)


def _num_columns(layers: tuple[Tensor, ...]) -> int:
    return layers[0].shape[2] if layers else 0


def _stacked(rows: Sequence[Sequence[tuple[Tensor, ...]]], end: int, capacity: int) -> list[Tensor]:
    """Return per layer the columns of all rows, each row's pieces one after the other up to column `end`."""
    stores: list[Tensor] = []
    for layer in range(max((len(piece) for row in rows for piece in row), default=0)):
        pieces = [[piece[layer] for piece in row if piece] for row in rows]
        example = next(piece for row in pieces for piece in row)
        _, heads, _, dim = example.shape
        store = example.new_zeros(2, len(rows), heads, capacity, dim)
        for row, parts in enumerate(pieces):
            if parts:
                store[:, row, :, end - sum(part.shape[2] for part in parts) : end] = torch.cat(parts, 2)
        stores.append(store)
    return stores
