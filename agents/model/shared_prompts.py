"""Attention of one query a row over prompts that several rows share: their keys and values are stored and read once.

Rows are gathered by prompt, so that a prompt meets the queries of all its rows in one product.

Legend: G prompts, S rows of a prompt at most, B rows, P columns, K key heads, Q queries of a key head, D values of a
head, X places of all prompts, G times S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SharedPrompts:
    """Keys and values of prompts, and which row has which prompt.

    `layers` are (2, G, K, P, D), one each layer of the network; prompts are right-aligned, and `seen_BP` is True at the
    columns of a row's prompt. A row without one has a prompt of no columns.

    Example: rows 0 and 1 have prompt 0, row 2 has prompt 1::

        prompts = SharedPrompts(layers, seen_GP, torch.tensor([0, 0, 1]))
        scores_BKQP = prompts.scores(queries_BKQD, layer=0)
        out_BKQD = prompts.mixed(scores_BKQP.softmax(-1), layer=0)
    """

    def __init__(self, layers: Sequence[Tensor], seen_GP: Tensor, prompt_B: Tensor) -> None:
        self.layers = list(layers)
        self._seen_GP = seen_GP
        self._prompt_B = prompt_B
        self._arrange()

    @property
    def num_columns(self) -> int:
        """P."""
        return self._seen_GP.shape[1]

    @property
    def saved_bytes(self) -> int:
        """Bytes of a layer that copies of the prompts would take in addition."""
        return (len(self._prompt_B) - len(self._seen_GP)) * self.layers[0][:, 0].nbytes

    def _arrange(self) -> None:
        """Give each row a place among those of its prompt: `_place_B` in G times S, `_row_X` is the row at a place.

        If prompts have equally many rows one after the other, nothing is gathered.
        """
        counts_G = torch.bincount(self._prompt_B, minlength=len(self._seen_GP))
        self._most = int(counts_G.max())
        order_B = self._prompt_B.argsort(stable=True)
        first_G = counts_G.cumsum(0) - counts_G
        every_B = torch.arange(len(order_B), device=order_B.device)
        rank_B = torch.empty_like(order_B)
        rank_B[order_B] = every_B - first_G[self._prompt_B[order_B]]
        self._place_B = self._prompt_B * self._most + rank_B
        self._row_X = torch.zeros(len(counts_G) * self._most, dtype=torch.long, device=order_B.device)
        self._row_X[self._place_B] = every_B
        self._is_in_order = torch.equal(self._row_X, every_B)
        self.seen_BP = self._seen_GP[self._prompt_B]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, and the prompts that they have."""
        used_G, self._prompt_B = self._prompt_B[rows].unique(return_inverse=True)
        if len(used_G) < len(self._seen_GP):
            self._seen_GP = self._seen_GP[used_G]
            self.layers = [layer.index_select(1, used_G) for layer in self.layers]
        self._arrange()

    def expanded(self, layer: int) -> Tensor:
        """Return a copy of its prompt's keys and values for each row, (2, B, K, P, D)."""
        return self.layers[layer].index_select(1, self._prompt_B)

    def scores(self, queries_BKQD: Tensor, layer: int) -> Tensor:
        """Return the products of queries with the keys of their prompts, (B, K, Q, P)."""
        keys = self.layers[layer][0].flatten(0, 1)
        return self._by_row(torch.bmm(self._by_prompt(queries_BKQD), keys.transpose(1, 2)), queries_BKQD)

    def mixed(self, shares_BKQP: Tensor, layer: int) -> Tensor:
        """Return the sums of the prompts' values with these shares, (B, K, Q, D)."""
        values = self.layers[layer][1].flatten(0, 1)
        return self._by_row(torch.bmm(self._by_prompt(shares_BKQP), values), shares_BKQP)

    def _by_prompt(self, x_BKQ: Tensor) -> Tensor:
        """Gather (B, K, Q, ...) by prompt: (G K, S Q, ...)."""
        gathered = x_BKQ if self._is_in_order else x_BKQ.index_select(0, self._row_X)
        return gathered.unflatten(0, (-1, self._most)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _by_row(self, x: Tensor, like_BKQ: Tensor) -> Tensor:
        """Return (G K, S Q, ...) in the order of the rows: (B, K, Q, ...)."""
        _, heads, queries, _ = like_BKQ.shape
        apart = x.view(-1, heads, self._most, queries, x.shape[-1]).transpose(1, 2)
        rows = apart.flatten(0, 1)
        return rows if self._is_in_order else rows.index_select(0, self._place_B)
