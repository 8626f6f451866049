"""LoRA (arXiv 2106.09685) through peft: trains low-rank updates of linear layers, W + (alpha / rank) B A.

peft puts the adapter layers into the network without a wrapper around it, so all other code sees the same network.
Checkpoints and most engines see no adapters: `merged_weights` gives ordinary weights under ordinary names.
`packed_adapter` is for servers that take the adapters alone.

Legend: H inputs, O outputs of a linear layer, R rank.
"""

from __future__ import annotations

import base64
import hashlib
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agents.engines.weight_servers import Adapter, kinds_of
from agents.model.policy import PolicyModel
from envs.errors import UserError, did_you_mean
from trainer.config.learner import LearnerConfig

#: peft's name for all linear layers.
ALL_LINEAR = "all-linear"
_ADAPTER = "default"
_BASE = ".base_layer."


def add_lora(model: PolicyModel, config: LearnerConfig, seed: int = 0) -> None:
    """Add trainable float32 adapters to the network and freeze all other weights; its outputs stay the same.

    Only linear layers of the decoder get adapters: the vision tower, the fused experts of a mixture, its router, the
    embedding and the output layer stay as they are.

    The network may be on the meta device (`load_weights` then fills the adapters, from its own seed), but not sharded.

    Raises:
        UserError: peft is missing, or a target matches no linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError("--lora-rank", "needs the package peft", str(error), "pip install 'trueturn[lora]'") from error
    names = adapted_layers(model, config)
    # peft declares an integer, but uses only alpha / rank.
    options = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=names)  # type: ignore[arg-type]
    inject_adapter_in_model(options, model.backbone, adapter_name=_ADAPTER)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter(name))
            if is_adapter(name):
                # Steps of the optimizer are far smaller than the values: bfloat16 would round them away.
                parameter.data = parameter.data.float()
                if not parameter.is_meta:
                    parameter.copy_(initial_adapter(name, parameter.shape, seed))


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the network without adapters.

    >>> plain_name("layers.0.q_proj.base_layer.weight")
    'layers.0.q_proj.weight'
    """
    return name.replace(_BASE, ".")


def initial_adapter(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return an adapter's first value, float32, as peft draws it: A (R, H) uniform in +-1 / sqrt(H), B (O, R) zero.

    The value depends only on name and seed, so it is the same for every number of ranks.
    """
    value = torch.zeros(*shape, dtype=torch.float32)
    # With B = 0 the network begins as it is without adapters.
    if ".lora_B." in name:
        return value
    # Python's own hash of a string differs from process to process.
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=torch.Generator().manual_seed(number))


def merged_weights(
    model: nn.Module, whole: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter with its adapter merged in, under the name that it has without adapters.

    `whole` makes a full tensor of a parameter, for instance from its shards. It is called for one layer at a time, in
    the same order on all ranks. A weight with an adapter is W + (alpha / rank) B A, computed and returned in float32;
    any other weight is what `whole` returns. A network without adapters yields its own parameters.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        weight = whole(parameter)
        if name.endswith(f"{_BASE}weight"):
            layer = name.removesuffix(f"{_BASE}weight")
            a_RH, b_OR = (whole(parameters[f"{layer}.lora_{side}.{_ADAPTER}.weight"]) for side in "AB")
            module: Any = model.get_submodule(layer)
            # In float32, since the product is small beside the weight that it is added to.
            weight = torch.addmm(weight.float(), b_OR.float(), a_RH.float(), alpha=module.scaling[_ADAPTER])
        yield plain_name(name), weight


def packed_adapter(
    model: nn.Module, dtype: torch.dtype, whole: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> Adapter:
    """Return the adapters of all layers in `dtype`, as servers take them; `whole` is as for `merged_weights`.

    In the dtype that the network computes in, they are the values of its own forward. A merged weight is not: rounded
    to bfloat16, it loses every update below 1/512 of the weight.
    """
    tensors: dict[str, Tensor] = {}
    layers: list[str] = []
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            # Servers expect the names that peft gives a whole model.
            layer, side = name.removeprefix("backbone.").removesuffix(f".{_ADAPTER}.weight").rsplit(".", 1)
            tensors[f"base_model.model.{layer}.{side}.weight"] = whole(parameter).to("cpu", dtype, copy=True)
            layers += [layer] if side == "lora_A" else []
    module: Any = model.get_submodule(f"backbone.{layers[0]}")
    rank = module.r[_ADAPTER]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": module.scaling[_ADAPTER] * rank,
        "target_modules": list(kinds_of(layers)),
        "bias": "none",
    }
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    # As text, because servers take it in a request of JSON.
    return Adapter(config, base64.b64encode(pickle.dumps(tensors)).decode(), num_bytes, tuple(layers))


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off within the context: the network is then the reference policy of a KL penalty."""
    names = [name.split(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name]
    layers = [model.get_submodule(name) for name in names]
    try:
        _enable(layers, False)
        yield
    finally:
        _enable(layers, True)


def _enable(layers: Sequence[Any], enabled: bool) -> None:
    """Switch adapters on or off, and keep them trainable.

    peft freezes adapters that it switches off. But FSDP2 takes the dtype of gradients from the parameters that are
    trainable in the very first forward, which may be the reference policy's: it would find none.
    """
    for layer in layers:
        flags = {parameter: parameter.requires_grad for parameter in layer.parameters()}
        layer.enable_adapters(enabled)
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def adapted_layers(model: PolicyModel, config: LearnerConfig) -> list[str]:
    """Return the names of the decoder's linear layers that end with one of the targets, or all for "all-linear".

    Raises:
        UserError: a target matches no linear layer.
    """
    decoder = model.architecture.decoder(model.backbone)
    inside = {module for module in decoder.modules() if isinstance(module, nn.Linear)}
    linear = [name for name, module in model.backbone.named_modules() if module in inside]
    chosen: set[str] = set()
    for target in config.lora_targets or (ALL_LINEAR,):
        matched = [name for name in linear if target == ALL_LINEAR or f".{name}".endswith(f".{target}")]
        if not matched:
            known = {name.rsplit(".", 1)[-1] for name in linear}
            known = {ALL_LINEAR, *(name for name in known if not name.isdigit())}
            raise UserError("--lora-targets", "must end a linear layer's name", target, did_you_mean(target, known))
        chosen.update(matched)
    return [name for name in linear if name in chosen]
