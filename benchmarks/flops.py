"""Floating-point operations of a forward pass, counted from a network's configuration: no network needed.

In: a configuration with a vision tower, and training samples. Out: multiplications and additions of its matrix products
by part. Norms, activations and the softmax are not counted, as is usual (PaLM, arXiv 2204.02311, appendix B). A
training step needs three times a forward; what recomputation adds is not needed and not counted.

Legend: T tokens of a stream, P patches of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.planning.memory import num_state_layers
from trainer.planning.shape import decoder_weights, state_flops, triangle, vision_flops
from trainer.types import TrainingSample

#: A forward, and twice that for the gradients of inputs and of weights.
TRAINING_FACTOR = 3


@dataclass(frozen=True)
class Flops:
    """Operations of a forward pass. `tokens` and `images` are how many the network is run over.

    Example: with one layer of width 64, 4 heads of 16 and no MLP, a stream of 3 tokens has 6 pairs of tokens that see
    each other, and 4 * 6 * 64 = 1,536 operations of `attention`.
    """

    tokens: int
    images: int
    body: int
    attention: int
    head: int
    vision: int
    vision_attention: int
    experts: int = 0

    @property
    def total(self) -> int:
        """All parts of one forward pass."""
        return self.body + self.attention + self.head + self.vision + self.vision_attention + self.experts


def forward_flops(config: Any, samples: Sequence[TrainingSample], shared: bool) -> Flops:
    """Count what the log-probs of the samples' model tokens need.

    `shared`: samples with one prompt run through it once, and each different image is encoded once; otherwise every
    stream stands alone with its own images. Attention counts the pairs that the causal mask leaves, exactly.
    """
    text = config.text_config
    tokens = pairs = 0
    grids: list[tuple[int, int, int]] = []
    prompts: set[object] = set()
    digests: set[str] = set()
    for sample in samples:
        length, prefix = len(sample.ids_T), sample.prefix_length
        key = (sample.ids_T[:prefix].tobytes(), tuple(i.digest for i in sample.images[: sample.num_prefix_images]))
        known = prefix if shared and key in prompts else 0
        prompts.add(key)
        tokens += length - known
        pairs += triangle(length) - triangle(known)
        for image in sample.images:
            if not (shared and image.digest in digests):
                grids.append(image.grid_thw)
            digests.add(image.digest)
    attention_layers = text.num_hidden_layers - num_state_layers(text)
    chosen = sum(int(sample.mask_T.sum()) for sample in samples)
    vision, vision_attention = vision_flops(config.vision_config, grids)
    return Flops(
        tokens=tokens,
        images=len(grids),
        body=tokens * (2 * decoder_weights(text) + state_flops(text)),
        attention=4 * pairs * text.num_attention_heads * text.head_dim * attention_layers,
        head=2 * chosen * text.hidden_size * text.vocab_size,
        vision=vision,
        vision_attention=vision_attention,
        experts=2 * tokens * active_experts(text),
    )


def active_experts(text: Any) -> int:
    """Return the entries of a mixture's matrices that a token uses: its experts, a shared one, and the router."""
    experts = getattr(text, "num_experts", 0)
    if not experts:
        return 0
    shared = getattr(text, "shared_expert_intermediate_size", 0)
    width = experts + 3 * (text.num_experts_per_tok * text.moe_intermediate_size + shared)
    return text.num_hidden_layers * text.hidden_size * width
