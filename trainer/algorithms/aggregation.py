"""Weights the losses of a step's tokens, so that their sum is the step's loss.

Legend: S episodes of an optimizer step, on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.config.algorithm import AggregationName

#: (lengths in tokens, all above 0; the constant) -> the weight of each token of each episode.
AGGREGATIONS: Mapping[AggregationName, Callable[[NDArray[np.float64], int], NDArray[np.float64]]] = {
    "token-mean": lambda lengths_S, _: np.full_like(lengths_S, 1 / lengths_S.sum()),
    "seq-mean-token-mean": lambda lengths_S, _: 1 / (len(lengths_S) * lengths_S),
    "seq-mean-token-sum": lambda lengths_S, _: np.full_like(lengths_S, 1 / len(lengths_S)),
    "constant": lambda lengths_S, constant: np.full_like(lengths_S, 1 / (len(lengths_S) * constant)),
}


def token_weights(lengths_S: Sequence[int], mode: AggregationName, constant: int) -> NDArray[np.float64]:
    """Return the weight that each model token of episode s gets in the optimizer step's loss.

    - `token-mean`: 1 / sum(len). Every token counts the same, long episodes more. DAPO, arXiv 2503.14476, section 3.3.
    - `seq-mean-token-mean`: 1 / (S len_s). Every episode counts the same. GRPO, arXiv 2402.03300, eq. 3.
    - `seq-mean-token-sum`: 1 / S. The gradient of the mean of sequence log-probs, as in REINFORCE and RLOO.
    - `constant`: 1 / (S constant). The same in units of `constant` tokens. Dr. GRPO, arXiv 2503.20783, section 3.

    `lengths_S` counts the model tokens of all episodes of the step on all ranks, each over all of its streams. The
    denominators are thus global, and the step's loss is the sum of weight times token loss, however episodes are cut
    into streams, and these split into micro-batches or ranks. An episode without tokens (length 0) has weight 0 and
    does not count in S, as if it had not been sampled.

    Raises:
        ValueError: the mode is `constant`, and the constant is not positive.

    >>> token_weights([1, 3], "token-mean", 0).tolist(), token_weights([1, 4], "seq-mean-token-mean", 0).tolist()
    ([0.25, 0.25], [0.5, 0.125])
    """
    if mode == "constant" and constant <= 0:
        raise ValueError(f"aggregation 'constant' divides by a positive number of tokens, got {constant}")
    lengths = np.asarray(lengths_S, dtype=np.float64)
    weights_S = np.zeros_like(lengths)
    # An update without tokens has no denominator.
    if (lengths > 0).any():
        weights_S[lengths > 0] = AGGREGATIONS[mode](lengths[lengths > 0], constant)
    return weights_S
