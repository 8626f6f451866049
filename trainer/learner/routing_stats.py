"""Statistics of a mixture's routes: those of the engine, and how far the trainer's own choice is from them.

Legend: N model tokens, T tokens, L layers with experts, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agents.model.routing import Routing
from trainer.algorithms.policy_loss import k3_kl


class RoutingSums:
    """Sums over the tokens with routes that one rank has computed with free choice.

    Example::

        mine = RoutingSums(model.routing, device)
        mine.add(routes_TLK, model.routing.chosen(), logprobs_N, rollout_logprobs_N)
        stats = mine.stats(sums)            # of all ranks, the sum of their `sums`
        stats["other_experts"]              # 0.08: in 8 of 100 layers a token takes other experts
    """

    def __init__(self, routing: Routing, device: torch.device) -> None:
        assert routing.shape, "a dense network has no routes"
        self._layers = routing.layers
        self._num_experts = routing.shape.num_experts
        self._kl_2 = torch.zeros(2, dtype=torch.float64, device=device)
        self._num_tokens = torch.zeros(1, dtype=torch.float64, device=device)
        self._others_L = torch.zeros(len(self._layers), dtype=torch.float64, device=device)
        self._load_LE = torch.zeros(len(self._layers), self._num_experts, dtype=torch.float64, device=device)

    def add(self, routes_TLK: Tensor, chosen_TLK: Tensor, logprobs_N: Tensor, rollout_logprobs_N: Tensor) -> None:
        """Add the tokens of a batch: the engine's routes, -1 without, the trainer's, and the log-probs of both."""
        is_known_T = routes_TLK[:, 0, 0] >= 0
        engine_TLK, own_TLK = (each[is_known_T][:, self._layers].long() for each in (routes_TLK, chosen_TLK))
        # A choice is a set: the order of its experts says nothing.
        is_other_TL = (engine_TLK.sort(-1).values != own_TLK.sort(-1).values).any(-1)
        self._num_tokens += len(engine_TLK)
        self._others_L += is_other_TL.sum(0)
        taken_LX = engine_TLK.transpose(0, 1).flatten(1)
        self._load_LE.scatter_add_(1, taken_LX, torch.ones_like(taken_LX, dtype=torch.float64))
        kl_N = k3_kl(logprobs_N, rollout_logprobs_N)
        self._kl_2 += torch.stack([kl_N.sum(), torch.ones_like(kl_N).sum()])

    @property
    def sums(self) -> list[float]:
        """The values that are added up over ranks."""
        return torch.cat([self._kl_2, self._num_tokens, self._others_L, self._load_LE.flatten()]).tolist()

    def stats(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the statistics by their names, from the sum of the `sums` of all ranks."""
        kl, num_scored, num_tokens, *rest = sums
        num_layers = len(self._layers)
        others_L = [count / max(1.0, num_tokens) for count in rest[:num_layers]]
        load_LE = torch.tensor(rest[num_layers:], dtype=torch.float64).view(num_layers, -1)
        share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)
        by_layer = {f"other_experts/layer_{n}": share for n, share in zip(self._layers, others_L, strict=True)}
        means = {
            "other_experts": sum(others_L) / num_layers,
            "kl_free": kl / max(1.0, num_scored),
            "load_max": float(share_LE.amax(1).mean()) * self._num_experts,
            "entropy": float(torch.special.entr(share_LE).sum(1).mean()),
        }
        return means | by_layer
