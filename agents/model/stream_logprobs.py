"""Computes the log-probs of tokens under a policy: the one definition that engine, trainer and probes share.

Legend: N places, V vocabulary, T tokens of one stream, K ids that a token is drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.model.attention import Span, needs_buckets
from agents.model.linear_logprobs import law_logits
from agents.model.packed import PackedStreams
from agents.model.policy import PolicyModel
from agents.types import ProcessedImage, SamplingDistribution, SamplingParams


def sampling_logprobs(logits_NV: Tensor, distribution: SamplingDistribution, kept_NK: Tensor | None = None) -> Tensor:
    """Return the log-probs of the distribution that tokens are drawn from, float32 (N, V)."""
    return law_logits(logits_NV.to(torch.float32, copy=True), distribution, kept_NK).log_softmax(-1)


def kept_ids(logits_NV: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the ids that may be drawn at each place, int64 (N, top_k); a smaller set repeats its most likely id."""
    top_NK, ids_NK = sampling_logprobs(logits_NV, sampling.distribution).topk(min(sampling.top_k, logits_NV.shape[1]))
    kept_NK = ids_NK[:, :1].repeat(1, sampling.top_k)
    kept_NK[:, : ids_NK.shape[1]] = torch.where(sampling.keeps(top_NK.exp()), ids_NK, ids_NK[:, :1])
    return kept_NK


@torch.no_grad()
def stream_logprobs(
    model: PolicyModel,
    ids: Sequence[int],
    images: Sequence[ProcessedImage],
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    distribution: SamplingDistribution = SamplingDistribution(),
) -> NDArray[np.float32]:
    """Return the log-prob of each id but the first, given those before it, (T - 1,).

    The network computes in `dtype`.
    """
    # The first token has nothing before it to be predicted from.
    if len(ids) < 2:
        return np.zeros(0, dtype=np.float32)
    ids_T = np.asarray(ids, dtype=np.int64)
    packed = PackedStreams.build(
        ids_T=ids_T,
        positions_3T=model.positions(ids, images),
        spans=[Span(0, len(ids_T))],
        images=[images],
        before_N=np.arange(len(ids_T) - 1),
        targets_N=ids_T[1:],
        image_token_id=model.image_token_id,
        device=device,
        with_buckets=needs_buckets(torch.device(device), dtype),
    )
    return model.token_scores(packed, distribution)[0].cpu().numpy()
