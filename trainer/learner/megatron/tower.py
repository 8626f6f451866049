"""What Megatron-Bridge 0.6.2 computes otherwise, or more than once, in the vision tower of Qwen3-VL."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from agents.model.packed import VisionBatch
from agents.types import ProcessedImage

#: So many tokens of images fill a GPU: encoding more of them together gains nothing.
ENCODED_TOKENS = 4096


def towers_of(chunks: Sequence[Any], shares_tokens: bool) -> Iterator[Tower]:
    """Yield the vision towers of a network: one on the first pipeline stage, none on the others."""
    for chunk in chunks:
        for module in chunk.modules():
            # By name: Megatron-Bridge may not be installed where this is read.
            if type(module).__name__ == "Qwen3VLVisionModel":
                yield Tower(module, shares_tokens)


class Tower:
    """A vision tower that computes once what images and micro-batches have in common.

    - A pass encodes the images of many micro-batches at once, each different image once. The tower launches as many
      kernels for one image as for twenty, and a GPU waits for that: at 2B a third of a micro-batch's time.
    - Positions are made once for each size of images: the bridge makes them patch by patch in Python, and waits for
      the GPU at each image. The longest image is a number here, not a tensor that each layer waits for.
    - Mergers get the exact GELU that the model was trained with: the bridge gives them the tower's own activation, GELU
      by tanh, and features differ by 2e-4.
    - Where ranks share tokens (`--sp`), each puts DeepStack's features on its own tokens alone, and the bridge leaves
      the features' gradient a part on each rank: it is summed.

    Example::

        tower.begin([row.images for row in rows], most_tokens=4096, is_pipelined=False)
        for row in rows:
            vision = tower.next(device, torch.bfloat16)     # what the network is called with, or None
            ...                                             # forward and backward
        tower.backward()
    """

    def __init__(self, module: Any, shares_tokens: bool) -> None:
        for part in module.modules():
            if type(part).__name__ == "Qwen3VLVisionPatchMerger":
                part.activation_func = torch.nn.functional.gelu
        module.fast_pos_embed_interpolate = _once_for_each(module.fast_pos_embed_interpolate)
        module.rot_pos_emb = _once_for_each(module.rot_pos_emb)
        module.build_packed_seq_params = _with_number(module.build_packed_seq_params)
        self._encode = module.forward
        # The network calls its tower itself, once in the forward of each micro-batch.
        module.forward = self._shown
        self._shares_tokens = shares_tokens
        self._groups: deque[Sequence[Sequence[ProcessedImage]]] = deque()
        self._indices: deque[Tensor] = deque()
        self._is_apart = True
        self._vision: VisionBatch | None = None
        self._encoded: list[Tensor] = []
        self._given: list[Tensor] = []
        self._index_M: Tensor | None = None

    def begin(self, images: Sequence[Sequence[ProcessedImage]], most_tokens: int, is_pipelined: bool) -> None:
        """Begin a pass over micro-batches with these images.

        Those whose different images have up to `most_tokens` together share an encoding. In a pipeline, several
        micro-batches are between their forward and backward: there all of them share one, or each has its own.
        """
        groups = shared_groups(images, most_tokens)
        self._is_apart = len(groups) == 1 or not is_pipelined
        self._groups = deque(groups if self._is_apart else [[own] for own in images])
        self._indices.clear()
        self._encoded = []
        self._given = []

    def next(self, device: torch.device, dtype: torch.dtype) -> VisionBatch | None:
        """Return the images of the next micro-batch's group, of which the network gets its own; None: it has none."""
        if not self._indices:
            self.backward()  # of the group before, all of whose micro-batches have ended
            group = self._groups.popleft()
            self._vision = VisionBatch.build(group, device)
            sizes = [sum(image.num_tokens for image in own) for own in group]
            if self._vision:
                whole_M = self._vision.feature_index_M
            else:
                whole_M = torch.zeros(0, dtype=torch.long, device=device)
            self._indices.extend(whole_M.split(sizes))
            if self._vision:
                self._give(self._vision, device, dtype)
        self._index_M = self._indices.popleft()
        if len(self._index_M):
            return self._vision
        return None

    def _give(self, vision: VisionBatch, device: torch.device, dtype: torch.dtype) -> None:
        """Encode images. Their features get a graph of their own, and sum up gradients in float32."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        grids_n3 = torch.tensor(vision.grids, device=device)
        features, deep = self._encode(hidden_states=vision.pixels_PD.to(dtype), grid_thw=grids_n3)
        if self._shares_tokens:
            deep = [copy_to_tensor_model_parallel_region(layer) for layer in deep]
        self._encoded = [features, *deep]
        self._given = self._encoded
        if self._is_apart:
            self._given = [x.detach().float().requires_grad_(x.requires_grad) for x in self._encoded]

    def _shown(self, *_: Any, **__: Any) -> tuple[Tensor, list[Tensor]]:
        """Return the features of this micro-batch: the network calls it in place of the tower."""
        features, *deep = (
            given[self._index_M].to(x.dtype) for given, x in zip(self._given, self._encoded, strict=True)
        )
        return features, deep

    def backward(self) -> None:
        """Give the tower its gradient, once the micro-batches that share an encoding have theirs."""
        encoded = self._encoded
        given = self._given
        self._encoded = []
        self._given = []
        apart = [(x, leaf.grad) for x, leaf in zip(encoded, given, strict=True) if x is not leaf]
        # Features that no trained token depends on have no gradient.
        pairs = [(x, grad.to(x.dtype)) for x, grad in apart if grad is not None]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])


def shared_groups(images: Sequence[Sequence[ProcessedImage]], most_tokens: int) -> list[list[Sequence[ProcessedImage]]]:
    """Return the images of micro-batches, in order, in groups whose different ones have up to `most_tokens` together.

    A micro-batch that has more is a group by itself.
    """
    groups: list[list[Sequence[ProcessedImage]]] = []
    tokens: dict[str, int] = {}
    for own in images:
        added = {image.digest: image.num_tokens for image in own}
        if not groups or sum((tokens | added).values()) > most_tokens:
            groups.append([])
            tokens = {}
        groups[-1].append(own)
        tokens |= added
    return groups


def _once_for_each(rows_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of grids (n, 3) that asks `rows_of` for each different one, on the CPU, and joins the rows."""

    def joined(grids_n3: Tensor) -> Tensor:
        grids = [tuple(grid) for grid in grids_n3.tolist()]
        made = {grid: rows_of(torch.tensor([grid])) for grid in dict.fromkeys(grids)}
        return torch.cat([made[grid] for grid in grids])

    return joined


def _with_number(params_of: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def params(grids_n3: Tensor) -> Any:
        made = params_of(grids_n3)
        # Read here once, or each layer would wait for the GPU to tell it.
        made.max_seqlen_q = made.max_seqlen_kv = int(made.max_seqlen_q)
        return made

    return params
