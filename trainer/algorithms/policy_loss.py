"""Policy losses and KL estimates, as pure functions of per-token tensors.

To add a policy loss: write a function like `ppo`, add it to `POLICY_LOSSES` and its name to `PolicyLossName`.

Legend: N model tokens of a micro-batch, S samples, each of them one token stream. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from trainer.config.algorithm import POLICY_LOSS, AlgorithmConfig, KLEstimatorName, PolicyLossName
from trainer.types import ModelTokens, check_shape

#: Differences of log-probs are clamped to this many nats before they become exponents: e^20 is 5e8, far above every
#: clip, and its square still fits float32.
MAX_LOG_RATIO = 20.0
#: Policy losses that are 0, with gradient 0, wherever the advantage is.
ZERO_WITHOUT_ADVANTAGE = frozenset[PolicyLossName]({"ppo", "gspo", "likelihood"})
#: The attribute by which a user's policy loss says so.
SKIPS = "skips_zero_advantages"


@dataclass(frozen=True, eq=False)
class PolicyTerms:
    """The terms of a policy loss for each token.

    `loss_N` has the gradient. `clipped_N` is True where a bound replaced the ratio, so that the gradient is 0.
    `ratio_N`, without gradient, is the ratio that is compared with the bounds, if the loss has bounds.

    Example: ratio 1.5, advantage 1 and bounds 0.2 / 0.28 give loss -1.28, clipped.
    """

    loss_N: Tensor
    clipped_N: Tensor
    ratio_N: Tensor


PolicyLoss = Callable[[ModelTokens, AlgorithmConfig], PolicyTerms]


def log_ratio(logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """Return logprob - other logprob, clamped to +-`MAX_LOG_RATIO`.

    Outside these bounds the gradient is 0. NaN stays NaN, so that a broken network is noticed.
    """
    return (logprobs_N - other_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo(tokens: ModelTokens, config: AlgorithmConfig) -> PolicyTerms:
    """Return max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A) per token, rho = exp(logprob - old logprob).

    PPO, arXiv 1707.06347, equation 7. A higher upper bound: DAPO, arXiv 2503.14476, equation 10. With `dual_clip` c,
    the loss of a token with A < 0 is at most -c A: dual-clip PPO, arXiv 1912.09729.

    Example: rho = 1.5, A = 1, bounds 0.2 / 0.28 give a loss of -1.28, clipped; rho = 4, A = -2, c = 3 give 6, clipped.
    """
    return _clipped(log_ratio(tokens.logprobs_N, tokens.old_logprobs_N).exp(), tokens.advantages_N, config)


def gspo(tokens: ModelTokens, config: AlgorithmConfig) -> PolicyTerms:
    """Return PPO's loss per token with the ratio of its sample: s = exp(mean over the sample's tokens of log rho).

    GSPO, arXiv 2507.18071, equations 5 and 7. Token t has the ratio sg[s] rho_t / sg[rho_t] of equation 14, where sg is
    stop-gradient: its value is s, and its derivative by the token's log-prob is s. Summed with equal weights within a
    sample, that is the gradient of s itself. Every sample must be whole. The authors clip at 3e-4 and 4e-4.
    """
    log_ratio_N = log_ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    sample_N = tokens.sample_N
    detached_N = log_ratio_N.detach()
    zeros_S = detached_N.new_zeros(tokens.num_samples)
    total_S = zeros_S.index_add(0, sample_N, detached_N)
    length_S = zeros_S.index_add(0, sample_N, torch.ones_like(detached_N))
    # A sample may have no token here, and then no token reads its mean.
    mean_N = (total_S / length_S.clamp(min=1.0))[sample_N]
    return _clipped((mean_N + log_ratio_N - detached_N).exp(), tokens.advantages_N, config)


def likelihood(tokens: ModelTokens, config: AlgorithmConfig) -> PolicyTerms:
    """Return -A logprob per token; nothing is clipped.

    With advantages from rewards this is REINFORCE (Williams 1992, doi 10.1007/BF00992696): on the first update of a
    step its gradient equals that of PPO's loss; later updates do not multiply by the ratio, which is only reported.
    With A = 1 it is the negative log-likelihood of supervised training.

    Example: log-prob -0.7, A = 2 give a loss of 1.4, whose derivative by the log-prob is -2.
    """
    ratio_N = log_ratio(tokens.logprobs_N.detach(), tokens.old_logprobs_N).exp()
    return PolicyTerms(-tokens.advantages_N * tokens.logprobs_N, torch.zeros_like(ratio_N, dtype=torch.bool), ratio_N)


def _clipped(ratio_N: Tensor, advantages_N: Tensor, config: AlgorithmConfig) -> PolicyTerms:
    """Return PPO's terms: the ratio is clipped on both sides and, with `dual_clip`, the loss of tokens with A < 0."""
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
    loss_N = torch.maximum(free_N, bounded_N)
    clipped_N = bounded_N > free_N
    if config.dual_clip:
        # There the loss grows with rho without a bound.
        most_N = torch.where(advantages_N < 0, -config.dual_clip * advantages_N, torch.inf)
        clipped_N = clipped_N | (loss_N > most_N)
        loss_N = torch.minimum(loss_N, most_N)
    return PolicyTerms(loss_N, clipped_N, ratio_N.detach())


#: Every policy loss, by its value of `--policy-loss`.
POLICY_LOSSES: Mapping[PolicyLossName, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "likelihood": likelihood,
}


def find_policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss of a name, or the user's that a reference names. Raises `UserError` if it cannot be used.

    A user's loss is a function like `ppo`.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[cast(PolicyLossName, name)]
    function: PolicyLoss = POLICY_LOSS.load("--policy-loss", name)

    def checked(tokens: ModelTokens, config: AlgorithmConfig) -> PolicyTerms:
        terms = POLICY_LOSS.call("--policy-loss", name, function, tokens, config)
        with POLICY_LOSS.result_of("--policy-loss", name, terms):
            if not isinstance(terms, PolicyTerms):
                raise TypeError("it must be PolicyTerms")
            for each_N in (terms.loss_N, terms.clipped_N, terms.ratio_N):
                check_shape(each_N, tokens)
        return terms

    return checked


def is_zero_without_advantage(name: str) -> bool:
    """Return whether a policy loss is 0, with gradient 0, wherever the advantage is.

    A user's may have terms that the advantage does not multiply, unless it says otherwise:
    ``my_loss.skips_zero_advantages = True``.
    """
    return name in ZERO_WITHOUT_ADVANTAGE or bool(getattr(POLICY_LOSS.load("--policy-loss", name), SKIPS, False))


def reference_kl(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: KLEstimatorName) -> Tensor:
    """Return an estimate of KL(policy || reference) per token, on tokens that the policy sampled; with gradient.

    Schulman, "Approximating KL divergence" (2020), with g = log-prob - reference log-prob, clamped to
    +-`MAX_LOG_RATIO`:

    - k1 = g. Its mean over the policy's tokens is the KL. The mean of its gradient is 0: it only adds noise.
    - k2 = g^2 / 2. Biased in value; the mean of its gradient is the gradient of KL(policy || reference).
    - k3 = e^-g - 1 + g. Its mean is the KL, and it is never negative. The mean of its gradient is the gradient of
      KL(reference || policy), which equals the other to first order about g = 0.

    The means hold for tokens of the current policy; tokens of an older policy are not reweighted.
    """
    gap_N = log_ratio(logprobs_N, ref_logprobs_N)
    if estimator == "k1":
        return gap_N
    if estimator == "k2":
        return gap_N.square() / 2
    # Near 0 the estimate is a difference of nearly equal numbers.
    return _k3(-gap_N.double()).to(gap_N.dtype)


def k3_kl(logprobs_N: Tensor, rollout_logprobs_N: Tensor) -> Tensor:
    """Return rho - 1 - log rho per token, with rho = exp(logprob - rollout logprob), in float64 since rho is near 1.

    It is an unbiased, non-negative estimate of KL(rollout || trainer): estimator k3 of Schulman, "Approximating KL
    divergence" (2020).
    """
    return _k3(logprobs_N.double() - rollout_logprobs_N.double())


def _k3(gap_N: Tensor) -> Tensor:
    return torch.expm1(gap_N) - gap_N
