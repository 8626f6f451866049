"""Importance weights: they correct for the difference between the engine's and the trainer's token probabilities.

Tokens are sampled from the engine's distribution, but trained under the trainer's. The weights use the trainer's
log-probs before the step's first update, have no gradient, and multiply only the policy loss.

If the difference of log-probs is NaN (the engine could not score the token, for instance), the token has weight 0; in
`mis`, its whole sample has. For an infinite difference, the formula gives the weight: 0 or the cap.

Legend: N model tokens of a micro-batch, S samples, each of them one token stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from trainer.config.algorithm import CORRECTION, AlgorithmConfig, CorrectionName
from trainer.types import ModelTokens, check_shape

Correction = Callable[[ModelTokens, AlgorithmConfig], tuple[Tensor, Tensor]]


def none(tokens: ModelTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return weight 1 for every token, none clipped."""
    old_N = tokens.old_logprobs_N
    return torch.ones_like(old_N), torch.zeros_like(old_N, dtype=torch.bool)


def tis(tokens: ModelTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return min(r, C) per token, with r = exp(old - rollout log-prob) and C = `correction_cap`, and whether r > C.

    Truncated importance sampling: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"
    (2025); first in Ionides, "Truncated importance sampling" (2008).

    Example: log-probs -1 (trainer) and -2 (engine) with C = 2 give e = 2.718, so 2, clipped.
    """
    ratio_N = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).exp()
    clipped_N = ratio_N.isnan() | (ratio_N > config.correction_cap)
    return ratio_N.nan_to_num(nan=0.0, posinf=config.correction_cap).clamp(max=config.correction_cap), clipped_N


def icepop(tokens: ModelTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return r per token if `correction_low` <= r <= `correction_high`, else 0, and whether r was out of bounds.

    IcePop: Ling team, "Small leak can sink a great ship" (2025), and Ring-1T, arXiv 2510.18855; they use 0.5 to 5.
    """
    return _within((tokens.old_logprobs_N - tokens.rollout_logprobs_N).exp(), config)


def mis(tokens: ModelTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return R, the product of a sample's r, for all its tokens, or 0 if R is out of bounds, and whether it was.

    The bounds are `correction_low` and `correction_high`. Sequence-level masked importance sampling: Liu, Li et al.,
    "When speed kills stability" (2025). R is the probability ratio of the whole stream, not a geometric mean, so its
    spread grows with the length. The authors bound R only from above: `correction_low` = 0.

    Example: a sample of two tokens with r = 2 and 1.5 has R = 3: weight 3 for both up to `correction_high` 5, above
    that 0 for both.
    """
    gap_N = tokens.old_logprobs_N - tokens.rollout_logprobs_N
    # A product of thousands of ratios would leave float32, the sum of their logarithms does not.
    gap_S = gap_N.new_zeros(tokens.num_samples).index_add_(0, tokens.sample_N, gap_N)
    return _within(gap_S.exp()[tokens.sample_N], config)


def _within(ratio_N: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return the ratios, with 0 for those out of bounds, and whether each was out of bounds."""
    # A comparison with NaN is False, so NaN is out of bounds.
    kept_N = (ratio_N >= config.correction_low) & (ratio_N <= config.correction_high)
    return ratio_N.masked_fill(~kept_N, 0.0), ~kept_N


#: Every correction, by its value of `--correction`; each returns weight_N and clipped_N.
CORRECTIONS: Mapping[CorrectionName, Correction] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "mis": mis,
}


def find_correction(name: str) -> Correction:
    """Return the correction of a name, or the user's that a reference names. Raises `UserError` if it cannot be used.

    A user's correction is a function like `tis`.
    """
    if name in CORRECTIONS:
        return CORRECTIONS[cast(CorrectionName, name)]
    function: Correction = CORRECTION.load("--correction", name)

    def checked(tokens: ModelTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
        found = CORRECTION.call("--correction", name, function, tokens, config)
        with CORRECTION.result_of("--correction", name, found):
            weight_N, clipped_N = found
            check_shape(weight_N, tokens)
            check_shape(clipped_N, tokens)
        # A correction weighs the loss, and is not itself learnt.
        return weight_N.detach(), clipped_N

    return checked
