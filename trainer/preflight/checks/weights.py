"""Compares weights parameter by parameter: the learner's with the checkpoint's, the engine's with the learner's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from agents.model.policy import PolicyModel
from envs.checks import Verdict, fault, ok
from trainer.learner.weights_io import CheckpointTensors

#: Of a tensor with more values, only some rows are compared, with about this many values.
MAX_VALUES = 2**22
NUM_BLOCKS = 8
_PREFIX = "backbone."

#: rows(name, start, end) returns rows of a tensor, of a scalar its value in a row, or None if there is no such tensor.
Rows = Callable[[str, int, int], Tensor | None]


def rows_of_checkpoint(path: str | Path, network: PolicyModel) -> Rows:
    """Return the function that reads rows of a network's parameters from the checkpoint's files."""
    tensors = CheckpointTensors(path)

    def rows(name: str, start: int, end: int) -> Tensor | None:
        names = [network.architecture.saved_name(name), name]
        if name.endswith("embed_tokens.weight"):
            names.append("lm_head.weight")  # a tied output layer may be saved in place of the embedding
        for each in names:
            if each in tensors:
                return torch.atleast_1d(network.as_in_memory(name, tensors.rows(each, start, end)))
        return None

    return rows


def rows_of(tensors: Mapping[str, Tensor]) -> Rows:
    """Return the function that gives rows of tensors in memory."""
    known = {name.removeprefix(_PREFIX): torch.atleast_1d(tensor) for name, tensor in tensors.items()}

    def rows(name: str, start: int, end: int) -> Tensor | None:
        if name in known:
            return known[name][start:end]
        return None

    return rows


def check_same(own: Mapping[str, Tensor], other: Rows, own_name: str, other_name: str) -> Verdict:
    """Return whether parameters equal the other ones, cast to the dtypes of `own`.

    Example::

        check_same(learner.weights(), rows_of_checkpoint(path, network), "the learner", "the checkpoint")
    """
    wrong: list[str] = []
    values = 0
    compared = 0
    for full_name, whole in own.items():
        name = full_name.removeprefix(_PREFIX)
        tensor = torch.atleast_1d(whole.detach())
        values += tensor.numel()
        for start, end in _blocks(tensor):
            mine = tensor[start:end].cpu()
            theirs = other(name, start, end)
            if theirs is None or theirs.shape != mine.shape:
                wrong.append(f"{name} is not in {other_name} in this shape")
                break
            compared += mine.numel()
            # An engine in bfloat16 holds the rounded values of a learner in float32.
            theirs = theirs.cpu().to(mine.dtype)
            if not torch.equal(mine, theirs):
                place = int((mine != theirs).flatten().nonzero()[0])
                got = float(mine.flatten()[place])
                wrong.append(f"{name} has {got:.4g}, not {float(theirs.flatten()[place]):.4g}")
                break
    if wrong:
        count = f"{len(wrong)} of {len(own)} parameters"
        found = f"{count} of {own_name} are not those of {other_name}; the first: {wrong[0]}"
        return fault(found, "the wrong weights were loaded, or under wrong names")
    share = f"{compared / values:.0%} of {values:,} values compared"
    return ok(f"{len(own)} parameters of {own_name} are those of {other_name}, {share}")


def _blocks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the rows to compare as (start, end): all rows or, of a large tensor, evenly spread blocks of them."""
    if tensor.numel() <= MAX_VALUES:
        yield 0, len(tensor)
        return
    count = len(tensor)
    size = max(1, MAX_VALUES // NUM_BLOCKS * count // tensor.numel())
    for number in range(min(NUM_BLOCKS, -(-count // size))):
        # The last block ends with the last row: padded vocabularies differ there.
        start = max(0, number * (count - size) // (NUM_BLOCKS - 1))
        yield start, start + size
