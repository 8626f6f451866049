"""Compares log-probs of streams that a row packs together with those of each stream alone.

Streams in one row must not see each other: neither attention, nor the states of a layer that carries some from token to
token, may pass from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.checking.scores import check_gap
from agents.model.cpu import compute
from envs.checks import Verdict
from trainer.learner.protocol import Learner
from trainer.types import TrainingSample


async def check_packing(learner: Learner, samples: Sequence[TrainingSample], num_ranks: int, dtype: str) -> Verdict:
    """Return whether the mean log-prob of the samples is the same together and one by one; it computes in `dtype`."""
    # Each rank takes a share, and only streams of one rank are packed together.
    nats, tokens = await compute(learner.sum_logprobs, list(samples) * num_ranks)
    alone = 0.0
    for sample in samples:
        alone += (await compute(learner.sum_logprobs, [sample]))[0]
    return check_gap(abs(nats - num_ranks * alone) / tokens, dtype, "those of streams alone")
