"""Collectives over the learner's ranks: the default process group, where it listens, and sums or maxima over it."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist


def ensure_process_group(device: torch.device) -> None:
    """Make a default process group of this process alone, unless there is one already."""
    if not dist.is_initialized():
        use_loopback()
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
        else:
            backend = "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def use_loopback() -> None:
    """Let gloo listen on the loopback interface alone, unless GLOO_SOCKET_IFNAME names another one."""
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of one address, to give to a `TCPStore`: its own listens on all."""
    if ":" in address:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    return socket.create_server((address, 0), family=family)


def reduce_over_ranks(
    values: list[float], op: dist.ReduceOp.RedOpType, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Return the values reduced over all ranks, or those of a group, in float64. All must call it with as many."""
    # In float64 a count of tokens is exact.
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.tolist()
