"""Computes the loss of a micro-batch, and the sums for its metrics.

loss = sum over tokens of weight (correction policy_loss + kl_coef KL - entropy_coef entropy)

The weights hold the optimizer step's denominators, so the losses and gradients of micro-batches and ranks add up.

Legend: N model tokens of a micro-batch, S samples, each of them whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.algorithms.importance_sampling import find_correction
from trainer.algorithms.policy_loss import find_policy_loss, is_zero_without_advantage, reference_kl
from trainer.config.algorithm import AlgorithmConfig
from trainer.types import ModelTokens


@dataclass(frozen=True, eq=False)
class Objective:
    """A micro-batch's share of the step's loss, and sums over its tokens.

    `sums`, float64 scalars without gradient, are added up over micro-batches and ranks and divided by the tokens:

    - `clip_frac`: tokens whose ratio was clipped, dual clip included.
    - `ratio_mean`: the ratio of `--policy-loss`.
    - `correction_mean`, `correction_clipped_frac`: the weight of `--correction`, and tokens that it clipped or dropped.
    - `ref_kl`: the KL to the reference by `kl_estimator`, if there is a reference.

    Example: a step of 10 tokens in two micro-batches with `clip_frac` 1 and 2 has a clip fraction of 0.3.
    """

    loss: Tensor
    sums: dict[str, Tensor]


def skips_zero_advantages(config: AlgorithmConfig) -> bool:
    """Return whether tokens with advantage 0 have a loss of 0 with gradient 0, so that training may leave them out."""
    return not config.kl_coef and not config.entropy_coef and is_zero_without_advantage(config.policy_loss)


def objective(tokens: ModelTokens, config: AlgorithmConfig) -> Objective:
    """Return the loss of a micro-batch and the sums for its metrics. Without tokens the loss is 0, with a graph.

    A regulariser with coefficient 0 is not in the graph: its gradient costs nothing and cannot be NaN.
    """
    assert tokens.ref_logprobs_N is not None or not config.kl_coef, f"kl_coef {config.kl_coef} without a reference"
    # On the first update the old log-probs are the current ones: if not detached, the ratio would have no gradient.
    old_N = tokens.old_logprobs_N.detach()
    rollout_N = tokens.rollout_logprobs_N.detach()
    tokens = replace(tokens, old_logprobs_N=old_N, rollout_logprobs_N=rollout_N)
    correction_N, cut_N = find_correction(config.correction)(tokens, config)
    policy = find_policy_loss(config.policy_loss)(tokens, config)
    # Only this term is an expectation under the engine's policy.
    per_token_N = correction_N * policy.loss_N
    means = {
        "clip_frac": policy.clipped_N,
        "ratio_mean": policy.ratio_N,
        "correction_mean": correction_N,
        "correction_clipped_frac": cut_N,
    }
    if tokens.ref_logprobs_N is not None:
        with torch.set_grad_enabled(bool(config.kl_coef) and torch.is_grad_enabled()):
            means["ref_kl"] = kl_N = reference_kl(
                tokens.logprobs_N, tokens.ref_logprobs_N.detach(), config.kl_estimator
            )
        if config.kl_coef:
            per_token_N = per_token_N + config.kl_coef * kl_N
    if config.entropy_coef:
        per_token_N = per_token_N - config.entropy_coef * tokens.entropy_N
    # A sum, not a mean: the weights hold the denominator of the whole step.
    loss = (tokens.weights_N * per_token_N).sum()
    sums = {name: value_N.detach().sum(dtype=torch.float64) for name, value_N in means.items()}
    return Objective(loss, sums)
