"""Streams and routes of the tiny mixture of experts (`tests.tiny_models`).

Legend: T tokens, L layers, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.model.attention import Span
from agents.model.packed import PackedStreams
from agents.model.policy import PolicyModel
from agents.types import ProcessedImage

NUM_EXPERTS, TOP_K, NUM_LAYERS = 4, 2, 3
GRID = (1, 4, 6)


@dataclass(frozen=True, eq=False)
class Stream:
    ids: tuple[int, ...]
    images: tuple[ProcessedImage, ...]


def stream(model: PolicyModel, length: int, seed: int) -> Stream:
    """Return random text with an image in its middle."""
    rng = np.random.default_rng(seed)
    vision = model.config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = rng.normal(size=(GRID[1] * GRID[2], values)).astype(np.float32)
    image = ProcessedImage(f"image {seed}", pixels, GRID, GRID[1] * GRID[2] // 4)
    text = rng.integers(20, 300, length).tolist()
    half = length // 2
    return Stream((*text[:half], *[model.image_token_id] * image.num_tokens, *text[half:]), (image,))


def packed(model: PolicyModel, streams: Sequence[Stream], routes_TLK: Tensor | None = None) -> PackedStreams:
    """Return streams in one row, of which every token but the first is scored."""
    ends = np.cumsum([len(each.ids) for each in streams])
    spans = [Span(int(end) - len(each.ids), len(each.ids)) for each, end in zip(streams, ends, strict=True)]
    before = [np.arange(span.start, span.start + span.length - 1) for span in spans]
    batch = PackedStreams.build(
        ids_T=np.concatenate([each.ids for each in streams]),
        positions_3T=np.concatenate([model.positions(each.ids, each.images) for each in streams], axis=1),
        spans=spans,
        images=[each.images for each in streams],
        before_N=np.concatenate(before),
        targets_N=np.concatenate([each.ids[1:] for each in streams]),
        image_token_id=model.image_token_id,
        device="cpu",
        with_buckets=True,
    )
    return replace(batch, routes_TLK=routes_TLK)


def random_routes(num_tokens: int, seed: int) -> Tensor:
    """Return two different experts of each token in each layer."""
    rng = np.random.default_rng(seed)
    routes_TLE = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (num_tokens, NUM_LAYERS, 1)), axis=-1)
    return torch.from_numpy(routes_TLE[..., :TOP_K].astype(np.int16))


@torch.no_grad()
def routes_of_transformers(network: Any, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Tensor:
    """Return what the gates of a plain network choose for the tokens of one stream, (T, L, K)."""
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, output: chosen.append(output[2]))
        for layer in network.model.language_model.layers
    ]
    logits_of_transformers(network, ids, images)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


def logits_of_transformers(network: Any, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Tensor:
    """Return the (T, V) logits of a plain network for one stream, with its own positions and image features."""
    ids_1T = torch.tensor([ids])
    return network(
        input_ids=ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        use_cache=False,
        pixel_values=torch.from_numpy(np.concatenate([image.pixels_PD for image in images])),
        image_grid_thw=torch.tensor([image.grid_thw for image in images]),
        mm_token_type_ids=(ids_1T == network.config.image_token_id).int(),
    ).logits[0]
