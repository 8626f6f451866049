"""The policy loss, as pure functions of per-token tensors (N model tokens, V vocabulary)."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and whether its ratio was clipped.

    loss = max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = exp(logprob - old logprob). PPO, arXiv
    1707.06347, equation 7; a higher upper bound: DAPO, arXiv 2503.14476, equation 10.

    Example: rho = 1.5, A = 1, bounds 0.2 / 0.28 give a loss of -1.28, clipped.
    """
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return torch.maximum(free_N, bounded_N), bounded_N > free_N


def k3_kl(logprobs_N: Tensor, rollout_logprobs_N: Tensor) -> Tensor:
    """Return rho - 1 - log rho per token, rho = exp(logprob - rollout logprob): an unbiased, non-negative estimate of
    KL(rollout || trainer). Schulman, "Approximating KL divergence" (2020), estimator k3. float64, since rho is near 1.
    """
    gap_N = logprobs_N.double() - rollout_logprobs_N.double()
    return torch.expm1(gap_N) - gap_N


def entropy(logprobs_NV: Tensor) -> Tensor:
    """Return the entropy in nats of each row of log-probs; entries of -inf count 0."""
    return -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV.isneginf(), 0.0)).sum(-1)
