"""Weights, parameter by parameter: the learner's against the checkpoint's files, the engine's against the learner's.

In: tensors by name. Out: a verdict that names the first that differs, and whether it is in the vision tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.diagnosis.finding import Verdict, fault, ok, together, warning
from trainer.loading import weight_files

#: Of a larger tensor only rows are compared, this many values in all.
MAX_VALUES = 2**22
NUM_BLOCKS = 8
_PREFIX = "backbone."

#: Returns rows of a tensor of the other side, or None where it has no such tensor.
Rows = Callable[[str, int, int], Tensor | None]


class CheckpointFiles:
    """The tensors of a checkpoint's safetensors files, read a few rows at a time.

    Example::

        files = CheckpointFiles(Path("path/to/checkpoint"))
        files.rows("backbone.model.visual.patch_embed.proj.bias", 0, 8)
    """

    def __init__(self, path: str | Path) -> None:
        self._file_of: dict[str, Any] = {}
        for file in weight_files(path):
            opened = safe_open(file, framework="pt", device="cpu")
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    @property
    def names(self) -> set[str]:
        """What the files hold."""
        return set(self._file_of)

    def rows(self, name: str, start: int, end: int) -> Tensor | None:
        """Return rows of a parameter of the network; a tied output layer may be saved in place of the embedding."""
        name = name.removeprefix(_PREFIX)
        if name not in self._file_of and name.endswith("embed_tokens.weight"):
            name = "lm_head.weight"
        if name not in self._file_of:
            return None
        part = self._file_of[name].get_slice(name)
        return part[start:end] if part.get_shape() else self._file_of[name].get_tensor(name)


def rows_of(tensors: Mapping[str, Tensor]) -> Rows:
    """Return how rows of tensors in memory are had, by the names of `PolicyModel` or without its prefix."""
    known = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}

    def rows(name: str, start: int, end: int) -> Tensor | None:
        tensor = known.get(name.removeprefix(_PREFIX))
        return tensor if tensor is None or not tensor.dim() else tensor[start:end]

    return rows


def check_same(own: Mapping[str, Tensor], other: Rows, who: str, whose: str) -> Verdict:
    """Return whether parameters are those of the other side, cast to `own`'s dtypes.

    Example::

        check_same(learner.weights(), CheckpointFiles(path).rows, "the learner", "the checkpoint")
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
                wrong.append(f"{_short(name)} is not in {whose} in this shape")
                break
            compared += mine.numel()
            if not torch.equal(mine, theirs.cpu().to(mine.dtype)):
                wrong.append(_difference(name, mine, theirs, own, other, start, end))
                break
    if wrong:
        found = f"{len(wrong)} of {len(own)} parameters of {who} are not those of {whose}; the first: {wrong[0]}"
        return fault(found, "the wrong weights were loaded, or under wrong names")
    share = "all" if compared == values else f"{compared / values:.0%}"
    return ok(f"{len(own)} parameters of {who} are those of {whose}, {share} of {values:,} values compared")


def _difference(
    name: str, mine: Tensor, theirs: Tensor, own: Mapping[str, Tensor], other: Rows, start: int, end: int
) -> str:
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
    where = "the vision tower" if ".visual." in name else "the decoder"
    holds = f" (it holds {_short(twin)})" if twin else ""
    return f"{_short(name)} of {where} has {values}{holds}"


def _equals(mine: Tensor, theirs: Tensor | None) -> bool:
    return theirs is not None and theirs.shape == mine.shape and torch.equal(mine, theirs.cpu().to(mine.dtype))


def _blocks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the rows to compare: all of them, or blocks evenly over a large tensor."""
    count = tensor.shape[0] if tensor.dim() else 1
    if tensor.numel() <= MAX_VALUES:
        yield 0, count
        return
    size = max(1, MAX_VALUES // NUM_BLOCKS // max(1, tensor.numel() // count))
    for number in range(min(NUM_BLOCKS, -(-count // size))):
        start = number * (count - size) // max(1, NUM_BLOCKS - 1)
        yield max(0, start), max(0, start) + size


def check_tower(weights: Mapping[str, Tensor]) -> Verdict | None:
    """Return whether the vision tower has learnt weights; None where there is no tower.

    A tower that was left out of a checkpoint is all zeros, or fresh: every norm exactly 1 and every bias exactly 0.
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
    """Return whether the learner begins with the checkpoint's weights, and has a vision tower that was trained."""
    verdicts = [check_same(weights, files, "the learner", "the checkpoint"), check_tower(weights)]
    return together(verdict for verdict in verdicts if verdict is not None)


def _short(name: str) -> str:
    return name.removeprefix(_PREFIX)
