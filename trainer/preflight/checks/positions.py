"""Compares the learner's positions and log-probs with those of Transformers.

The positions are those of training samples, made by the same code as in a training step. The log-probs are compared
with the checkpoint as Transformers alone runs it: its own positions, attention and merging of images.

Legend: T tokens of a stream, N chosen tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.model.policy import PolicyModel
from agents.rendering.renderer import Rendered
from envs.checks import Verdict, fault, ok, warning
from trainer.types import TrainingSample


@dataclass(frozen=True)
class GapLimits:
    """Limits of the mean |d| in nats over the text of a stream: above them it is suspicious, or a different path."""

    suspicious: float
    different: float


#: By the dtype that the learner computes in. With 2B parameters in bfloat16, another engine differs by 0.005.
LIMITS = {"float32": GapLimits(1e-3, 1e-2), "bfloat16": GapLimits(0.05, 0.2)}


def check_positions(samples: Sequence[TrainingSample], network: PolicyModel) -> Verdict:
    """Return whether positions equal those of `get_rope_index`; the network may be on the meta device."""
    tokens = images = 0
    for sample in samples:
        expected_3T = rope_index(sample, network)
        tokens = tokens + len(sample.ids_T)
        images = images + len(sample.images)
        if np.array_equal(expected_3T, sample.positions_3T):
            continue
        place = int(np.flatnonzero((expected_3T != sample.positions_3T).any(0))[0])
        got = sample.positions_3T[:, place].tolist()
        wanted = expected_3T[:, place].tolist()
        is_flat = bool((sample.positions_3T == np.arange(len(sample.ids_T))).all())
        if is_flat:
            what = "are flat, with no rows and columns for images"
        else:
            what = "are not those of Transformers"
        found = f"positions {what}: token {place} stands at {got}, get_rope_index says {wanted}"
        return fault(found, "positions of a network with images are three: time, row, column (agents/model/mrope.py)")
    return ok(f"{tokens} positions of {len(samples)} streams with {images} images are those of Transformers")


def rope_index(sample: TrainingSample, network: PolicyModel) -> NDArray[np.int64]:
    """Return Transformers' own positions of a stream, (3, T)."""
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


def load_reference(network: PolicyModel, path: Any) -> Any:
    """Return the checkpoint as Transformers loads and runs it, in float32 on the CPU; `network` is of its kind."""
    return network.architecture.read(path, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def reference_logprobs(reference: Any, stream: Rendered) -> NDArray[np.float32]:
    """Return the log-prob of each id of a stream but the first, from Transformers' own forward."""
    ids_1T = torch.tensor([stream.ids])
    inputs: dict[str, Any] = {}
    if stream.images:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([image.pixels_PD for image in stream.images]))
        inputs["image_grid_thw"] = torch.tensor([image.grid_thw for image in stream.images])
        inputs["mm_token_type_ids"] = (ids_1T == reference.config.image_token_id).int()
    logits_TV = reference(input_ids=ids_1T, use_cache=False, **inputs).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0].numpy()


def text_places(ids: Sequence[int], image_token_id: int) -> NDArray[np.int64]:
    """Return the indices of the text tokens among the log-probs of a stream."""
    return np.flatnonzero(np.asarray(ids)[1:] != image_token_id)


def check_scores(
    own: Sequence[NDArray[np.float32]], expected: Sequence[NDArray[np.float32]], dtype: str, whose: str
) -> Verdict:
    """Return whether log-probs of the text of some streams equal the expected ones, which are `whose`."""
    gaps_N = np.abs(np.concatenate(own) - np.concatenate(expected))
    if np.isfinite(gaps_N).all():
        mean = float(gaps_N.mean())
    else:
        mean = np.inf
    gap = f"{mean:.2g} nats off {whose} on average, {gaps_N.max():.2g} at most"
    found = f"log-probs of {len(gaps_N)} text tokens are {gap}"
    limits = LIMITS[dtype]
    fix = "look at positions, weights and image preprocessing"
    if mean > limits.different:
        return fault(found, fix)
    if mean > limits.suspicious:
        return warning(found, fix)
    return ok(found)
