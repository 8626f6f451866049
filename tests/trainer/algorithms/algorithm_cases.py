"""Five model tokens of two samples, and what every algorithm makes of them, worked out by hand.

    token  sample  A   rho = now/old  r = old/rollout  now/reference  entropy
    0      0        1  1.5            1                2              0.5
    1      0        1  0.5            3                1              1
    2      1       -2  1              0.25             1/2            1.5
    3      1       -2  4              1                1              0.5
    4      1       -2  0.25           1.6              4              2

PPO with bounds 0.8 and 1.28 has the losses -1.28 (clipped), -0.5, 2, 8, 1.6 (clipped), in all 9.82, and the
derivatives by the log-prob 0, -0.5, 2, 8, 0. A mean over tokens divides by 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.algorithms.aggregation import token_weights
from trainer.config.algorithm import AlgorithmConfig
from trainer.types import ModelTokens

LENGTHS = (2, 3)
LN2 = math.log(2)


@dataclass(frozen=True)
class Case:
    """Settings besides --correction none, and the loss and its gradient by the five log-probs."""

    name: str
    loss: float
    gradient: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> AlgorithmConfig:
        return AlgorithmConfig(**{"correction": "none", **self.settings})


CASES = (
    Case("ppo, token-mean", 9.82 / 5, (0, -0.1, 0.4, 1.6, 0)),
    # -0.5 * 1.78 / 2 + 0.5 * 11.6 / 3
    Case("ppo, seq-mean-token-mean", -0.445 + 5.8 / 3, (0, -0.125, 1 / 3, 4 / 3, 0),
         {"aggregation": "seq-mean-token-mean"}),
    Case("ppo, seq-mean-token-sum", 4.91, (0, -0.25, 1, 4, 0), {"aggregation": "seq-mean-token-sum"}),
    Case("ppo, constant", 0.491, (0, -0.025, 0.1, 0.4, 0), {"aggregation": "constant", "loss_constant": 10}),
    # Token 3: at most 3 * 2 in place of 8.
    Case("ppo, dual clip", 7.82 / 5, (0, -0.1, 0.4, 0, 0), {"dual_clip": 3}),
    # The ratios of the samples: sqrt(0.75) = 0.8660254038 and the cube root of 1. Loss -2 * 0.866 + 3 * 2.
    Case("gspo", (6 - 3**0.5) / 5, (-(0.75**0.5) / 5,) * 2 + (0.4,) * 3, {"policy_loss": "gspo"}),
    # Weights 1, 2, 0.25, 1, 1.6: -1.28 - 1 + 0.5 + 8 + 2.56
    Case("tis", 8.78 / 5, (0, -0.2, 0.1, 1.6, 0), {"correction": "tis"}),
    # Weights 1, 3, 0, 1, 1.6: -1.28 - 1.5 + 8 + 2.56
    Case("icepop", 7.78 / 5, (0, -0.3, 0, 1.6, 0), {"correction": "icepop"}),
    # The products: 3, and 0.25 * 1.6 = 0.4, which is below 0.5: -3.84 - 1.5
    Case("mis", -5.34 / 5, (0, -0.3, 0, 0, 0), {"correction": "mis"}),
    # -5.34 + 0.4 * 11.6
    Case("mis, from 0.3", -0.7 / 5, (0, -0.3, 0.16, 0.64, 0), {"correction": "mis", "correction_low": 0.3}),
    # log now/reference: ln 2, 0, -ln 2, 0, 2 ln 2. KL, its derivative, each times 0.5 / 5:
    Case("kl, k1", (9.82 + 0.5 * 2 * LN2) / 5, (0.1, 0, 0.5, 1.7, 0.1), {"kl_coef": 0.5, "kl_estimator": "k1"}),
    # g^2 / 2 summed: (1 + 1 + 4) / 2 = 3 times ln 2 squared, 1.4413590; derivative g
    Case("kl, k2", (9.82 + 0.5 * 3 * LN2**2) / 5, (0.1 * LN2, -0.1, 0.4 - 0.1 * LN2, 1.6, 0.2 * LN2),
         {"kl_coef": 0.5, "kl_estimator": "k2"}),
    # e^-g - 1 + g: 0.5 - 1 + ln 2, 2 - 1 - ln 2, 0.25 - 1 + 2 ln 2, in all 2 ln 2 - 0.25; derivative 1 - e^-g
    Case("kl, k3", (9.82 + 0.5 * (2 * LN2 - 0.25)) / 5, (0.05, -0.1, 0.3, 1.6, 0.075), {"kl_coef": 0.5}),
    # 0.1 * (0.5 + 1 + 1.5 + 0.5 + 2)
    Case("entropy", (9.82 - 0.55) / 5, (0, -0.1, 0.4, 1.6, 0), {"entropy_coef": 0.1}),
)  # fmt: skip


def hand_tokens(config: AlgorithmConfig, dtype: torch.dtype = torch.float64, **changes: Any) -> ModelTokens:
    """Return the five tokens, weighted as `config` says; log-probs and entropies are leaves."""

    def tensor(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    now = tensor(-0.3, -1.2, -0.8, -0.1, -2.5)
    old = now - tensor(1.5, 0.5, 1, 4, 0.25).log()
    weights_S = torch.from_numpy(token_weights(LENGTHS, config.aggregation, config.loss_constant))
    parts: dict[str, Any] = {
        "logprobs_N": now,
        "entropy_N": tensor(0.5, 1, 1.5, 0.5, 2),
        "old_logprobs_N": old,
        "rollout_logprobs_N": old - tensor(1, 3, 0.25, 1, 1.6).log(),
        "ref_logprobs_N": now - tensor(2, 1, 0.5, 1, 4).log(),
        "advantages_N": tensor(1, 1, -2, -2, -2),
        "weights_N": weights_S.repeat_interleave(torch.tensor(LENGTHS)),
    }
    parts = {name: value.to(dtype) for name, value in (parts | changes).items()}
    for name in ("logprobs_N", "entropy_N"):
        parts[name].requires_grad_()
    return ModelTokens(**parts, sample_N=torch.tensor([0, 0, 1, 1, 1]), num_samples=2)
