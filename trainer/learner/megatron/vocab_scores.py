"""Log-prob and entropy of tokens from hidden states, where each rank holds a part of the vocabulary's rows.

The definition is that of `agents.model.linear_logprobs`: logits in float32 whatever the network computes in, chunk by
chunk, computed again for the gradient. So the two backends differ by their networks alone, and no rank ever holds all
logits. Megatron's own vocabulary-parallel loss takes the logits of all places at once, rounded to the network's dtype,
and gives no entropy.

Legend: N places, C places of a chunk, H hidden size, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from agents.model.linear_logprobs import CHUNK_VALUES, float32_product
from agents.types import SamplingLaw


@dataclass(frozen=True)
class VocabShard:
    """The rows of the output layer on this rank, from `start`. Rows beyond the `size` of the vocabulary are padding.

    Example: rank 1 of 2 with a vocabulary of 100, padded to 128, has `VocabShard(64, 100, group)`.
    """

    start: int
    size: int
    group: dist.ProcessGroup | None = None


def vocab_scores(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, law: SamplingLaw, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy in nats of its distribution, both (N,) float32.

    All ranks of the group get the same. The gradient of `hidden_NH` is the sum over the group: each rank has all of it.
    """
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return _VocabScores.apply(hidden_NH, weight_VH, targets_N, law, shard)  # type: ignore[no-any-return]


class _VocabScores(torch.autograd.Function):
    """See `vocab_scores`; the derivatives are those of `agents.model.linear_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, law: SamplingLaw, shard: VocabShard
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N, norm_N = (hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32) for _ in range(3))
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, law, shard)
            top_C = _reduced(logits_CV.amax(-1), dist.ReduceOp.MAX, shard)
            shifted_CV = logits_CV - top_C[:, None]
            exps_CV = shifted_CV.exp()
            inner_C = torch.where(exps_CV > 0, exps_CV * shifted_CV, 0.0).sum(-1)  # exp(-inf) times -inf means 0 here
            own_C, is_own_C = _own(targets_N[chunk], len(weight_VH), shard)
            target_C = torch.where(is_own_C, shifted_CV.gather(-1, own_C[:, None])[:, 0], 0.0)
            total_C, inner_C, target_C = _reduced(
                torch.stack([exps_CV.sum(-1), inner_C, target_C]), dist.ReduceOp.SUM, shard
            )
            log_C = total_C.log()
            logprobs_N[chunk], entropy_N[chunk], norm_N[chunk] = (
                target_C - log_C,
                log_C - inner_C / total_C,
                top_C + log_C,
            )
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, entropy_N, norm_N)
        ctx.law, ctx.shard = law, shard
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_NH, weight_VH, targets_N, entropy_N, norm_N = ctx.saved_tensors
        law, shard = ctx.law, ctx.shard
        grad_hidden_NH = torch.empty_like(hidden_NH, dtype=torch.float32)
        wants_weight = ctx.needs_input_grad[1]
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if wants_weight else None
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            logprobs_CV = _logits(hidden_NH[chunk], weight_VH, law, shard) - norm_N[chunk][:, None]
            grad_logprob_C, grad_entropy_C = (grad[chunk][:, None] for grad in grads)
            probs_CV = logprobs_CV.exp()
            inner_CV = grad_logprob_C + grad_entropy_C * (logprobs_CV + entropy_N[chunk][:, None])
            grad_CV = torch.where(probs_CV > 0, -probs_CV * inner_CV, 0.0)
            own_C, is_own_C = _own(targets_N[chunk], len(weight_VH), shard)
            grad_CV.scatter_add_(-1, own_C[:, None], grad_logprob_C * is_own_C[:, None])
            grad_CV = (grad_CV / law.temperature).to(hidden_NH.dtype)
            grad_hidden_NH[chunk] = float32_product(grad_CV, weight_VH)
            if grad_weight_VH is not None:
                grad_weight_VH += float32_product(grad_CV.T, hidden_NH[chunk])
        grad_hidden_NH = _reduced(grad_hidden_NH, dist.ReduceOp.SUM, shard).to(hidden_NH.dtype)
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype) if grad_weight_VH is not None else None, *[None] * 3


def _logits(hidden_CH: Tensor, weight_VH: Tensor, law: SamplingLaw, shard: VocabShard) -> Tensor:
    """Return float32 logits divided by the temperature, -inf where an id is suppressed or a row is padding."""
    logits_CV = float32_product(hidden_CH, weight_VH.T)
    if law.temperature != 1.0:
        logits_CV /= law.temperature
    count = logits_CV.shape[1]
    own = [number - shard.start for number in law.suppressed_ids if 0 <= number - shard.start < count]
    if own:
        logits_CV[:, own] = float("-inf")
    logits_CV[:, max(0, shard.size - shard.start) :] = float("-inf")
    return logits_CV


def _own(targets_C: Tensor, count: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the row of each target here, 0 where another rank has it, and whether it is here."""
    rows_C = targets_C - shard.start
    is_own_C = (rows_C >= 0) & (rows_C < count)
    return torch.where(is_own_C, rows_C, 0), is_own_C


def _reduced(values: Tensor, op: dist.ReduceOp.RedOpType, shard: VocabShard) -> Tensor:
    if shard.group is not None:
        dist.all_reduce(values, op=op, group=shard.group)
    return values


def _chunks(count: int, vocabulary: int) -> Sequence[slice]:
    step = max(1, CHUNK_VALUES // vocabulary)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def join_context(values_KM: Tensor, places_M: Tensor, num_tokens: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the values (K, N) of all model tokens, of which each context-parallel rank gives M at `places_M`.

    All ranks compute the same loss from them, so the gradient of a rank's values is that of the loss, not of the sum of
    the ranks' losses.
    """
    return _JoinContext.apply(values_KM, places_M, num_tokens, group)  # type: ignore[no-any-return]


class _JoinContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_KM: Tensor, places_M: Tensor, num_tokens: int, group: Any) -> Tensor:
        ctx.save_for_backward(places_M)
        all_KN = values_KM.new_zeros(len(values_KM), num_tokens)
        all_KN[:, places_M] = values_KM
        if group is not None:
            dist.all_reduce(all_KN, group=group)
        return all_KN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_KN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (places_M,) = ctx.saved_tensors
        return grad_KN[:, places_M], None, None, None
