"""What tests of loading and of adapters share: a short stream through a network, and its parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agents.model.mrope import mrope_positions
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from agents.types import ProcessedImage


def logits(model: PolicyModel) -> Tensor:
    """Return the logits of a short stream, with an image where the network takes some."""
    images: list[ProcessedImage] = []
    ids = torch.arange(30, 42)
    if model.architecture.vision:
        config = model.config.vision_config
        values = 3 * config.temporal_patch_size * config.patch_size**2
        pixels = torch.randn(16, values, generator=torch.Generator().manual_seed(0))
        images = [ProcessedImage("image", pixels.numpy(), (1, 4, 4), num_tokens=4)]
        ids = torch.cat([ids, torch.tensor([model.config.vision_start_token_id] + [model.image_token_id] * 4), ids])
    positions = mrope_positions(ids.numpy(), [i.grid_thw for i in images], model.image_token_id, model.merge_size)
    select = torch.ones(1, len(ids), dtype=torch.bool)
    vision = VisionBatch.build([images], "cpu")
    return model(ids[None], torch.from_numpy(positions)[:, None], None, select, vision)


def assert_same_tensors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def parameters(model: PolicyModel) -> dict[str, Tensor]:
    """Return copies of all parameters, gathered from all ranks where they are sharded."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def shard(model: PolicyModel, dtype: torch.dtype = torch.float32, offload: OffloadPolicy | None = None) -> None:
    """Shard block by block over all ranks, as the learner does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload or OffloadPolicy())
