"""A network made ready to train: blocks recomputed, compiled and sharded over the ranks (FSDP2).

In: a `PolicyModel` and what `LearnerConfig` says of it. Out: the same object, its parameters DTensors over the mesh.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import checkpoint

from agents.model import PolicyModel
from trainer.config import LearnerConfig


def shard(model: PolicyModel, config: LearnerConfig, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Prepare and shard the network in place.

    Trained weights keep the dtype that they have, float32 for exact small updates; `dtype` is what the network computes
    in, as the engine does. Gradients are added up over ranks in float32.
    """
    compiled = config.compile == "on" or (config.compile == "auto" and mesh.device_type == "cuda")
    model.compiled_scores = compiled
    for block, recomputed in zip(model.blocks, _spread(len(model.blocks), config.recompute), strict=True):
        block.forward = _forward(block, recomputed, compiled)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.offload == "all" else OffloadPolicy()
    gives_up = config.reshard == "always" or (config.reshard == "auto" and mesh.size() > 1)
    for unit in model.units:
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=gives_up)
    # The root holds the embedding and the output layer, which the loss needs last and the backward first.
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    register_fsdp_forward_method(model, "token_scores")


def reshard(model: PolicyModel) -> None:
    """Give up all gathered weights: after a forward without a backward, FSDP keeps some, in the forward's precision."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_gathered(model: PolicyModel, kept: bool) -> None:
    """Keep gathered weights, and each rank's own gradients, beyond the next backward; or give up and add them up in it.

    Over several micro-batches that communicates once in all, for the memory of a float32 gradient of the whole network.
    """
    root = cast(FSDPModule, model)
    root.set_is_last_backward(not kept)
    root.set_reshard_after_backward(not kept)
    root.set_requires_gradient_sync(not kept)


def _forward(block: nn.Module, recomputed: bool, compiled: bool) -> Callable[..., Any]:
    """Return the block's forward; FSDP's hooks stand around it, so they run once and are not compiled."""
    forward = block.forward
    if compiled:
        # Transformers puts one wrapper around the forward of every kind of block. What is compiled is kept by function,
        # a few forms of each: under the wrapper, all kinds would share those few and most would soon run uncompiled.
        forward = functools.partial(torch.compile(inspect.unwrap(type(block).forward), dynamic=True), block)
    if recomputed:
        forward = functools.partial(checkpoint, forward, use_reentrant=False)
    return forward


def _spread(count: int, share: float) -> list[bool]:
    """Return which of the blocks are the share, evenly spread.

    >>> _spread(4, 0.5)
    [False, True, False, True]
    """
    return [int((number + 1) * share) > int(number * share) for number in range(count)]
