"""Plans where the sequences of a packed row lie in chunks, for layers that carry states from token to token.

Legend: T packed tokens, S sequences, N chunks of all sequences, P tokens of a chunk, E inputs of a chunk's convolution,
W the convolution's inputs before a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.model.attention import Span

#: Tokens of a chunk.
CHUNK = 64
#: Earlier inputs that the convolution reads for each token: its kernel has one place more.
WIDTH = 3


@dataclass(frozen=True, eq=False)
class Generation:
    """Sequences that the scan takes through their chunks together, longest first.

    `sources` are the rows that their first states have: of the given states, or, for sequences with a prefix, of the
    states that the generation before ended with. `counts` are the sequences that have a 1st, 2nd, ... chunk.
    """

    sources: Tensor
    counts: list[int]


@dataclass(frozen=True, eq=False)
class StatePlan:
    """How the sequences of a packed row lie in chunks.

    The convolution's inputs are the T tokens of the row, and then W earlier inputs of each sequence, from its states.
    `inputs_NE` are the places among them that each chunk reads, its own tokens last; chunks of one scan step follow
    each other. `is_token_NP` is False for padding. `chunk_row_T` is the place of each token in the chunks,
    `last_inputs_SW` are the last W inputs of each sequence, and `order_S` is the row of each sequence's final state.
    `is_compiled` says whether layers compile what they do within chunks.
    """

    inputs_NE: Tensor
    is_token_NP: Tensor
    chunk_row_T: Tensor
    last_inputs_SW: Tensor
    order_S: Tensor
    generations: tuple[Generation, ...]
    is_compiled: bool = False

    @classmethod
    def build(cls, spans: Sequence[Span], device: torch.device | str) -> StatePlan:
        """Plan sequences that cover the packed tokens in order; a prefix is an earlier whole sequence without one."""
        num_tokens = sum(span.length for span in spans)
        starts = {span.start: index for index, span in enumerate(spans) if not span.prefix_length}
        inputs = _sequence_inputs(spans, starts, num_tokens)
        roots = _longest_first(spans, [i for i, span in enumerate(spans) if not span.prefix_length])
        followers = _longest_first(spans, [i for i, span in enumerate(spans) if span.prefix_length])
        order_S = np.argsort([*roots, *followers], kind="stable")
        generations = [Generation(_on(roots, device), _counts(spans, roots))]
        if followers:
            parents = [order_S[starts[spans[index].prefix_start]] for index in followers]
            generations.append(Generation(_on(parents, device), _counts(spans, followers)))
        windows: list[NDArray[np.int64]] = []
        is_token: list[NDArray[np.bool_]] = []
        chunk_row_T = np.empty(num_tokens, dtype=np.int64)
        for members in (roots, followers):
            # The chunks of a step are those of the longest sequences, so that the scan only narrows.
            for begin in range(0, max((spans[index].length for index in members), default=0), CHUNK):
                for index in members:
                    length = min(CHUNK, spans[index].length - begin)
                    if length <= 0:
                        break
                    first = spans[index].start + begin
                    chunk_row_T[first : first + length] = len(windows) * CHUNK + np.arange(length)
                    # Padding reads the last token again: its strength of zero hides it.
                    reads = np.minimum(np.arange(WIDTH + CHUNK), WIDTH + length - 1)
                    windows.append(inputs[index][begin + reads])
                    is_token.append(np.arange(CHUNK) < length)
        return cls(
            inputs_NE=_on(np.stack(windows), device),
            is_token_NP=_on(np.stack(is_token), device),
            chunk_row_T=_on(chunk_row_T, device),
            last_inputs_SW=_on(np.stack([each[-WIDTH:] for each in inputs]), device),
            order_S=_on(order_S, device),
            generations=tuple(generations),
        )


def _sequence_inputs(spans: Sequence[Span], starts: dict[int, int], num_tokens: int) -> list[NDArray[np.int64]]:
    """Return the places of the convolution's inputs for each sequence: W before it, then its own."""
    inputs: list[NDArray[np.int64]] = []
    for index, span in enumerate(spans):
        earlier = num_tokens + WIDTH * index + np.arange(WIDTH)
        if span.prefix_length:
            prefix = spans[starts[span.prefix_start]]
            assert prefix.length == span.prefix_length, f"a prefix is a whole sequence: {span} of {prefix}"
            earlier = inputs[starts[span.prefix_start]][-WIDTH:]
        inputs.append(np.concatenate([earlier, span.start + np.arange(span.length)]))
    return inputs


def _longest_first(spans: Sequence[Span], members: list[int]) -> list[int]:
    return sorted(members, key=lambda index: -spans[index].length)


def _counts(spans: Sequence[Span], members: list[int]) -> list[int]:
    """Return how many of the sequences have a 1st, 2nd, ... chunk."""
    chunks = np.array([-(-spans[index].length // CHUNK) for index in members])
    return [int((chunks > step).sum()) for step in range(chunks.max())]


def _on(array: Sequence[int] | NDArray[Any], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.asarray(array)).to(device, non_blocking=True)
