"""What must hold of every trajectory before it may train: a finished trajectory in, the first broken rule out."""

from __future__ import annotations

import numpy as np

from agents.types import Trajectory


def broken_invariant(
    trajectory: Trajectory, image_token_id: int, merge_size: int, suppressed_ids: tuple[int, ...]
) -> str | None:
    """Return the rule that a trajectory breaks, with the numbers on both sides; None when all hold.

    Checked: equal lengths; turns lie in order behind the prompt and are exactly the masked tokens; placeholders match
    the image grids; the model sampled no image token; log-probs are finite, at most 0, and 0 outside the mask.
    """
    t = trajectory
    ids, mask, logprobs = t.ids_T, t.mask_T, t.logprobs_T
    if not len(ids) == len(mask) == len(logprobs):
        return f"lengths differ: {len(ids)} ids, {len(mask)} mask, {len(logprobs)} logprobs"
    spans = np.zeros(len(ids), dtype=bool)
    cursor = t.prompt_length
    for number, turn in enumerate(t.turns, 1):
        if not cursor <= turn.start <= turn.end <= len(ids):  # an aborted turn may be empty
            return f"turn {number}: span {turn.start}:{turn.end} after {cursor} in a stream of {len(ids)}"
        spans[turn.start : turn.end] = True
        cursor = turn.end
    if not np.array_equal(spans, mask):
        return f"mask covers {int(mask.sum())} tokens, the turns {int(spans.sum())}"
    placeholders = int((ids == image_token_id).sum())
    expected = sum(time * height * width for time, height, width in (i.grid_thw for i in t.images)) // merge_size**2
    if placeholders != expected:
        return f"{placeholders} image placeholders, {expected} in the image grids"
    sampled = ids[mask]
    if len(sampled) and np.isin(sampled, suppressed_ids).any():
        return f"the model sampled a suppressed id: {sampled[np.isin(sampled, suppressed_ids)][:4].tolist()}"
    if not np.isfinite(logprobs).all() or (logprobs > 1e-4).any():
        return f"log-probs must be finite and at most 0, got {logprobs.min()} to {logprobs.max()}"
    if logprobs[~mask].any():
        return "log-probs outside the mask must be 0"
    return None
