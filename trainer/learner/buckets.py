"""Cuts a stream of weights into buckets: a few large tensors, so that no process needs a second copy of all weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some weights, by their names in a checkpoint, as views of one flat tensor.

    Example: `Bucket(flat, (("lm_head.weight", flat[:6].view(2, 3)), ("model.norm.weight", flat[6:])))`.
    """

    flat: Tensor
    named: tuple[tuple[str, Tensor], ...]


def buckets(weights: Iterable[tuple[str, Tensor]], max_values: int) -> Iterator[Bucket]:
    """Yield the weights, all of one dtype and device, in order, in buckets of at most `max_values` values.

    A larger weight is a bucket of its own. While a bucket is made, it is in memory twice.
    """
    waiting: list[tuple[str, Tensor]] = []
    for name, weight in weights:
        if waiting and sum(w.numel() for _, w in waiting) + weight.numel() > max_values:
            yield _flat(waiting)
            waiting = []
        waiting.append((name, weight))
    yield _flat(waiting)


def _flat(named: Sequence[tuple[str, Tensor]]) -> Bucket:
    # One large tensor travels faster than hundreds of small ones.
    flat = torch.cat([weight.flatten() for _, weight in named])
    pieces = flat.split([weight.numel() for _, weight in named])
    views = ((name, piece.view(w.shape)) for (name, w), piece in zip(named, pieces, strict=True))
    return Bucket(flat, tuple(views))
