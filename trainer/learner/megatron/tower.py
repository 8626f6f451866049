"""What Megatron-Bridge 0.6.2 computes otherwise, or more than once, in the vision tower of Qwen3-VL."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def towers_of(chunks: Sequence[Any]) -> Iterator[Any]:
    """Yield the vision towers of a network: one on the first pipeline stage, none on the others."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if type(module).__name__ == "Qwen3VLVisionModel")


def prepare_tower(tower: Any, shares_tokens: bool) -> Any:
    """Correct a tower, and let it compute once what pictures have in common; return it.

    - Mergers get the exact GELU that the model was trained with: the bridge gives them the tower's own activation, GELU
      by tanh, and features differ by 2e-4.
    - Where ranks share tokens (`--sp`), each puts DeepStack's features on its own tokens alone, and the bridge leaves
      the features' gradient a part on each rank: it is summed.
    - Positions are made once for each size of pictures: the bridge makes them patch by patch in Python, and waits for
      the GPU at each picture. The longest picture is a number here, not a tensor that each layer waits for.
    - A picture that several streams show is encoded once: `tower.shown_M` says which of the features each placeholder
      gets, and is set before the network runs.
    """
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    def shown(tower: Any, inputs: Any, features: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        each, deep = features
        if shares_tokens:
            deep = [copy_to_tensor_model_parallel_region(layer) for layer in deep]
        return each[tower.shown_M], [layer[tower.shown_M] for layer in deep]

    for module in tower.modules():
        if type(module).__name__ == "Qwen3VLVisionPatchMerger":
            module.activation_func = torch.nn.functional.gelu
    tower.register_forward_hook(shown)
    tower.fast_pos_embed_interpolate = _once_for_each(tower.fast_pos_embed_interpolate)
    tower.rot_pos_emb = _once_for_each(tower.rot_pos_emb)
    tower.build_packed_seq_params = _with_number(tower.build_packed_seq_params)
    return tower


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
        made.max_seqlen_q = made.max_seqlen_kv = int(made.max_seqlen_q)
        return made

    return params
