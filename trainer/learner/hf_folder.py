"""Writes a stream of weights as the safetensors files of a Hugging Face folder, without holding all of them at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

#: Bytes of one file; a larger weight has a file of its own.
FILE_BYTES = 5 * 10**9


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    writes: bool = True,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights in `dtype`, in as many files as needed, with their index.

    A rank that does not write takes the stream to its end: the others cannot gather weights without it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file_of: dict[str, int] = {}
    waiting: dict[str, Tensor] = {}
    num_bytes = 0
    total = 0
    number = 1

    def flush() -> None:
        nonlocal num_bytes, number
        save_file(waiting, folder / _part(number), metadata={"format": "pt"})
        file_of.update(dict.fromkeys(waiting, number))
        waiting.clear()
        num_bytes = 0
        number = number + 1

    for name, weight in weights:
        if not writes:
            continue
        size = weight.numel() * dtype.itemsize
        if waiting and num_bytes + size > file_bytes:
            flush()
        waiting[name] = weight.detach().to("cpu", dtype).contiguous()
        num_bytes = num_bytes + size
        total = total + size
    if writes:
        flush()
        _name_files(folder, file_of, total)


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _name_files(folder: Path, file_of: dict[str, int], total: int) -> None:
    """Give the files the names that readers expect, now that their number is known."""
    count = max(file_of.values())
    if count == 1:
        (folder / _part(1)).replace(folder / "model.safetensors")
        return
    names = {number: f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)}
    for number, name in names.items():
        (folder / _part(number)).replace(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[number] for name, number in file_of.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
