"""Log-probs of tokens under a policy: the one definition that engine, trainer and probes share.

Legend: N places, V vocabulary, T tokens of one stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.model import PolicyModel, VisionBatch
from agents.positions import mrope_positions
from agents.types import ProcessedImage


def sampling_logprobs(logits_NV: Tensor, temperature: float, suppressed_ids: Sequence[int]) -> Tensor:
    """Return the log-probs that tokens are drawn from, float32 (N, V)."""
    logits_NV = logits_NV.float() / temperature
    if suppressed_ids:
        index = torch.tensor(suppressed_ids, device=logits_NV.device)
        logits_NV = logits_NV.index_fill(-1, index, float("-inf"))
    return logits_NV.log_softmax(-1)


@torch.no_grad()
def stream_logprobs(
    model: PolicyModel,
    ids: Sequence[int],
    images: Sequence[ProcessedImage],
    device: torch.device | str,
    temperature: float = 1.0,
    suppressed_ids: Sequence[int] = (),
) -> NDArray[np.float32]:
    """Return the log-prob of each id but the first, given those before it, (T - 1,)."""
    if len(ids) < 2:
        return np.zeros(0, dtype=np.float32)
    grids = [image.grid_thw for image in images]
    positions_3T = mrope_positions(np.asarray(ids, dtype=np.int64), grids, model.image_token_id, model.merge_size)
    ids_1T = torch.tensor([list(ids)], device=device)
    select_1T = torch.ones_like(ids_1T, dtype=torch.bool)
    select_1T[0, -1] = False
    vision = VisionBatch.build([images], device)
    logits_NV = model(ids_1T, torch.from_numpy(positions_3T[:, None]).to(device), None, select_1T, vision)
    logprobs_NV = sampling_logprobs(logits_NV, temperature, suppressed_ids)
    return logprobs_NV.gather(-1, ids_1T[0, 1:, None])[:, 0].cpu().numpy()
