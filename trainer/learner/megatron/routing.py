"""Replays routes in Megatron-core's routers: every token takes the experts that it took in the rollout.

A router of Megatron-core asks its `router_replay` for the experts of its tokens, and computes their probabilities from
the logits as it does without: here the softmax over the chosen experts' logits, which is Transformers' softmax over all
experts, renormalised over the chosen ones.

Megatron-core's own `RouterReplay` cannot leave a token free, gives a recomputed block the routes at the front of a
list, and counts the reference network's routers among the policy's. `Replay` stands in its place.

Legend: M tokens that this rank routes, L decoder layers, K experts a token, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Replay:
    """The routes of one layer's tokens, where a router looks for Megatron-core's `RouterReplay`.

    Example: with 2 of 4 experts and `routes_MK` [[3, 0], [-1, -1]], the first token takes experts 3 and 0, and the
    second the two with the highest scores.
    """

    def __init__(self) -> None:
        self.routes_MK: Tensor | None = None

    def get_replay_topk(
        self,
        scores_ME: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and ids (M, K) of the experts that the tokens take: the router calls it."""
        values_MK, free_MK = default_compute_topk(scores_ME, topk, num_groups, group_topk)
        if self.routes_MK is None:
            return values_MK, free_MK
        chosen_MK = torch.where(self.routes_MK < 0, free_MK, self.routes_MK)
        return scores_ME.gather(1, chosen_MK), chosen_MK


class Routing:
    """The routes of the micro-batch that a network computes. `routes_MLK` None: all its tokens are free.

    A block gets its routes as an argument, and checkpointing keeps the arguments of a recomputed block. So the backward
    pass of a micro-batch finds its own routes, however many micro-batches a pipeline has begun since.

    Example::

        routing.receive(blocks)     # each block: a first argument more
        recompute(blocks, share)
        routing.give(blocks)        # each block: called as before
        routing.routes_MLK = batch.routes_MLK
        network(...)
    """

    def __init__(self) -> None:
        self.routes_MLK: Tensor | None = None

    def receive(self, blocks: Sequence[nn.Module]) -> None:
        """Let blocks with experts take their routes as their first argument."""
        for block in _with_experts(blocks):
            router = block.mlp.router
            assert router.router_replay is None, "a router replays for one owner"
            router.router_replay = Replay()
            block.forward = functools.partial(_replaying, router.router_replay, block.forward)

    def give(self, blocks: Sequence[nn.Module]) -> None:
        """Give blocks that `receive` has changed their routes in every forward pass."""
        for block in _with_experts(blocks):
            # Megatron counts layers from 1, through all pipeline stages.
            block.forward = functools.partial(self._routed, block.layer_number - 1, block.forward)

    def _routed(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        routes_MK = None
        if self.routes_MLK is not None:
            routes_MK = self.routes_MLK[:, layer]
        return forward(routes_MK, *args, **kwargs)


def _replaying(replay: Replay, forward: Callable[..., Any], routes_MK: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    replay.routes_MK = routes_MK
    return forward(*args, **kwargs)


def _with_experts(blocks: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield the blocks whose MLP is a mixture: by its router, because Megatron may not be installed."""
    for block in blocks:
        if hasattr(block.mlp, "router"):
            yield block
