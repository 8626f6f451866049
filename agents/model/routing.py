"""Chooses the experts of each token in a mixture of experts: freely, or as an engine chose them before.

A route is the choice of one token: its experts in every layer. An engine and a trainer that compute the same token
round differently, and then some of its layers go to other experts. With the engine's routes the trainer computes the
network that has written the token; the gradient flows through the weights of the given experts.

Legend: T tokens, L decoder layers, K experts of a token, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from agents.types import RouteShape


class Routing:
    """All gates of a decoder, the modules that choose experts; a dense network has none.

    Example::

        routing = Routing(decoder)
        with routing.forward(routes_TLK):                # this forward, and its backward, take these experts
            decoder(...)
        with routing.forward(None, keeps_chosen=True):   # this one chooses for itself
            decoder(...)
        routing.chosen()                                 # (T, L, K): what it chose
    """

    def __init__(self, decoder: Any) -> None:
        #: None in a dense network.
        self.shape: RouteShape | None = None
        self._lock = _OwnLock()
        #: By the number of the layer: some layers of a mixture may be dense.
        self._gates: dict[int, Any] = {}
        for number, layer in enumerate(decoder.layers):
            gate: Any = getattr(layer.mlp, "gate", None)
            if gate is None:
                continue
            gate.routes_TK = None
            gate.keeps_chosen = False
            gate.forward = MethodType(_route, gate)
            self._gates[number] = gate
            self.shape = RouteShape(len(decoder.layers), gate.num_experts, gate.top_k)

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers with experts."""
        return list(self._gates)

    @contextmanager
    def forward(self, routes_TLK: Tensor | None, keeps_chosen: bool = False) -> Iterator[None]:
        """Set the routes of the forward within: integers, -1 where a token chooses freely; None where all tokens do.

        They stay until the next forward, since a backward computes recomputed blocks again. A mixture runs one forward
        at a time: a probe may score a stream while a batch is being written.
        """
        if not self._gates:
            yield
            return
        with self._lock.held:
            for number, gate in self._gates.items():
                gate.keeps_chosen = keeps_chosen
                # Its own memory: a compiled block copies inputs that begin in the middle of another's.
                gate.routes_TK = None if routes_TLK is None else routes_TLK[:, number].contiguous()
            yield

    def chosen(self) -> Tensor:
        """Return, and forget, the experts of the last forward that kept them, (T, L, K) int16; 0 in a dense layer.

        Tokens are in the order of the rows of the batch, padding included.
        """
        assert self.shape, "a dense network chooses no experts"
        by_layer = {number: gate.__dict__.pop("chosen_TK") for number, gate in self._gates.items()}
        dense_TK = torch.zeros_like(next(iter(by_layer.values())))
        layers = [by_layer.get(number, dense_TK) for number in range(self.shape.num_layers)]
        return torch.stack(layers, dim=1).to(torch.int16)


class _OwnLock:
    """A lock; a copy of its network has another one."""

    def __init__(self) -> None:
        self.held = threading.Lock()

    def __deepcopy__(self, _: dict[int, Any]) -> _OwnLock:
        return _OwnLock()


def _route(gate: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (T, E), and the weights and numbers of the experts (T, K), as Transformers' gates do.

    Without routes the results equal those of Transformers to the bit.
    """
    logits_TE = functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    probs_TE = functional.softmax(logits_TE, dtype=torch.float, dim=-1)
    experts_TK = probs_TE.topk(gate.top_k, dim=-1).indices
    if gate.routes_TK is not None:
        experts_TK = torch.where(gate.routes_TK < 0, experts_TK, gate.routes_TK)
    if gate.keeps_chosen:
        gate.chosen_TK = experts_TK
    weights_TK = probs_TE.gather(-1, experts_TK)
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return logits_TE, weights_TK.to(logits_TE.dtype), experts_TK
