"""Estimates the GPU memory of a training step from the network's shape, without running it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from agents.model.linear_logprobs import CHUNK_VALUES
from agents.model.policy import PolicyModel
from trainer.config.learner import LearnerConfig
from trainer.learner.lora import add_lora
from trainer.learner.sharding import freeze_vision, trainable_parameters
from trainer.learner.weights_io import empty_model, meta_model
from trainer.preflight.memory_megatron import estimate_megatron
from trainer.preflight.memory_terms import (
    GIB,
    MemoryEstimate,
    Plan,
    count_values,
    decoder_block,
    divided,
    kept_bytes,
    vision_block,
)
from trainer.preflight.qwen3_vl import QWEN3_VL, qwen3_vl_config

_COLUMNS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "total")


@dataclass(frozen=True)
class Parameters:
    """Counts of a network's parameters. FSDP shards and gathers each unit as a whole; the root is everything else.

    Example, Qwen3-VL-2B trained in full: 2,127,532,032 trained, 0 frozen, 406,957,312 in the largest unit, its tower.
    """

    trained: int
    frozen: int
    units: int
    largest_unit: int
    next_unit: int
    largest_trained_unit: int
    root: int
    trained_root: int

    @classmethod
    def of(cls, model: PolicyModel) -> Parameters:
        """Count the parameters of a network, also on the meta device; those with `requires_grad` are trained."""
        every = [count_values(unit.parameters()) for unit in model.units]
        trained = [count_values(trainable_parameters(unit)) for unit in model.units]
        total, total_trained = count_values(model.parameters()), count_values(trainable_parameters(model))
        largest, following = sorted(every, reverse=True)[:2]
        return cls(
            trained=total_trained,
            frozen=total - total_trained,
            units=sum(every),
            largest_unit=largest,
            next_unit=following,
            largest_trained_unit=max(trained),
            root=total - sum(every),
            trained_root=total_trained - sum(trained),
        )


class MetaNetworks:
    """A checkpoint's network on the meta device, as each learner configuration trains it; each is made once."""

    def __init__(self, network: PolicyModel) -> None:
        self.network = network
        self.num_parameters = count_values(network.parameters())
        self._made: dict[object, PolicyModel] = {(False, 0, ()): network}

    def trained(self, learner: LearnerConfig) -> PolicyModel:
        """Return the network as this configuration trains it: `requires_grad` is set, adapters are added."""
        key = (learner.freeze_vision, learner.lora_rank, learner.lora_targets)
        if key not in self._made:
            model = self._made[key] = meta_model(self.network.config)
            if learner.freeze_vision and model.architecture.vision:
                freeze_vision(model)
            if learner.lora_rank:
                add_lora(model, learner)
        return self._made[key]


def estimate(model: PolicyModel, plan: Plan) -> MemoryEstimate:
    """Return the memory that a training step of this network needs; the network may be on the meta device.

    An offloaded optimizer counts only if its step needs more memory than forward and backward.
    """
    if plan.layout is not None:
        return estimate_megatron(model, plan)
    count, n = Parameters.of(model), plan.num_gpus
    weights = divided(4 * count.trained + plan.frozen_bytes * count.frozen, n)
    sharded_gradients, optimizer = divided(4 * count.trained, n), divided(8 * count.trained, n)
    # While one unit is used, the next one is gathered.
    size = plan.compute_bytes
    gathered = size * (count.root + (count.largest_unit + count.next_unit if plan.reshards else count.units))
    # Gradients have the compute dtype; ranks sum a float32 copy of one unit at a time, or of all units.
    whole = size * (count.trained_root + count.largest_trained_unit)
    whole += 4 * (count.trained if plan.reshard == "never" else max(count.trained_root, count.largest_trained_unit))
    activations, logits = _activations(model, plan), _logits(model, plan)
    if plan.offload == "all":
        weights, sharded_gradients, optimizer = 0, 0, 0
    elif plan.offload == "optimizer":
        optimizer = max(0, optimizer - gathered - whole - activations - logits)
    return MemoryEstimate(weights, gathered, sharded_gradients + whole, optimizer, activations, logits)


def empty_network(name: str) -> PolicyModel:
    """Return the network of a checkpoint folder, hub id or name of `QWEN3_VL` on the meta device."""
    if name in QWEN3_VL and not Path(name).exists():
        return meta_model(qwen3_vl_config(name))
    return meta_model(empty_model(name).config)


def memory_table(networks: MetaNetworks, plan: Plan, lora_rank: int, memory_gib: float) -> str:
    """Return a line in GiB for each choice of what to train and recompute that the network allows."""
    choices = {"all": LearnerConfig()}
    if networks.network.architecture.vision:
        choices["no vision"] = LearnerConfig(freeze_vision=True)
    if importlib.util.find_spec("peft"):
        choices["LoRA"] = LearnerConfig(lora_rank=lora_rank)
    lines = [f"{'trained':<10} {'recomputed':>10} " + " ".join(f"{name:>11}" for name in _COLUMNS) + "  fits"]
    for trained, learner in choices.items():
        for recompute in (0.0, 0.5, 1.0):
            found = estimate(networks.trained(learner), replace(plan, recompute=recompute))
            fits = "yes" if found.total <= memory_gib * GIB else "no"
            cells = " ".join(f"{getattr(found, name) / GIB:>11.1f}" for name in _COLUMNS)
            lines.append(f"{trained:<10} {recompute:>10.0%} {cells}  {fits}")
    return "\n".join(lines)


def _activations(model: PolicyModel, plan: Plan) -> int:
    """Return the bytes of all blocks' activations, and of one block more: the one whose gradient is being computed."""
    text = model.config.get_text_config()
    parts = [(decoder_block(text).total * plan.tokens, 2 * text.hidden_size * plan.tokens, text.num_hidden_layers)]
    tower = model.architecture.vision_tower(model.backbone)
    if tower is not None and any(parameter.requires_grad for parameter in tower.parameters()):
        vision = tower.config
        block = vision_block(vision).total * plan.patches
        parts.append((block, 2 * vision.hidden_size * plan.patches, len(tower.blocks)))
    kept = sum(kept_bytes(*part, plan.recompute) for part in parts)
    return (kept + max(block for block, *_ in parts)) * plan.compute_bytes // 2


def _logits(model: PolicyModel, plan: Plan) -> int:
    """Return the bytes of one chunk of logits in float32, its gradient in float32 and in the compute dtype, and the
    output layer's gradient in float32.
    """
    weight = model.backbone.lm_head.weight  # type: ignore[union-attr]
    chunk = min(CHUNK_VALUES, plan.tokens * weight.shape[0])  # type: ignore[operator,index]
    return (8 + plan.compute_bytes) * chunk + (4 * weight.numel() if weight.requires_grad else 0)  # type: ignore[operator,union-attr]
