"""Compares weights parameter by parameter: the learner's with the checkpoint's, the engine's with the learner's.

A verdict names the first parameter that differs, and says whether it belongs to the vision tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from envs.checks import Verdict, combine, fault, ok, warning
from trainer.learner.weights_io import CheckpointTensors

#: Of a tensor with more values, only some rows are compared, with about this many values.
MAX_VALUES = 2**22
NUM_BLOCKS = 8
_PREFIX = "backbone."

#: rows(name, start, end) returns rows of a tensor, or None if there is no such tensor.
Rows = Callable[[str, int, int], Tensor | None]


def rows_of_checkpoint(path: str | Path) -> Rows:
    """Return the function that reads rows of a network's parameters from the checkpoint's files."""
    tensors = CheckpointTensors(path)

    def rows(name: str, start: int, end: int) -> Tensor | None:
        name = name.removeprefix(_PREFIX)
        if name not in tensors and name.endswith("embed_tokens.weight"):
            name = "lm_head.weight"  # a tied output layer may be saved in place of the embedding
        if name in tensors:
            return tensors.rows(name, start, end)
        return None

    return rows


def rows_of(tensors: Mapping[str, Tensor]) -> Rows:
    """Return the function that gives rows of tensors in memory, by their names with or without the prefix."""
    known = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}

    def rows(name: str, start: int, end: int) -> Tensor | None:
        tensor = known.get(name.removeprefix(_PREFIX))
        if tensor is None or not tensor.dim():
            return tensor
        return tensor[start:end]

    return rows


def check_same(own: Mapping[str, Tensor], other: Rows, own_name: str, other_name: str) -> Verdict:
    """Return whether parameters equal the other ones, cast to the dtypes of `own`.

    Example::

        check_same(learner.weights(), rows_of_checkpoint(path), "the learner", "the checkpoint")
    """
    wrong: list[str] = []
    values = compared = 0
    for name, tensor in own.items():
        tensor = tensor.detach()
        values += tensor.numel()
        for start, end in _blocks(tensor):
            mine = (tensor[start:end] if tensor.dim() else tensor).cpu()
            theirs = other(name, start, end)
            if theirs is None or theirs.shape != mine.shape:
                wrong.append(f"{_short(name)} is not in {other_name} in this shape")
                break
            compared += mine.numel()
            if not torch.equal(mine, theirs.cpu().to(mine.dtype)):
                wrong.append(_difference(name, mine, theirs, own, other, start, end))
                break
    if wrong:
        count = f"{len(wrong)} of {len(own)} parameters"
        found = f"{count} of {own_name} are not those of {other_name}; the first: {wrong[0]}"
        return fault(found, "the wrong weights were loaded, or under wrong names")
    if compared == values:
        share = "all"
    else:
        share = f"{compared / values:.0%}"
    return ok(f"{len(own)} parameters of {own_name} are those of {other_name}, {share} of {values:,} values compared")


def _difference(
    name: str, mine: Tensor, theirs: Tensor, own: Mapping[str, Tensor], other: Rows, start: int, end: int
) -> str:
    """Return where a parameter differs, by which values, and whether it holds another parameter's values."""
    place = int((mine != theirs.cpu().to(mine.dtype)).flatten().nonzero()[0])
    values = f"{float(mine.flatten()[place]):.4g}, not {float(theirs.flatten()[place]):.4g}"
    twin = next(
        (
            each
            for each, tensor in own.items()
            if each != name and tensor.shape == own[name].shape and _equals(mine, other(each, start, end))
        ),
        None,
    )
    if ".visual." in name:
        where = "the vision tower"
    else:
        where = "the decoder"
    holds = f" (it holds {_short(twin)})" if twin else ""
    return f"{_short(name)} of {where} has {values}{holds}"


def _equals(mine: Tensor, theirs: Tensor | None) -> bool:
    return theirs is not None and theirs.shape == mine.shape and torch.equal(mine, theirs.cpu().to(mine.dtype))


def _blocks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the rows to compare as (start, end): all rows or, of a large tensor, evenly spread blocks of them."""
    count = tensor.shape[0] if tensor.dim() else 1
    if tensor.numel() <= MAX_VALUES:
        yield 0, count
        return
    size = max(1, MAX_VALUES // NUM_BLOCKS // max(1, tensor.numel() // count))
    for number in range(min(NUM_BLOCKS, -(-count // size))):
        start = number * (count - size) // max(1, NUM_BLOCKS - 1)
        yield max(0, start), max(0, start) + size


def check_tower(weights: Mapping[str, Tensor]) -> Verdict | None:
    """Return whether the vision tower has trained weights; None if there is no tower.

    A tower that was missing in a checkpoint is all zeros, or freshly initialised: every norm is 1 and every bias is 0.
    """
    tower = {name: tensor.detach() for name, tensor in weights.items() if ".visual." in name}
    if not tower:
        return None
    empty = [name for name, tensor in tower.items() if tensor.dim() > 1 and not bool(tensor.any())]
    if empty:
        return fault(f"{len(empty)} matrices of the vision tower are all zero, {_short(empty[0])} first", _NO_TOWER)
    flat = [tensor for tensor in tower.values() if tensor.dim() == 1]
    if flat and all(bool(((tensor == 0) | (tensor == 1)).all()) for tensor in flat):
        found = f"the vision tower looks fresh: all {len(flat)} norms and biases are exactly 1 or 0"
        return warning(found, _NO_TOWER)
    return ok(f"{len(tower)} in the vision tower")


_NO_TOWER = "give a checkpoint that was saved with its vision tower"


def check_learner(weights: Mapping[str, Tensor], files: Rows) -> Verdict:
    """Return whether the learner starts with the checkpoint's weights, and with a trained vision tower."""
    verdicts = [check_same(weights, files, "the learner", "the checkpoint"), check_tower(weights)]
    return combine(verdict for verdict in verdicts if verdict is not None)


def _short(name: str) -> str:
    return name.removeprefix(_PREFIX)
