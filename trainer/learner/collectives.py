"""Collectives over the learner's ranks: the default process group, and sums or maxima over it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def ensure_process_group(device: torch.device) -> None:
    """Make a default process group of this process alone, unless there is one already."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def reduce_over_ranks(
    values: list[float], op: dist.ReduceOp.RedOpType, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return the values reduced over all ranks, or those of a group, in float64. All must call it with as many."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.tolist()
