"""Counts what a network computes and reads: operations of a forward pass, bytes of a decode step and of its cache.

Norms, activations and the softmax are not counted, as is usual (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a network that cost time. `dense` are the entries of the decoder's matrices that every token uses,
    `experts` those of all experts, of which a token uses `expert_share`; `head` those of the output layer.

    Example, Qwen3-VL-2B: 2,127,532,032 parameters, 1,409,286,144 dense, no experts, a head of 311,164,928; its cache
    holds 57,344 values a token.
    """

    parameters: int
    dense: int
    experts: int
    expert_share: float
    head: int
    layers: int
    attention_width: int
    kv_heads: int
    head_size: int
    patch_flops: float
    patches_per_token: int

    @classmethod
    def of(cls, config: Any, parameters: int) -> ModelShape:
        """Count the network of a Transformers configuration that has so many parameters."""
        text = config.get_text_config()
        vision = getattr(config, "vision_config", None)
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        num_experts = getattr(text, "num_experts", 0) or 0
        if num_experts:
            expert = 3 * text.hidden_size * getattr(text, "moe_intermediate_size", 0)
        else:
            expert = 0
        if vision:
            patches = vision.spatial_merge_size**2
        else:
            patches = 0
        return cls(
            parameters=parameters,
            dense=decoder_weights(text, size) + text.num_hidden_layers * text.hidden_size * num_experts,
            experts=text.num_hidden_layers * num_experts * expert,
            expert_share=text.num_experts_per_tok / num_experts if num_experts else 0.0,
            head=text.hidden_size * text.vocab_size,
            layers=text.num_hidden_layers,
            attention_width=text.num_attention_heads * size,
            kv_heads=text.num_key_value_heads,
            head_size=size,
            patch_flops=vision_flops(vision, [(1, 2, 2)])[0] / 4 if vision and hasattr(vision, "depth") else 0.0,
            patches_per_token=patches,
        )

    @property
    def active(self) -> float:
        """Entries of the decoder's matrices that one token uses."""
        return self.dense + self.experts * self.expert_share

    @property
    def cache_values(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def read_flops(self, tokens: float, pairs: float, images: float) -> float:
        """Return the operations to read tokens, of which `pairs` see each other and `images` are of images."""
        attention = 4 * pairs * self.attention_width * self.layers
        return 2 * tokens * self.active + attention + images * self.patches_per_token * self.patch_flops

    def head_flops(self, tokens: float) -> float:
        """Return the operations of the output layer on so many tokens."""
        return 2 * tokens * self.head

    def decode_values(self, rows: float) -> float:
        """Return the weights that a decode step of so many rows reads: of the experts those that any row uses.

        Example: with 8 of 128 experts a token, 1 row reads 6 % of them, 64 rows 98 %.
        """
        return self.dense + self.head + self.experts * (1 - (1 - self.expert_share) ** rows)


def triangle(length: float) -> float:
    """Return how many pairs of a stream's tokens see each other, every token itself too."""
    return length * (length + 1) / 2


def decoder_weights(text: Any, head_size: int) -> int:
    """Return the entries of the decoder's matrices; embedding, output layer and experts are left out."""
    queries = text.num_attention_heads * head_size
    keys = text.num_key_value_heads * head_size
    if getattr(text, "num_experts", 0):
        mlp = 0
    else:
        mlp = 3 * text.hidden_size * text.intermediate_size
    return text.num_hidden_layers * (text.hidden_size * (2 * queries + 2 * keys) + mlp)


def vision_flops(vision: Any, grids: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return the operations of the tower's matrices, mergers included, and of its attention inside each frame."""
    patches = sum(time * height * width for time, height, width in grids)
    pairs = sum(time * (height * width) ** 2 for time, height, width in grids)
    width = vision.hidden_size
    merged = vision.hidden_size * vision.spatial_merge_size**2
    embed = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width
    block = 4 * width**2 + 2 * width * vision.intermediate_size
    merger = merged**2 + merged * vision.out_hidden_size
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    per_patch = embed + vision.depth * block
    linear = 2 * patches * per_patch + 2 * patches // vision.spatial_merge_size**2 * mergers * merger
    return linear, 4 * pairs * width * vision.depth
