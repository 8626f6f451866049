"""Makes Megatron's packed micro-batches (THD: tokens, heads, dims) of samples, in plain arrays: no Megatron here.

Streams lie one after another in one row, each padded at its end to a multiple that all ranks can share. A padding token
comes after its stream's tokens, so causal attention shows it to none of them.

Under context parallelism (CP) a rank computes two chunks of each padded stream, one from its front and one from its
back, so that causal attention costs all ranks the same ("zig-zag", as Megatron-core cuts THD rows).

Legend: T tokens of the row with padding, S streams, N model tokens, P tokens of one CP rank, M tokens that one rank
routes to experts, R tokens of a stream with routes, L decoder layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.types import ProcessedImage
from trainer.data.packing import row_routes, token_batch
from trainer.learner.layout import Layout
from trainer.types import Row, TokenBatch, TrainingSample


@dataclass(frozen=True, eq=False)
class ThdRow:
    """One packed row as every rank of a model-parallel group knows it.

    `starts_S1` are the first tokens of the padded streams, and the row's end. The logits at `before_N` predict
    `targets_N`. Images are in the order of their placeholders, repeated where two streams show one. `routes_TLK` are
    the experts of each token, -1 where it chooses freely; None: all do.

    Example: streams of 5 and 2 tokens with `multiple` 4 have `starts_S1` 0, 8, 12.
    """

    ids_T: NDArray[np.int64]
    positions_3T: NDArray[np.int64]
    starts_S1: NDArray[np.int32]
    before_N: NDArray[np.int64]
    targets_N: NDArray[np.int64]
    images: tuple[ProcessedImage, ...]
    routes_TLK: NDArray[np.int16] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest padded stream."""
        return int(np.diff(self.starts_S1).max())

    def split(self, context: int) -> list[NDArray[np.int64]]:
        """Return the tokens (P,) of each CP rank, in the order in which it holds them."""
        return zigzag(self.starts_S1, context)

    def places(self, context: int, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which model tokens this CP rank scores, and where the logits that predict them lie on it."""
        local_T = np.full(len(self.ids_T), -1)
        mine_P = self.split(context)[rank]
        local_T[mine_P] = np.arange(len(mine_P))
        local_N = local_T[self.before_N]
        # -1: another CP rank has the logits that predict the token.
        chosen = np.flatnonzero(local_N >= 0)
        return chosen, local_N[chosen]

    def routed(self, context: tuple[int, int], sequence: tuple[int, int]) -> NDArray[np.int64]:
        """Return the tokens (M,) that a rank routes to experts: its part of its CP rank's tokens.

        `context` and `sequence` are (rank, ranks). Sequence parallelism cuts a CP rank's tokens into equal parts, in
        the order in which the rank holds them.
        """
        mine_P = self.split(context[1])[context[0]]
        return mine_P.reshape(sequence[1], -1)[sequence[0]]


@dataclass(frozen=True, eq=False)
class ThdBatch(TokenBatch):
    """A micro-batch in THD: the row, and the inputs of the loss on the device.

    `places` are the model tokens that this CP rank scores, and where their logits lie on it; `targets_N` are those of
    all CP ranks. `routes_MLK`, in the CPU's memory, are the routes of the tokens that this rank routes.
    """

    row: ThdRow
    targets_N: Tensor
    places: tuple[Tensor, Tensor]
    routes_MLK: Tensor | None = None


def thd_row(samples: Sequence[TrainingSample], multiple: int = 1) -> ThdRow:
    """Pack whole streams into one row, each padded to a multiple.

    Padding repeats id 0 and counts the stream's positions on.
    """
    ids: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    starts = [0]
    before = []
    for sample in samples:
        start = starts[-1]
        own = len(sample.ids_T)
        size = -(-own // multiple) * multiple
        if own:
            last = sample.positions_3T[:, -1:]
        else:
            last = np.zeros((3, 1), np.int64)
        # Any id will do: no token that is trained sees padding.
        ids.append(np.pad(sample.ids_T, (0, size - own)))
        positions.append(np.concatenate([sample.positions_3T, last + 1 + np.arange(size - own)], axis=1))
        # The logits at t - 1 predict token t.
        before.append(np.flatnonzero(sample.mask_T) - 1 + start)
        starts.append(start + size)
    return ThdRow(
        ids_T=np.concatenate(ids),
        positions_3T=np.concatenate(positions, axis=1),
        starts_S1=np.array(starts, dtype=np.int32),
        before_N=np.concatenate(before),
        targets_N=np.concatenate([s.ids_T[s.mask_T] for s in samples]),
        images=tuple(image for sample in samples for image in sample.images),
        # Padding has no route, and neither has the last written token, which was never read.
        routes_TLK=row_routes(zip(starts, (sample.routes_RLK for sample in samples), strict=False), starts[-1]),
    )


def padding_multiple(layout: Layout) -> int:
    """Return what the length of each padded stream must be a multiple of.

    Context parallelism cuts a stream into two chunks a rank, sequence parallelism shares a rank's tokens over `tensor`.

    >>> padding_multiple(Layout(tensor=2, context=4)), padding_multiple(Layout(tensor=2, context=4, sequence=True))
    (8, 16)
    """
    if layout.context > 1:
        chunks = 2 * layout.context
    else:
        chunks = 1
    # Tensor ranks share out what is on one CP rank once more.
    return chunks * (layout.tensor if layout.sequence else 1)


def zigzag(starts_S1: NDArray[np.int32], context: int) -> list[NDArray[np.int64]]:
    """Return the tokens of each CP rank: of the 2 C chunks of each stream, rank r has chunks r and 2 C - 1 - r.

    >>> [tokens.tolist() for tokens in zigzag(np.array([0, 8, 12], dtype=np.int32), 2)]
    [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    """
    if context == 1:
        return [np.arange(int(starts_S1[-1]))]
    ranks: list[list[NDArray[np.int64]]] = [[] for _ in range(context)]
    for start, end in zip(starts_S1[:-1].tolist(), starts_S1[1:].tolist(), strict=True):
        assert (end - start) % (2 * context) == 0, f"a stream of {end - start} tokens in {2 * context} chunks"
        chunks = np.arange(start, end).reshape(2 * context, -1)
        for rank, own in enumerate(ranks):
            # An early chunk attends to few tokens, a late one to many: a pair costs each rank the same.
            own += [chunks[rank], chunks[2 * context - 1 - rank]]
    return [np.concatenate(own) for own in ranks]


def thd_batch(
    rows: Sequence[Row],
    multiple: int,
    context: tuple[int, int],
    device: torch.device,
    sequence: tuple[int, int] = (0, 1),
) -> ThdBatch:
    """Return the micro-batch of rows for one of `context` = (rank, ranks) CP ranks.

    `sequence` = (rank, ranks) are those that share a CP rank's tokens (sequence parallelism).
    """
    samples = [sample for row in rows for sample in row.samples]
    row = thd_row(samples, multiple)
    cp_rank, cp_size = context
    chosen, local = (torch.from_numpy(a).to(device, non_blocking=True) for a in row.places(cp_size, cp_rank))
    targets_N = torch.from_numpy(row.targets_N).to(device, non_blocking=True)
    routes_MLK = None
    if row.routes_TLK is not None:
        # Up to a kilobyte a token: all micro-batches of a step would fill the GPU.
        routes_MLK = torch.from_numpy(row.routes_TLK[row.routed(context, sequence)])
    inputs = vars(token_batch(samples, device))
    return ThdBatch(**inputs, row=row, targets_N=targets_N, places=(chosen, local), routes_MLK=routes_MLK)


@dataclass(frozen=True, eq=False)
class PaddedRow(Row):
    """One stream, padded to a multiple: THD has no rows that share a prompt."""

    multiple: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the row with padding."""
        return -(-len(self.samples[0].ids_T) // self.multiple) * self.multiple


def single_rows(samples: Sequence[TrainingSample], multiple: int) -> list[Row]:
    """Return a row for each sample."""
    # One stream a row: bins still put several of them into a micro-batch.
    return [PaddedRow((sample,), multiple) for sample in samples]
