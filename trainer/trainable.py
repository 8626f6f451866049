"""Which parameters of a network are trained."""

from __future__ import annotations

import torch
from torch import nn

from agents.model import PolicyModel
from envs.errors import UserError


def freeze_vision(model: PolicyModel, dtype: torch.dtype | None = None) -> None:
    """Train the decoder alone: no gradient for the vision tower, its mergers included.

    `dtype` is what its weights are kept in; None leaves them. FSDP2 shards frozen weights of another dtype together
    with trained ones: only those with gradients must agree.

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
            parameter.data = parameter.data.to(dtype)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have gradients, shared ones once: what an optimizer is made for."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
