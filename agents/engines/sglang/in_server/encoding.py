"""Encodes the new pictures of a batch of requests together, before SGLang encodes those of each request by themselves.

SGLang's scheduler runs the vision tower once for each request, and however small its pictures are, that takes as long
as to launch the tower's kernels. It looks for encoded pictures in a cache first. So they are put there.

This has not run on a GPU yet, so it is off unless the server's environment has `TOGETHER`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

#: The variable that turns it on, with any value.
TOGETHER = "ENCODE_PICTURES_TOGETHER"
#: Patches that the tower reads at once: those of four pictures of 1,024 tokens, which one request may have too.
MAX_PATCHES = 16_384
#: SGLang's attention of the tower whose time and memory grow with the square of all patches.
DENSE = "sdpa"


class Item(Protocol):
    """A picture of a request as SGLang's scheduler has it: `offsets` are its first and last places in the prompt."""

    hash: int
    offsets: list[tuple[int, int]]
    feature: Any


class Cache(Protocol):
    """Encoded pictures by their hashes, of at most `max_size` bytes."""

    max_size: int

    def has(self, mm_hash: int) -> bool:
        """Return whether a picture is there."""
        ...


def new_pictures(
    requests: Sequence[Sequence[Item]], prefix_lens: Sequence[int], extend_lens: Sequence[int], cache: Cache
) -> list[Item]:
    """Return the pictures that a batch reads and the cache lacks, each once.

    Request k reads the places from `prefix_lens[k]` on, `extend_lens[k]` of them. Requests whose pictures SGLang does
    not keep one by one are left to it, and so is what has no patches.
    """
    found: dict[int, Item] = {}
    for items, start, length in zip(requests, prefix_lens, extend_lens, strict=False):
        if all(len(item.offsets) == 1 and isinstance(item.feature, Tensor) for item in items):
            for item in items:
                ((first, last),) = item.offsets
                if last >= start and first < start + length and not cache.has(item.hash):
                    found.setdefault(item.hash, item)
    return list(found.values())


def passes(items: Sequence[Item], max_patches: int = MAX_PATCHES) -> Iterator[list[Item]]:
    """Yield the pictures in order, as many at once as have `max_patches` together, but at least one."""
    waiting: list[Item] = []
    for item in items:
        if waiting and sum(len(other.feature) for other in waiting) + len(item.feature) > max_patches:
            yield waiting
            waiting = []
        waiting.append(item)
    if waiting:
        yield waiting


def encode_together(
    encode: Callable[[list[Any]], Tensor],
    items: Sequence[Item],
    cache: Cache,
    keep: Callable[[int, Tensor], object],
    device: torch.device,
) -> None:
    """Encode pictures and keep them, up to half of what the cache holds, so that none of them is dropped before it is
    read.

    The items stay as they are: SGLang would copy patches that they have on the GPU back to the host.
    """
    num_bytes = 0
    for together in passes(items):
        if num_bytes > cache.max_size // 2:
            return
        moved = [replace(item, feature=item.feature.to(device, non_blocking=True)) for item in together]  # type: ignore[type-var]
        encoded_TD = encode(moved)
        encoded_TD = encoded_TD.reshape(-1, encoded_TD.shape[-1])
        lengths = [last - first + 1 for item in together for first, last in item.offsets]
        for item, part_TD in zip(together, encoded_TD.split(lengths), strict=True):
            # A copy, because a part would keep the memory of the whole.
            keep(item.hash, part_TD.clone())
        num_bytes += encoded_TD.nbytes


@functools.cache
def install() -> None:
    """Let SGLang's scheduler, which is this process, encode together if `TOGETHER` is set. Later calls do nothing."""
    if not os.environ.get(TOGETHER):
        return
    from sglang.srt.managers import mm_utils
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    read = mm_utils._get_chunked_prefill_embedding

    def encode_and_read(
        encode: Callable[[list[Any]], Tensor],
        items: Sequence[Item],
        bounds: Sequence[int],
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        offsets: Sequence[Sequence[tuple[int, int]]],
        input_ids: Tensor,
    ) -> Any:
        cache = mm_utils.embedding_cache

        def keep(key: int, encoded: Tensor) -> None:
            cache.set(key, EmbeddingResult(embedding=encoded))

        if mm_utils.get_global_server_args().mm_attention_backend != DENSE:
            requests = [items[start:end] for start, end in pairwise(bounds)]
            new = new_pictures(requests, prefix_lens, extend_lens, cache)
            encode_together(encode, new, cache, keep, input_ids.device)
        return read(encode, items, bounds, prefix_lens, extend_lens, offsets, input_ids)

    mm_utils._get_chunked_prefill_embedding = encode_and_read
