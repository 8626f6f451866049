"""The decoder's pass over one new token a row, on a CPU: the arithmetic of Transformers' layers in fewer operations.

With a small network and many short passes, the time goes into calls and memory, not into products. So this pass makes
no masks, rotates queries and keys together, and attends with two batched products over the cache.

Legend: B rows, C cached columns with the new one, D values of a head, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
        keys, values = cache.update(k, v.transpose(1, 2), index)
        x_B1H = x_B1H + attention.o_proj(attend(q, keys, values, hidden_from, attention.scaling))
        x_B1H = x_B1H + layer.mlp(layer.post_attention_layernorm(x_B1H))
    return decoder.norm(x_B1H)


def attend(query: Tensor, key: Tensor, value: Tensor, unseen_B1C: Tensor | None, scaling: float) -> Tensor:
    """Return the attention of (B, heads, 1, D) queries over (B, key heads, C, D) keys and values, (B, 1, heads D).

    `unseen_B1C` is True at columns that a row does not see. torch's own kernel is made for many queries, and takes up
    to three times as long for one.
    """
    rows, heads, _, dim = query.shape
    key_heads, columns = key.shape[1:3]
    q = (query * scaling).reshape(rows * key_heads, heads // key_heads, dim)
    scores = torch.bmm(q, key.flatten(0, 1).transpose(1, 2)).view(rows, heads, columns)
    if unseen_B1C is not None:
        scores.masked_fill_(unseen_B1C, float("-inf"))
    shares = scores.softmax(-1).view(rows * key_heads, -1, columns)
    return torch.bmm(shares, value.flatten(0, 1)).view(rows, 1, heads * dim)
