"""The decoder's pass over one new token a row, on a CPU: the arithmetic of Transformers' layers in fewer operations.

With a small network and many short passes, the time goes into calls and memory, not into products. So this pass makes
no masks, rotates queries and keys together, attends with two batched products over the cache, and reads the keys and
values of a prompt once for all rows that share it.

Legend: B rows, C cached columns with the new one, D values of a head, G prompts that rows share, H hidden size, K key
heads, M most rows of a prompt, R query heads of a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sharing:
    """Which rows share a prompt: `prompt_B` is that of each row.

    `rows_GM` are the rows of each prompt, padded with row 0; `places_B` says where each row stands there, flattened.
    """

    prompt_B: Tensor
    rows_GM: Tensor
    places_B: Tensor

    @classmethod
    def of(cls, prompt_B: Tensor, num_prompts: int) -> Sharing:
        """Return the sharing of rows with these of so many prompts.

        >>> Sharing.of(torch.tensor([0, 1, 0]), num_prompts=2).rows_GM.tolist()
        [[0, 2], [1, 0]]
        """
        order = prompt_B.argsort(stable=True)
        counts = prompt_B.bincount(minlength=num_prompts)
        ranks = torch.arange(len(order)) - (counts.cumsum(0) - counts)[prompt_B[order]]
        most = int(counts.max())
        places_B = torch.empty_like(prompt_B)
        places_B[order] = prompt_B[order] * most + ranks
        rows_GM = torch.zeros(len(counts) * most, dtype=torch.long)
        rows_GM[places_B] = torch.arange(len(order))
        return cls(prompt_B, rows_GM.view(-1, most), places_B)


@dataclass(frozen=True, eq=False)
class CachePart:
    """Keys and values of some columns, (2, B, K, C, D), or with `sharing` (2, G, K, C, D)."""

    store: Tensor
    sharing: Sharing | None = None

    def product(self, left_BKRX: Tensor, right: Tensor) -> Tensor:
        """Return the product of each row's matrices with its keys or values, (B, K, R, Y); `right` has those of all."""
        if self.sharing is None:
            return torch.bmm(left_BKRX.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left_BKRX.shape[:2])
        prompts, most = self.sharing.rows_GM.shape
        left = left_BKRX[self.sharing.rows_GM].transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (G K, M R, X)
        product = torch.bmm(left, right.flatten(0, 1)).unflatten(0, (prompts, -1)).unflatten(2, (most, -1))
        return product.transpose(1, 2).flatten(0, 1)[self.sharing.places_B]


def next_hidden(
    decoder: Any,
    embeds_B1H: Tensor,
    rotary: tuple[Tensor, Tensor],
    seen_BC: Tensor,
    cache: Any,
    has_head_norms: bool,
) -> Tensor:
    """Return the hidden states (B, 1, H) after one new token a row, and append its keys and values to the cache.

    `rotary` are cosines and sines, each (B, 1, D); `seen_BC` is True where a row sees a column. `has_head_norms`:
    queries and keys are normalised.
    """
    cos_B1D, sin_B1D = rotary
    cos_B11D, half = cos_B1D[:, :, None], cos_B1D.shape[-1] // 2
    # x cos + (-x2, x1) sin is x cos + (x2, x1) (-sin, sin).
    sin_B11D = torch.cat([-sin_B1D[..., :half], sin_B1D[..., half:]], dim=-1)[:, :, None]
    hidden_from = None if bool(seen_BC.all()) else ~seen_BC[:, None]
    x_B1H = embeds_B1H
    for index, layer in enumerate(decoder.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x_B1H)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (projection(normed).unflatten(-1, (-1, attention.head_dim)) for projection in projections)
        if has_head_norms:
            q, k = attention.q_norm(q), attention.k_norm(k)
        both = torch.cat([q, k], dim=2)
        both = torch.addcmul(both * cos_B11D, both.roll(half, -1), sin_B11D).transpose(1, 2)
        q, k = both.split([q.shape[2], k.shape[2]], dim=1)
        parts = cache.append(k, v.transpose(1, 2), index)
        x_B1H = x_B1H + attention.o_proj(attend(q, parts, hidden_from, attention.scaling))
        x_B1H = x_B1H + layer.mlp(layer.post_attention_layernorm(x_B1H))
    return decoder.norm(x_B1H)


def attend(query: Tensor, parts: Sequence[CachePart], unseen_B1C: Tensor | None, scaling: float) -> Tensor:
    """Return the attention of (B, heads, 1, D) queries over the columns of all parts, (B, 1, heads D).

    `unseen_B1C` is True at columns that a row does not see. torch's own kernel is made for many queries, and takes up
    to three times as long for one.
    """
    q_BKRD = (query * scaling).reshape(len(query), parts[0].store.shape[2], -1, query.shape[-1])
    scores = [part.product(q_BKRD, part.store[0].transpose(2, 3)) for part in parts]
    scores_BKRC = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
    if unseen_B1C is not None:
        scores_BKRC.masked_fill_(unseen_B1C[:, None], float("-inf"))
    shares = scores_BKRC.softmax(-1).split([part.store.shape[3] for part in parts], -1)
    attended = [part.product(share, part.store[1]) for part, share in zip(parts, shares, strict=True)]
    total_BKRD = attended[0] if len(attended) == 1 else attended[0] + attended[1]
    return total_BKRD.reshape(len(query), 1, -1)
