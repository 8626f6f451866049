"""Estimates the GPU memory of a training step with FSDP2 from the network's shape, without running it.

Parameters are counted on the meta device. Blocks keep what autograd keeps for the gradient; compiled blocks keep
`COMPILED_SHARE` of it, the one constant that is measured. Megatron's memory is not predicted.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from agents.model.linear_logprobs import CHUNK_VALUES
from agents.model.policy import PolicyModel
from agents.model.state_plan import CHUNK
from trainer.config.learner import LearnerConfig, Offload, Reshard
from trainer.learner.lora import add_lora
from trainer.learner.sharding import freeze_vision, trainable_parameters
from trainer.learner.weights_io import empty_model, meta_model
from trainer.planning.qwen3_vl import QWEN3_VL, qwen3_vl_config

GIB = 2**30
#: Compiled blocks keep this share of the activations: the 2B shape on one and two H100s, 16,384 tokens a micro-batch
#: (scaling_backends.json and learner_2b.json of benchmarks/results).
COMPILED_SHARE = 0.38
#: Rank of the adapters in the table: it hardly changes the memory.
LORA_RANK = 32
_COLUMNS = ("weights", "gathered", "gradients", "optimizer", "activations", "logits", "total")


@dataclass(frozen=True)
class Plan:
    """How a training step runs.

    `tokens` and `patches` are the size of a micro-batch; an image of N tokens has 4 N patches. `recompute`, `reshard`
    and `offload` are the learner's options. A frozen weight takes `frozen_bytes`. A value in a computation takes
    `compute_bytes`: 2 in bfloat16, 4 in float32; with 4, activations count double, which is a little too high.
    """

    num_gpus: int = 1
    tokens: int = 4096
    patches: int = 4096
    recompute: float = 0.0
    reshard: Reshard = "auto"
    offload: Offload = "none"
    frozen_bytes: int = 4
    compute_bytes: int = 2
    is_compiled: bool = False

    @property
    def reshards(self) -> bool:
        """Whether gathered weights are freed between forward and backward."""
        # One rank holds every unit whole anyway.
        return self.reshard == "always" or (self.reshard == "auto" and self.num_gpus > 1)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU.

    `gathered` counts the weights of the units in use, in the compute dtype, `optimizer` Adam's two moments.
    `gradients` counts the sharded float32 gradients, and those of one unit and the root before ranks sum them.
    """

    weights: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def between_steps(self) -> int:
        """What stays between steps."""
        return self.weights + self.optimizer

    @property
    def total(self) -> int:
        """The sum, which is the most that a step needs."""
        state = self.between_steps + self.gradients
        return state + self.gathered + self.activations + self.logits


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
        units = [count_values(unit.parameters()) for unit in model.units]
        trained_units = [count_values(trainable_parameters(unit)) for unit in model.units]
        total = count_values(model.parameters())
        trained = count_values(trainable_parameters(model))
        largest, following = sorted(units, reverse=True)[:2]
        return cls(
            trained=trained,
            frozen=total - trained,
            units=sum(units),
            largest_unit=largest,
            next_unit=following,
            largest_trained_unit=max(trained_units),
            root=total - sum(units),
            trained_root=trained - sum(trained_units),
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
            model = meta_model(self.network.config)
            if learner.freeze_vision and model.architecture.vision:
                freeze_vision(model)
            if learner.lora_rank:
                add_lora(model, learner)
            self._made[key] = model
        return self._made[key]


def estimate(model: PolicyModel, plan: Plan) -> MemoryEstimate:
    """Return the memory that a training step of this network needs; the network may be on the meta device.

    An offloaded optimizer counts only if its step needs more memory than forward and backward.
    """
    count = Parameters.of(model)
    size = plan.compute_bytes
    # Trained weights are float32: bfloat16 would swallow small updates.
    weights = _share(4 * count.trained + plan.frozen_bytes * count.frozen, plan.num_gpus)
    gradients = _share(4 * count.trained, plan.num_gpus)
    optimizer = _share(8 * count.trained, plan.num_gpus)
    # While one unit is used, the next one is gathered.
    if plan.reshards:
        units = count.largest_unit + count.next_unit
    else:
        units = count.units
    gathered = size * (count.root + units)
    # Gradients have the compute dtype; ranks sum a float32 copy of one unit at a time, or of all units.
    if plan.reshard == "never":
        summed = count.trained
    else:
        summed = max(count.trained_root, count.largest_trained_unit)
    whole = size * (count.trained_root + count.largest_trained_unit) + 4 * summed
    activations = _activations(model, plan)
    logits = _logits(model, plan)
    # FSDP moves a unit to the GPU only while it runs.
    if plan.offload == "all":
        weights = gradients = optimizer = 0
    elif plan.offload == "optimizer":
        optimizer = max(0, optimizer - gathered - whole - activations - logits)
    return MemoryEstimate(weights, gathered, gradients + whole, optimizer, activations, logits)


def empty_network(name: str) -> PolicyModel:
    """Return the network of a checkpoint folder, hub id or name of `QWEN3_VL` on the meta device."""
    if name in QWEN3_VL and not Path(name).exists():
        return meta_model(qwen3_vl_config(name))
    return meta_model(empty_model(name).config)


def memory_table(networks: MetaNetworks, plan: Plan, memory_gib: float) -> str:
    """Return a line in GiB for each choice of what to train and recompute that the network allows."""
    choices = {"all": LearnerConfig()}
    if networks.network.architecture.vision:
        choices["no vision"] = LearnerConfig(freeze_vision=True)
    # A row that cannot be trained here would mislead.
    if importlib.util.find_spec("peft"):
        choices["LoRA"] = LearnerConfig(lora_rank=LORA_RANK)
    lines = [f"{'trained':<10} {'recomputed':>10} " + " ".join(f"{name:>11}" for name in _COLUMNS) + "  fits"]
    for trained, learner in choices.items():
        # Enough to see the trade; the flag takes any share.
        for recompute in (0.0, 0.5, 1.0):
            found = estimate(networks.trained(learner), replace(plan, recompute=recompute))
            if found.total <= memory_gib * GIB:
                fits = "yes"
            else:
                fits = "no"
            cells = " ".join(f"{getattr(found, name) / GIB:>11.1f}" for name in _COLUMNS)
            lines.append(f"{trained:<10} {recompute:>10.0%} {cells}  {fits}")
    return "\n".join(lines)


def _activations(model: PolicyModel, plan: Plan) -> int:
    """Return the bytes of all blocks' activations, and of one block more: the one whose gradient is being computed.

    A block that is recomputed keeps its input alone.
    """
    text = model.config.get_text_config()
    states = num_state_layers(text)
    parts = [(decoder_block(text), text.hidden_size, plan.tokens, text.num_hidden_layers - states)]
    if states:
        parts.append((state_block(text), text.hidden_size, plan.tokens, states))
    tower = model.architecture.vision_tower(model.backbone)
    if tower is not None and any(parameter.requires_grad for parameter in tower.parameters()):
        parts.append((vision_block(tower.config), tower.config.hidden_size, plan.patches, len(tower.blocks)))
    share = COMPILED_SHARE if plan.is_compiled else 1.0
    kept = 0
    largest = 0
    for block, hidden, rows, num_blocks in parts:
        # As the learner rounds it.
        recomputed = int(plan.recompute * num_blocks)
        kept += (num_blocks - recomputed) * int(share * block * rows) + recomputed * 2 * hidden * rows
        largest = max(largest, int(share * block * rows))
    if states:  # in float32 whatever the network computes in, and always recomputed
        largest += 2 * state_rule(text) * plan.tokens // plan.compute_bytes
    return (kept + largest) * plan.compute_bytes // 2


def decoder_block(config: Any) -> int:
    """Return the bytes that a decoder block keeps per token, with the sizes of a text configuration.

    A norm keeps its input in float32, the factor of its weight, and its output, which the linear layers keep: 8 H bytes
    for hidden size H. Attention keeps queries, keys, values and its output. A gated MLP of size M keeps the outputs of
    both input layers, the activation and the product: 8 M bytes. Qwen3 norms queries and keys and does not keep their
    output. GLM-4.1V norms what attention and MLP give too, and does not keep these outputs: 12 H bytes. A token that k
    experts see is copied for each of them: input and output, 4 H bytes. Qwen3.5's norms keep input and output in
    float32, and its attention the gate and what it lets through.
    """
    queries = config.num_attention_heads * head_size(config)
    queries_and_keys = queries + config.num_key_value_heads * head_size(config)
    if num_state_layers(config):
        attention = 12 * queries_and_keys + 4 * queries
    elif config.model_type.startswith("qwen3"):
        attention = 10 * queries_and_keys
    else:
        attention = 4 * queries_and_keys
    return attention + _norms_and_mlp(config)


def state_block(config: Any) -> int:
    """Return the bytes that a block with a state layer keeps per token: the inputs of the convolution, the gated norm.

    What lies between them is computed again in the backward pass, one layer after the other: `state_rule`.
    """
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return 2 * state_channels(config) + 18 * values + _norms_and_mlp(config)


def state_rule(config: Any) -> int:
    """Return the bytes per token that one state layer takes while its gradient is computed, in float32.

    For each head: nine times its keys and five times its values, five products of a token with its chunk of 64, and
    three times the state of each chunk.
    """
    key = config.linear_key_head_dim
    value = config.linear_value_head_dim
    head = 36 * key + 20 * value + 20 * CHUNK + 12 * key * value // CHUNK
    return config.linear_num_value_heads * head + 4 * state_channels(config)


def num_state_layers(config: Any) -> int:
    """Return how many layers of a text configuration carry states in place of attention."""
    return (getattr(config, "layer_types", None) or []).count("linear_attention")


def state_channels(config: Any) -> int:
    """Return how many values a token the convolution of a state layer takes: queries, keys and values."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return keys + config.linear_num_value_heads * config.linear_value_head_dim


def _norms_and_mlp(config: Any) -> int:
    hidden = config.hidden_size
    if num_state_layers(config):
        norms = 20 * hidden
    elif config.model_type.startswith("glm4v"):
        norms = 28 * hidden
    else:
        norms = 16 * hidden
    if experts := getattr(config, "num_experts_per_tok", 0):
        mlp = experts * (4 * hidden + 8 * config.moe_intermediate_size)
    else:
        mlp = 8 * config.intermediate_size
    if shared := getattr(config, "shared_expert_intermediate_size", 0):
        mlp += 8 * shared + 2 * hidden
    return norms + mlp


def head_size(config: Any) -> int:
    """Return the width of an attention head, with the sizes of a text configuration."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def vision_block(config: Any) -> int:
    """Return the bytes that a block of the vision tower keeps per patch, with the sizes of a vision configuration.

    Qwen3-VL's layer norms keep input and output, its MLP keeps the input and the output of the activation; Qwen2.5-VL's
    norms and MLP are those of its decoder. GLM-4.1V's are too; its MLP is as wide as the decoder. Attention keeps
    queries, keys, values and its output, 2 C bytes each for hidden size C.
    """
    if config.model_type.startswith("qwen2_5"):
        return 24 * config.hidden_size + 8 * config.intermediate_size
    if config.model_type.startswith("glm4v"):
        return 24 * config.hidden_size + 8 * config.out_hidden_size
    return 16 * config.hidden_size + 4 * config.intermediate_size


def count_values(parameters: Iterable[Tensor]) -> int:
    """Return the number of values in some parameters."""
    return sum(parameter.numel() for parameter in parameters)


def _share(size: int, ranks: int) -> int:
    """Return what the rank with the most holds."""
    return -(-size // ranks)


def _logits(model: PolicyModel, plan: Plan) -> int:
    """Return the bytes of one chunk of logits in float32, its gradient in float32 and in the compute dtype, and the
    output layer's gradient in float32.
    """
    weight: Any = model.backbone.lm_head.weight  # type: ignore[union-attr]
    chunk = min(CHUNK_VALUES, plan.tokens * weight.shape[0])
    # Summed in float32 over all chunks.
    if weight.requires_grad:
        gradient = 4 * weight.numel()
    else:
        gradient = 0
    return (8 + plan.compute_bytes) * chunk + gradient
