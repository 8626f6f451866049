"""Checksums of a learner's weights as a server holds them: whole, or cut and joined for tensor-parallel GPUs.

SGLang's `/weights_checker` gives a checksum of every tensor of each of its GPUs: on a CPU the first 8 bytes of SHA-256,
on a GPU a sum of mixed 32-bit words (the final mix of MurmurHash3 over words and their places, tiles of 8,192 words).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 2**32 - 1
_MASK64 = 2**64 - 1
_TILE = 8192
_CHUNK = 512
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK)
#: For each half of a checksum, the factor of a word's place and how far that is rotated.
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))


@dataclass(frozen=True)
class TensorSlice:
    """What one GPU of a server may hold of some weights: joined by rows, each whole or one of `count` equal parts.

    Parts are cut along `axis`. Example, the second half of an attention's heads, as the second of two GPUs has it:
    `TensorSlice(("q_proj.weight", "k_proj.weight", "v_proj.weight"), axis=0, index=1, count=2)`.
    """

    names: tuple[str, ...]
    axis: int = 0
    index: int = 0
    count: int = 1

    def of(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Return what the GPU holds; None if the weights cannot be cut or joined like this."""
        if any(w.dim() <= self.axis or w.shape[self.axis] % self.count for w in weights):
            if self.count > 1:
                return None
            return weights[0]
        parts = [w.chunk(self.count, self.axis)[self.index] for w in weights]
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0].contiguous()


def checksums(weights: Iterable[tuple[str, Tensor]], cuts: Sequence[TensorSlice]) -> dict[TensorSlice, str]:
    """Return the checksum of each cut of a stream of weights. A weight is held until its last cut was made."""
    return dict(_checksums(weights, cuts))


def _checksums(weights: Iterable[tuple[str, Tensor]], cuts: Sequence[TensorSlice]) -> Iterator[tuple[TensorSlice, str]]:
    by_name: dict[str, list[TensorSlice]] = {}
    for cut in cuts:
        for name in cut.names:
            by_name.setdefault(name, []).append(cut)
    uses = Counter(name for cut in cuts for name in cut.names)
    held: dict[str, Tensor] = {}
    for name, weight in weights:
        if uses[name]:
            held[name] = weight
        for cut in by_name.get(name, ()):
            if not all(part in held for part in cut.names):
                continue
            whole = cut.of([held[part] for part in cut.names])
            if whole is not None:
                yield cut, checksum(whole)
            uses.subtract(cut.names)
        for done in [part for part in held if not uses[part]]:
            del held[done]


def checksum(tensor: Tensor) -> str:
    """Return a tensor's checksum as SGLang's server of the same kind of device gives it: 16 hexadecimal digits."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if flat.device.type == "cpu":
        return hashlib.sha256(flat.numpy().data).digest()[:8].hex()
    return f"{word_hash(flat):016x}"


def word_hash(flat: Tensor) -> int:
    """Return the hash that SGLang takes on GPUs of a flat tensor of bytes; it works on any device."""
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 4))
    words = flat.view(torch.int32)
    if not len(words):
        return 0
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), _CHUNK * _TILE):
        part = words[start : start + _CHUNK * _TILE].to(torch.int64) & _MASK
        places = torch.arange(start, start + len(part), device=flat.device) & _MASK
        halves = []
        for seed, (factor, turn) in zip(_SEEDS, _PLACES, strict=True):
            rotated = ((places << turn) & _MASK) | (places >> (32 - turn))
            mixed = _mix(part ^ (((places * factor + seed) & _MASK) ^ rotated))
            tiles = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE).sum(1) & _MASK
            halves.append(_mix(tiles ^ (len(words) * 4 & _MASK)))
        total += ((halves[0] << 32) | halves[1]).sum()
    return _final(int(total) & _MASK64)


def _mix(words: Tensor) -> Tensor:
    """Return the final mix of MurmurHash3 of 32-bit words, which are held as 64-bit integers."""
    words = words ^ (words >> 16)
    words = words * 0x85EBCA6B & _MASK
    words = words ^ (words >> 13)
    words = words * 0xC2B2AE35 & _MASK
    return words ^ (words >> 16)


def _final(value: int) -> int:
    """Return the last steps of SplitMix64."""
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & _MASK64
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
