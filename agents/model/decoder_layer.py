"""The decoder's layers on a CPU in float32: the arithmetic of Transformers' layers in fewer operations.

A small network on a CPU spends most of its time on reading and writing memory and on calls, not on products. So norms
and rotations take few passes over their tensors, forward and backward, and attention gets queries, keys and values as
they come. `train_with_own_layers` gives a network that is trained these layers; `next_hidden` reads one new token a row
with them.

Legend: B rows, T tokens, C cached columns with the new one, D values of a head, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from agents.model.attention import Segments, segment_attention
from agents.model.shared_prompts import SharedPrompts

#: Takes (B, T, heads, D) queries, keys and values, and returns (B, T, heads D).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def layer_output(
    layer: Any, x_BTH: Tensor, rotary: tuple[Tensor, Tensor], has_head_norms: bool, attend: Attention
) -> Tensor:
    """Return what a layer makes of its input.

    `rotary` is from `signed_rotary`; `has_head_norms`: queries and keys are normalised.
    """
    attention = layer.self_attn
    normed = _normed(layer.input_layernorm, x_BTH)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (projection(normed).unflatten(-1, (-1, attention.head_dim)) for projection in projections)
    if has_head_norms:
        q = _normed(attention.q_norm, q)
        k = _normed(attention.k_norm, k)
    q, k = (_Rotated.apply(x, *rotary) if x.requires_grad else _rotated(x, *rotary) for x in (q, k))
    x_BTH = x_BTH + attention.o_proj(attend(q, k, v))
    return x_BTH + layer.mlp(_normed(layer.post_attention_layernorm, x_BTH))


def train_with_own_layers(layers: Sequence[Any], has_head_norms: bool) -> None:
    """Let these layers of a decoder read packed rows (`agents.model.packed`) by `layer_output`, in place."""
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, layer.forward, has_head_norms)


def _forward(
    layer: Any,
    theirs: Callable[..., Tensor],
    has_head_norms: bool,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **others: Any,
) -> Tensor:
    segments: Segments | None = others.get("segments")
    # Up to Transformers 5.12, Qwen2.5-VL's layers still had to join the three axes of positions.
    if segments is None or position_embeddings[0].ndim != 3:
        return theirs(hidden_states, position_embeddings=position_embeddings, **others)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return segment_attention(q[0], k[0], v[0], segments, layer.self_attn.scaling).flatten(1)[None]

    return layer_output(layer, hidden_states, signed_rotary(*position_embeddings), has_head_norms, attend)


def lay_out_for_few_rows(layers: Sequence[nn.Module]) -> None:
    """Store each matrix of these layers by columns: products with 8 to 32 rows are up to a third faster."""
    for matrix in (module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)):
        matrix.weight.data = matrix.weight.data.t().contiguous().t()


def next_hidden(
    decoder: Any,
    embeds_B1H: Tensor,
    rotary: tuple[Tensor, Tensor],
    seen_BC: Tensor,
    cache: Any,
    has_head_norms: bool,
) -> Tensor:
    """Return the hidden states (B, 1, H) after one new token a row, and append its keys and values to the cache.

    `rotary` are cosines and sines, each (B, 1, D); `seen_BC` is True where a row sees a column.
    """
    hidden_from = None if bool(seen_BC.all()) else ~seen_BC[:, None, None]
    x_B1H = embeds_B1H
    rotary = signed_rotary(*rotary)
    for index, layer in enumerate(decoder.layers):

        def attend(q: Tensor, k: Tensor, v: Tensor, index: int = index, layer: Any = layer) -> Tensor:
            keys, values = cache.append(k.transpose(1, 2), v.transpose(1, 2), index)
            return attend_once(q, keys, values, hidden_from, layer.self_attn.scaling, cache.prompts, index)

        x_B1H = layer_output(layer, x_B1H, rotary, has_head_norms, attend)
    return decoder.norm(x_B1H)


def attend_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden_from: Tensor | None,
    scaling: float,
    prompts: SharedPrompts | None = None,
    layer: int = 0,
) -> Tensor:
    """Return the attention of (B, 1, heads, D) queries over (B, key heads, C, D) keys and values, (B, 1, heads D).

    Rows also see their shared prompts of this layer, whose columns come first; `hidden_from`, which fits (B, key heads,
    queries of a key head, columns), is True at columns that a row does not see. torch's own kernel is made for many
    queries, and takes up to three times as long for one.
    """
    rows, key_heads, columns, dim = key.shape
    q = query.view(rows, key_heads, -1, dim)
    scores = torch.baddbmm(
        _scalar(0.0), q.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), beta=0, alpha=scaling
    ).view(rows, key_heads, -1, columns)
    if prompts is not None:
        scores = torch.cat([prompts.scores(q * scaling, layer), scores], dim=-1)
    if hidden_from is not None:
        scores.masked_fill_(hidden_from, float("-inf"))
    shares = scores.softmax(-1)
    out = torch.bmm(shares[..., -columns:].flatten(0, 1), value.flatten(0, 1)).view_as(q)
    if prompts is not None:
        out += prompts.mixed(shares[..., :-columns], layer)
    return out.view(rows, 1, -1)


def _normed(norm: Any, x: Tensor) -> Tensor:
    """Return a root mean square norm of Transformers (arXiv 1910.07467) over the last axis."""
    if torch.is_grad_enabled():
        return _Normed.apply(x, norm.weight, norm.variance_epsilon)  # type: ignore[no-any-return]
    return _normed_and_inverse(x, norm.weight, norm.variance_epsilon)[0]


def _normed_and_inverse(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and one over the root mean square of the last axis, which is kept with length 1."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(_scalar(epsilon), size, size, value=1 / x.shape[-1]).rsqrt_()
    return (x * inverse).mul_(weight), inverse


@functools.cache
def _scalar(number: float) -> Tensor:
    """Return a number as a tensor, which operations would make of it each time."""
    return torch.tensor(number)


class _Normed(torch.autograd.Function):
    """With n = x r, where r is one over the root mean square of the D values of x, and y = n w:

    d / d w = sum n dy        d / d x = r (w dy - n mean(n w dy))
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed, inverse = _normed_and_inverse(x, weight, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        products = normed * grad
        grad_weight = products.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (products @ weight).div_(-len(weight)).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(normed, mean).mul_(inverse)
        return grad_x, grad_weight, None


def signed_rotary(cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of rotary angles (arXiv 2104.09864), each (B, T, 1, D), for `_rotated`.

    A head with the halves x1 and x2, which have the same angles, is turned to x cos + (-x2, x1) sin. With the first
    half of the sines negative that is x cos + (x2, x1) sin.
    """
    half = sin_BTD.shape[-1] // 2
    signed = torch.cat([-sin_BTD[..., :half], sin_BTD[..., half:]], dim=-1)
    return cos_BTD[:, :, None], signed[:, :, None]


def _rotated(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat([x[..., half:], x[..., :half]], dim=-1), signed_sin)


class _Rotated(torch.autograd.Function):
    """Turns by `signed_rotary`, and gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        return _rotated(x, cos, signed_sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, signed_sin = ctx.saved_tensors
        return _rotated(grad, cos, -signed_sin), None, None
