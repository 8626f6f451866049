"""Compares the learner's positions and log-probs with those of Transformers.

The positions are those of training samples, made by the same code as in a training step. The log-probs are compared
with the checkpoint as Transformers alone runs it: its own positions, attention and merging of images.

Legend: T tokens of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.model.policy import PolicyModel
from agents.types import ProcessedImage
from envs.checks import Verdict, fault, ok
from trainer.types import TrainingSample


def check_positions(samples: Sequence[TrainingSample], network: PolicyModel) -> Verdict:
    """Return whether positions equal those of `get_rope_index`; the network may be on the meta device."""
    for sample in samples:
        expected_3T = rope_index(sample, network)
        if np.array_equal(expected_3T, sample.positions_3T):
            continue
        place = int(np.flatnonzero((expected_3T != sample.positions_3T).any(0))[0])
        got = sample.positions_3T[:, place].tolist()
        found = f"token {place} stands at {got}, get_rope_index says {expected_3T[:, place].tolist()}"
        fix = "positions of a network with images are three: time, row, column (agents/model/mrope.py)"
        return fault(f"positions are not those of Transformers: {found}", fix)
    tokens = sum(len(sample.ids_T) for sample in samples)
    images = sum(len(sample.images) for sample in samples)
    return ok(f"{tokens} positions of {len(samples)} streams with {images} images are those of Transformers")


def rope_index(sample: TrainingSample, network: PolicyModel) -> NDArray[np.int64]:
    """Return Transformers' own positions of a stream, (3, T)."""
    # A language model's rotary embedding takes one position, here three times.
    if not network.architecture.vision:
        return np.broadcast_to(np.arange(len(sample.ids_T)), (3, len(sample.ids_T)))
    ids_1T = torch.from_numpy(sample.ids_T)[None]
    backbone: Any = network.backbone
    positions_31T, _ = backbone.model.get_rope_index(
        ids_1T,
        mm_token_type_ids=(ids_1T == network.image_token_id).int(),
        image_grid_thw=torch.tensor([image.grid_thw for image in sample.images]) if sample.images else None,
    )
    return positions_31T[:, 0].numpy()


@torch.no_grad()
def reference_logprobs(reference: Any, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
    """Return the log-prob of each id of a stream but the first, from Transformers' own forward."""
    ids_1T = torch.tensor([ids])
    inputs: dict[str, Any] = {}
    if images:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([image.pixels_PD for image in images]))
        inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in images])
        inputs["mm_token_type_ids"] = (ids_1T == reference.config.image_token_id).int()
    # In one row without padding or cache, as training never runs it.
    logits_TV = reference(input_ids=ids_1T, use_cache=False, **inputs).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0].numpy()
