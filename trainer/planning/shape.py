"""Counts what a network computes and reads: operations of a forward pass, bytes of a decode step and of its cache.

Norms, activations and the softmax are not counted, as is usual (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agents.model.policy import PolicyModel
from agents.model.state_plan import CHUNK
from trainer.planning.memory import count_values, head_size, num_state_layers, state_channels


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a network that cost time. `dense` are the entries of the decoder's matrices that every token uses,
    `experts` those of all experts, of which a token uses `expert_share`; `head` those of the output layer.

    Example, Qwen3-VL-2B: 2,127,532,032 parameters, 1,409,286,144 dense, no experts, a head of 311,164,928; its cache
    holds 57,344 values a token. `state_flops` are the operations that a token's states cost, all layers together; what
    a server keeps them in is not counted.
    """

    parameters: int
    dense: int
    experts: int
    expert_share: float
    head: int
    attention_values: int
    cache_values: int
    kv_heads: int
    image_token_flops: float
    state_flops: int = 0

    @classmethod
    def of(cls, network: PolicyModel) -> ModelShape:
        """Count a network, which may be on the meta device."""
        text = network.config.get_text_config()
        layers = text.num_hidden_layers
        attention_layers = layers - num_state_layers(text)
        size = head_size(text)
        dense = decoder_weights(text)
        experts = 0
        expert_share = 0.0
        if num_experts := getattr(text, "num_experts", 0):
            dense += layers * text.hidden_size * num_experts  # the router
            dense += layers * 3 * text.hidden_size * getattr(text, "shared_expert_intermediate_size", 0)
            experts = layers * num_experts * 3 * text.hidden_size * text.moe_intermediate_size
            expert_share = text.num_experts_per_tok / num_experts
        # Towers of other families have no `depth`; their images are not counted.
        vision = getattr(network.config, "vision_config", None)
        if hasattr(vision, "depth"):
            # Four patches are a token of Qwen's towers.
            image_token_flops = float(vision_flops(vision, [(1, 2, 2)])[0])
        else:
            image_token_flops = 0.0
        return cls(
            parameters=count_values(network.parameters()),
            dense=dense,
            experts=experts,
            expert_share=expert_share,
            head=text.hidden_size * text.vocab_size,
            attention_values=attention_layers * text.num_attention_heads * size,
            cache_values=2 * attention_layers * text.num_key_value_heads * size,
            kv_heads=text.num_key_value_heads,
            image_token_flops=image_token_flops,
            state_flops=state_flops(text),
        )

    def read_flops(self, tokens: float, pairs: float, images: float) -> float:
        """Return the operations to read tokens, of which `pairs` see each other and `images` are of images."""
        # Of the experts a token uses a share; their weights are all in memory.
        active = self.dense + self.experts * self.expert_share
        own = 2 * active + self.state_flops
        return tokens * own + 4 * pairs * self.attention_values + images * self.image_token_flops

    def decode_values(self, rows: float) -> float:
        """Return the weights that a decode step of so many rows reads: of the experts those that any row uses.

        Example: with 8 of 128 experts a token, 1 row reads 6 % of them, 64 rows 98 %.
        """
        return self.dense + self.head + self.experts * (1 - (1 - self.expert_share) ** rows)


def triangle(length: float) -> float:
    """Return how many pairs of a stream's tokens see each other, every token itself too."""
    return length * (length + 1) / 2


def decoder_weights(text: Any) -> int:
    """Return the entries of the decoder's matrices; embedding, output layer and experts are left out."""
    # Grouped-query attention has fewer keys and values than queries.
    queries = text.num_attention_heads * head_size(text)
    keys = text.num_key_value_heads * head_size(text)
    if getattr(text, "num_experts", 0):
        mlp = 0
    else:
        mlp = 3 * text.hidden_size * text.intermediate_size
    attention = 2 * queries + 2 * keys
    states = num_state_layers(text)
    total = text.num_hidden_layers * mlp
    if states:
        attention += queries  # a gate for each value
        values = text.linear_num_value_heads * text.linear_value_head_dim
        # What the convolution takes, the gate of the values, the output; and two numbers for each head.
        outputs = state_channels(text) + 2 * values + 2 * text.linear_num_value_heads
        total += states * text.hidden_size * outputs
    return total + (text.num_hidden_layers - states) * text.hidden_size * attention


def state_flops(text: Any) -> int:
    """Return the operations of all state layers for a token: products within its chunk of 64, and with the states.

    Keys with keys and queries, the triangular system, what is read of the chunk; for the state it is read twice and
    written once.
    """
    states = num_state_layers(text)
    if not states:
        return 0
    key = text.linear_key_head_dim
    value = text.linear_value_head_dim
    head = 4 * CHUNK * key + CHUNK * (key + value) + 2 * CHUNK * value + 6 * key * value
    return states * text.linear_num_value_heads * head


def _tower_weights(vision: Any) -> tuple[int, int]:
    """Return the entries of the matrices of a block's MLP, and of a merger."""
    width = vision.hidden_size
    outer = vision.out_hidden_size
    inner = vision.intermediate_size
    merged = width * vision.spatial_merge_size**2
    # GLM-4.1V: gated MLPs in blocks and merger, which alone has the intermediate size.
    if vision.model_type.startswith("glm4v"):
        return 3 * width * outer, merged * outer + outer**2 + 3 * outer * inner
    return 2 * width * inner, merged**2 + merged * outer


def vision_flops(vision: Any, grids: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return the operations of the tower's matrices, mergers included, and of its attention inside each frame."""
    patches = sum(time * height * width for time, height, width in grids)
    pairs = sum(time * (height * width) ** 2 for time, height, width in grids)
    width = vision.hidden_size
    embed = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width
    mlp, merger = _tower_weights(vision)
    block = 4 * width**2 + mlp
    # DeepStack merges the output of further layers too.
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    per_patch = embed + vision.depth * block
    linear = 2 * patches * per_patch + 2 * patches // vision.spatial_merge_size**2 * mergers * merger
    return linear, 4 * pairs * width * vision.depth
