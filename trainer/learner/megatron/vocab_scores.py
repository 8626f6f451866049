"""Log-prob and entropy of tokens from hidden states, where each rank holds a part of the vocabulary's rows.

The definition is that of `agents.model.linear_logprobs`: logits in float32 whatever the network computes in, chunk by
chunk, computed again for the gradient. So the two backends differ by their networks alone, and no rank ever holds all
logits. Megatron's own vocabulary-parallel loss takes the logits of all places at once, rounded to the network's dtype,
and gives no entropy.

Legend: N places, C places of a chunk, H hidden size, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from agents.model.linear_logprobs import LEAST, chunks_of, derivative, float32_product, kernel
from agents.types import SamplingDistribution


@dataclass(frozen=True)
class VocabShard:
    """The rows of the output layer on this rank, from `start`. Rows beyond the `size` of the vocabulary are padding.

    Example: rank 1 of 2 with a vocabulary of 100, padded to 128, has `VocabShard(64, 100, group)`.
    """

    start: int
    size: int
    group: dist.ProcessGroup | None = None


def vocab_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    distribution: SamplingDistribution,
    shard: VocabShard,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy in nats of its distribution, both (N,) float32.

    All ranks of the group get the same. The gradient of `hidden_NH` is the sum over the group: each rank has all of it.
    """
    # Logits are float32 whatever surrounds the call.
    with torch.autocast(hidden_NH.device.type, enabled=False):
        return _VocabScores.apply(hidden_NH, weight_VH, targets_N, distribution, shard, compiled)  # type: ignore[no-any-return]


class _VocabScores(torch.autograd.Function):
    """See `vocab_scores`; the derivatives are those of `agents.model.linear_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        distribution: SamplingDistribution,
        shard: VocabShard,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N, norm_N = (hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32) for _ in range(3))
        summarise = kernel(_sums, compiled)
        for chunk in chunks_of(len(hidden_NH), len(weight_VH)):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, distribution, shard)
            # All ranks must subtract the same maximum, or their sums do not add up.
            top_C = _reduced(logits_CV.amax(-1), dist.ReduceOp.MAX, shard)
            # Three sums in one reduction: every chunk waits for the slowest rank.
            sums_3C = summarise(logits_CV, top_C, _own(targets_N[chunk], len(weight_VH), shard))
            total_C, inner_C, target_C = _reduced(sums_3C, dist.ReduceOp.SUM, shard)
            log_C = total_C.log()
            logprobs_N[chunk], entropy_N[chunk], norm_N[chunk] = (
                target_C - log_C,
                log_C - inner_C / total_C,
                top_C + log_C,
            )
        # Not the logits: the backward computes them again, chunk by chunk.
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, entropy_N, norm_N)
        ctx.distribution = distribution
        ctx.shard = shard
        ctx.compiled = compiled
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_NH, weight_VH, targets_N, entropy_N, norm_N = ctx.saved_tensors
        distribution = ctx.distribution
        shard = ctx.shard
        grad_hidden_NH = torch.empty_like(hidden_NH, dtype=torch.float32)
        wants_weight = ctx.needs_input_grad[1]
        if wants_weight:
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        else:
            grad_weight_VH = None
        derive = kernel(derivative, ctx.compiled)
        for chunk in chunks_of(len(hidden_NH), len(weight_VH)):
            logits_CV = _logits(hidden_NH[chunk], weight_VH, distribution, shard)
            own_C = _own(targets_N[chunk], len(weight_VH), shard)
            numbers = (own_C, *(values_N[chunk] for values_N in (norm_N, entropy_N, *grads)))
            grad_CV = derive(logits_CV, *numbers, 1 / distribution.temperature).to(hidden_NH.dtype)
            grad_hidden_NH[chunk] = float32_product(grad_CV, weight_VH)
            if grad_weight_VH is not None:
                grad_weight_VH += float32_product(grad_CV.T, hidden_NH[chunk])
        # A rank has the gradient of its own rows of the vocabulary alone.
        grad_hidden_NH = _reduced(grad_hidden_NH, dist.ReduceOp.SUM, shard).to(hidden_NH.dtype)
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype) if grad_weight_VH is not None else None, *[None] * 4


def _sums(logits_CV: Tensor, top_C: Tensor, own_C: Tensor) -> Tensor:
    """Return, over the ids here: the sum of exponentials, the same times their logarithms, the target's logarithm."""
    shifted_CV = logits_CV - top_C[:, None]
    target_C = torch.where(own_C >= 0, shifted_CV.gather(-1, own_C.clamp(min=0)[:, None])[:, 0], 0.0)
    exps_CV = shifted_CV.exp()
    total_C = exps_CV.sum(-1)
    # -inf of a suppressed id, times its probability 0, would be NaN.
    inner_C = exps_CV.mul_(shifted_CV.clamp_(min=LEAST)).sum(-1)
    return torch.stack([total_C, inner_C, target_C])


def _logits(hidden_CH: Tensor, weight_VH: Tensor, distribution: SamplingDistribution, shard: VocabShard) -> Tensor:
    """Return float32 logits divided by the temperature, -inf where an id is suppressed or a row is padding."""
    logits_CV = float32_product(hidden_CH, weight_VH.T)
    if distribution.temperature != 1.0:
        logits_CV /= distribution.temperature
    count = logits_CV.shape[1]
    own = [number - shard.start for number in distribution.suppressed_ids if 0 <= number - shard.start < count]
    if own:
        logits_CV[:, own] = float("-inf")
    # Padding rows have values of their own: none of the probability may go there.
    logits_CV[:, max(0, shard.size - shard.start) :] = float("-inf")
    return logits_CV


def _own(targets_C: Tensor, count: int, shard: VocabShard) -> Tensor:
    """Return the row of each target here, -1 where another rank has it."""
    rows_C = targets_C - shard.start
    return torch.where((rows_C >= 0) & (rows_C < count), rows_C, -1)


def _reduced(values: Tensor, op: dist.ReduceOp.RedOpType, shard: VocabShard) -> Tensor:
    if shard.group is not None:
        dist.all_reduce(values, op=op, group=shard.group)
    return values


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
        # Each token is set on one rank, so a sum joins parts whose sizes nobody has to know.
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
