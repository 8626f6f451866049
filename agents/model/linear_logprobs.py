"""Computes log-prob and entropy of tokens from hidden states, without all logits of a batch in memory at once.

`linear_scores` takes hidden states, the output layer's weight and targets, and returns float32 log-probs and entropies
with gradients. The logits are computed chunk by chunk, in float32 whatever the network computes in, and computed again
for the gradient.

Neighbouring bfloat16 numbers around 16 differ by 1/16, which moves log-probs by hundredths of a nat: most of the
difference between two engines that round differently (MiniMax-M1, arXiv 2506.13585, section 3.2). Products of bfloat16
values are exact in float32, so summing them in float32 on the tensor cores loses nothing compared with casting first.
SGLang: `--enable-fp32-lm-head`.

Legend: N places, C places of a chunk, H hidden size, V vocabulary, K ids that a token was drawn from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agents.types import SamplingDistribution

#: Logits of a chunk in float32: 1 GiB.
CHUNK_VALUES = 2**28
#: The log-prob of what has none: its exponential is 0, and so is the product of both, where that of 0 and -inf is NaN.
LEAST = -1e4


def linear_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    distribution: SamplingDistribution,
    compiled: bool = False,
    kept_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy in nats of its distribution, both (N,) float32.

    With `kept_NK`, the distribution of a place is that among these ids of its own. `compiled` fuses the operations
    after the matrix products, which memory bandwidth limits on a GPU, into few kernels.
    """
    with torch.autocast(hidden_NH.device.type, enabled=False):
        # Autocast would round the products to half precision.
        return _LinearScores.apply(  # type: ignore[no-any-return]
            hidden_NH, weight_VH, targets_N, distribution, compiled, kept_NK
        )


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product in float32 without rounding its terms; one call for half-precision inputs on a GPU."""
    if a.is_cuda and a.dtype == b.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class _LinearScores(torch.autograd.Function):
    """See `linear_scores`. With the distribution p, its entropy h, and the logit z_j at a place with target t:

    d logprob / d z_j = [j = t] - p_j        d h / d z_j = -p_j (log p_j + h)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        distribution: SamplingDistribution,
        compiled: bool,
        kept_NK: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden_NH)
        logprobs_N, entropy_N, norm_N = (hidden_NH.new_empty(count, dtype=torch.float32) for _ in range(3))
        summarise = kernel(_summary, compiled)
        for chunk in chunks_of(count, len(weight_VH)):
            logits_CV = _logits(hidden_NH, weight_VH, distribution, kept_NK, chunk)
            logprobs_N[chunk], entropy_N[chunk], norm_N[chunk] = summarise(logits_CV, targets_N[chunk])
        # Not the logits: they are larger than all that the network keeps. They are computed again.
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, entropy_N, norm_N, kept_NK)
        ctx.distribution = distribution
        ctx.compiled = compiled
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_NH, weight_VH, targets_N, entropy_N, norm_N, kept_NK = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N = grads
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:  # not where only adapters are trained
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        derive = kernel(derivative, ctx.compiled)
        for chunk in chunks_of(len(hidden_NH), len(weight_VH)):
            logits_CV = _logits(hidden_NH, weight_VH, ctx.distribution, kept_NK, chunk)
            scale = 1 / ctx.distribution.temperature
            numbers = (x[chunk] for x in (targets_N, norm_N, entropy_N, grad_logprobs_N, grad_entropy_N))
            grad_CV = derive(logits_CV, *numbers, scale).to(hidden_NH.dtype)
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += float32_product(grad_CV.T, hidden_NH[chunk])
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype) if grad_weight_VH is not None else None, *[None] * 4


def _logits(
    hidden_NH: Tensor, weight_VH: Tensor, distribution: SamplingDistribution, kept_NK: Tensor | None, chunk: slice
) -> Tensor:
    logits_CV = float32_product(hidden_NH[chunk], weight_VH.T)
    if kept_NK is None:
        return law_logits(logits_CV, distribution)
    return law_logits(logits_CV, distribution, kept_NK[chunk])


def law_logits(logits_CV: Tensor, distribution: SamplingDistribution, kept_CK: Tensor | None = None) -> Tensor:
    """Return float32 logits divided by the temperature, -inf where an id is suppressed or not in a given set.

    Changes them in place. An id may stand in its set more than once.
    """
    if distribution.temperature != 1.0:
        logits_CV /= distribution.temperature
    if distribution.suppressed_ids:
        logits_CV[:, list(distribution.suppressed_ids)] = float("-inf")
    if kept_CK is not None:
        own_CK = logits_CV.gather(-1, kept_CK)
        logits_CV.fill_(float("-inf")).scatter_(-1, kept_CK, own_CK)
    return logits_CV


def _summary(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-prob, entropy and the log of the sum of exponentials: h = log sum exp z - sum p z."""
    # Taken off, so that no exponential overflows.
    top_C1 = logits_CV.amax(-1, keepdim=True)
    shifted_CV = logits_CV - top_C1
    exps_CV = shifted_CV.exp()
    total_C = exps_CV.sum(-1)
    mean_C = exps_CV.mul_(shifted_CV.clamp_(min=LEAST)).sum(-1) / total_C
    log_C = total_C.log()
    target_C = logits_CV.gather(-1, targets_C[:, None])[:, 0]
    return target_C - top_C1[:, 0] - log_C, log_C - mean_C, top_C1[:, 0] + log_C


def derivative(
    logits_CV: Tensor,
    targets_C: Tensor,
    norm_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor,
    scale: float,
) -> Tensor:
    """Return the gradient of the logits as they were before the temperature, of which `scale` is the inverse.

    A target of -1 is none of these ids.
    """
    logprobs_CV = logits_CV - norm_C[:, None]
    probs_CV = logprobs_CV.exp()
    slope_C = -scale * grad_entropy_C
    start_C = -scale * (grad_logprobs_C + grad_entropy_C * entropy_C)
    inner_CV = torch.addcmul(start_C[:, None], logprobs_CV.clamp_(min=LEAST), slope_C[:, None])
    own_C = torch.where(targets_C >= 0, scale * grad_logprobs_C, 0.0)
    return probs_CV.mul_(inner_CV).scatter_add_(1, targets_C.clamp(min=0)[:, None], own_C[:, None])


def chunks_of(count: int, vocabulary: int) -> Sequence[slice]:
    """Return the places of each chunk, so that it has at most `CHUNK_VALUES` logits."""
    step = max(1, CHUNK_VALUES // vocabulary)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def kernel(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """Return the function, or one that makes few kernels of its operations."""
    if compiled:
        return _compiled(function)
    return function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
