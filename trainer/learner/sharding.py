"""Prepares a network for training: freezes, recomputes, compiles and shards it over the ranks (FSDP2).

`shard` changes a `PolicyModel` in place as `LearnerConfig` says; its parameters become DTensors over the mesh.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
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

from agents.model.policy import PolicyModel
from envs.errors import UserError
from trainer.config.learner import LearnerConfig


def freeze_vision(model: PolicyModel, dtype: torch.dtype | None = None) -> None:
    """Train the decoder alone: the vision tower and its mergers get no gradient.

    The tower's weights are cast to `dtype`; None leaves them. FSDP2 shards frozen weights of another dtype together
    with trained ones: only weights with gradients must have the same dtype.

    Raises:
        UserError: the network takes no images.
    """
    tower = model.architecture.vision_tower(model.backbone)
    if tower is None:
        rule = "needs a network that takes images"
        raise UserError("--freeze-vision", rule, model.config.model_type, "leave it out")
    for parameter in tower.parameters():
        parameter.requires_grad_(False)
        if dtype is not None:
            # Without updates it needs no precision for small ones.
            parameter.data = parameter.data.to(dtype)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have gradients, for the optimizer; a shared parameter is listed once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def shard(model: PolicyModel, config: LearnerConfig, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Recompute, compile and shard the network in place.

    Weights keep their dtype: float32 for trained ones, so that small updates are exact. The network computes in
    `dtype`, as the engine does. Gradients are summed over ranks in float32.
    """
    compiled = config.compile == "on" or (config.compile == "auto" and mesh.device_type == "cuda")
    model.compiled_scores = compiled
    if compiled:
        for block in model.blocks:
            block.forward = _compiled(block)
    recompute(model.blocks, config.recompute)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if config.offload == "all":
        # From pinned memory a GPU copies while it computes.
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    else:
        offload = OffloadPolicy()
    # One rank gathers nothing, so it has nothing to free.
    reshards = config.reshard == "always" or (config.reshard == "auto" and mesh.size() > 1)
    for unit in model.units:
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshards)
    # The root holds the embedding and the output layer: the last weights that the loss needs, and the first that the
    # backward needs. So it stays gathered between forward and backward.
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=False)
    register_fsdp_forward_method(model, "token_scores")


def reshard(model: PolicyModel) -> None:
    """Free all gathered weights: after a forward without a backward, FSDP keeps some, in the forward's precision."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def keep_gathered(model: PolicyModel, kept: bool) -> None:
    """Choose whether the next backward keeps the gathered weights and each rank's own gradients.

    If it keeps them, ranks communicate once for several micro-batches, and need memory for a float32 gradient of the
    whole network. If not, the backward frees the weights and sums the gradients over the ranks.
    """
    root = cast(FSDPModule, model)
    root.set_is_last_backward(not kept)
    root.set_reshard_after_backward(not kept)
    root.set_requires_gradient_sync(not kept)


def recompute(blocks: Sequence[nn.Module], share: float) -> None:
    """Let this share of the blocks compute their activations again in the backward pass, in place of keeping them.

    It comes after compilation, which then sees the block alone.
    """
    for block, is_recomputed in zip(blocks, _spread(len(blocks), share), strict=True):
        if is_recomputed:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _compiled(block: nn.Module) -> Callable[..., Any]:
    """Return the block's compiled forward. FSDP's hooks wrap it, so they run once and are not compiled.

    Transformers wraps the forward of every kind of block in the same function. torch.compile keeps a few graphs for
    each function: with the wrapper, all kinds of blocks would share these few, and most would run uncompiled.
    """
    return functools.partial(torch.compile(inspect.unwrap(type(block).forward), dynamic=True), block)


def _spread(count: int, share: float) -> list[bool]:
    """Return for each of `count` blocks whether it belongs to the share; these blocks are evenly spread.

    >>> _spread(4, 0.5)
    [False, True, False, True]
    """
    return [int((number + 1) * share) > int(number * share) for number in range(count)]
