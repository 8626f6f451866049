"""Terms that the memory estimates of both backends share: the plan, the result, and what a block keeps per token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.config.learner import Offload, Reshard
from trainer.learner.layout import Layout

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """How a training step runs.

    `tokens` and `patches` are the size of a micro-batch; an image of N tokens has 4 N patches. `recompute`, `reshard`
    and `offload` are the learner's options. A frozen weight takes `frozen_bytes`. A value in a computation takes
    `compute_bytes`: 2 in bfloat16, 4 in float32; with 4, activations count double, which is a little too high.
    With a `layout` the backend is Megatron, else FSDP2.
    """

    num_gpus: int = 1
    tokens: int = 4096
    patches: int = 4096
    recompute: float = 0.0
    reshard: Reshard = "auto"
    offload: Offload = "none"
    frozen_bytes: int = 4
    compute_bytes: int = 2
    layout: Layout | None = None

    @property
    def reshards(self) -> bool:
        """Whether gathered weights are freed between forward and backward."""
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
    gradients_stay: bool = False

    @property
    def between_steps(self) -> int:
        """What stays between steps; FSDP2 frees gradients, Megatron keeps their memory."""
        return self.weights + self.optimizer + (self.gradients if self.gradients_stay else 0)

    @property
    def total(self) -> int:
        """The sum, which is the most that a step needs."""
        whole = self.weights + self.gathered + self.gradients
        return whole + self.optimizer + self.activations + self.logits


@dataclass(frozen=True)
class BlockBytes:
    """Bytes that a block keeps per token for the gradient.

    - `norms`: inputs and outputs of its norms, with all columns of the hidden state.
    - `matrices`: what stands between its matrices, whose columns tensor-parallel ranks share.
    - `routed`: of a mixture, inputs and outputs of a token's experts, with all columns of the hidden state.
    - `experts`: what stands between the matrices of a token's experts.
    """

    norms: int
    matrices: int
    routed: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """What one rank keeps that shares nothing."""
        return self.norms + self.matrices + self.routed + self.experts


def decoder_block(config: Any) -> BlockBytes:
    """Return what a decoder block keeps per token, with the sizes of a text configuration.

    A norm keeps its input in float32, the factor of its weight, and its output, which the linear layers keep: 8 H bytes
    for hidden size H. Attention keeps queries, keys, values and its output. A gated MLP of size M keeps the outputs of
    both input layers, the activation and the product: 8 M bytes. Qwen3 norms queries and keys and does not keep their
    output. A token that k experts see is copied for each of them: input and output, 4 H bytes.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * size, config.num_key_value_heads * size
    attention = 4 * queries + 4 * keys
    if config.model_type.startswith("qwen3"):
        attention += 6 * (queries + keys)
    if experts := getattr(config, "num_experts_per_tok", 0):
        return BlockBytes(2 * 8 * hidden, attention, experts * 4 * hidden, experts * 8 * config.moe_intermediate_size)
    return BlockBytes(2 * 8 * hidden, attention + 8 * config.intermediate_size)


def vision_block(config: Any) -> BlockBytes:
    """Return what a block of the vision tower keeps per patch, with the sizes of a vision configuration.

    Qwen3-VL's layer norms keep input and output, its MLP keeps the input and the output of the activation; Qwen2.5-VL's
    norms and MLP are those of its decoder. Attention keeps queries, keys, values and its output, 2 C bytes each for
    hidden size C.
    """
    is_gated = config.model_type.startswith("qwen2_5")
    norm, mlp = (8, 8) if is_gated else (4, 4)
    return BlockBytes(2 * norm * config.hidden_size, 8 * config.hidden_size + mlp * config.intermediate_size)


def kept_bytes(block: int, block_input: int, count: int, recomputed_share: float) -> int:
    """Return what `count` blocks keep for the gradient; one that is recomputed keeps its input alone."""
    recomputed = int(recomputed_share * count)
    return (count - recomputed) * block + recomputed * block_input


def count_values(parameters: Iterable[Tensor]) -> int:
    """Return the number of values in some parameters."""
    return sum(parameter.numel() for parameter in parameters)


def divided(size: int, ranks: int) -> int:
    """Return the share of the rank with the most."""
    return -(-size // ranks)
