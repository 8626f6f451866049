"""Frozen types on the way from trajectories to an optimizer step.

Legend: T tokens of a stream, B rows of a micro-batch, N model tokens of a micro-batch in row order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agents.model import VisionBatch
from agents.types import ProcessedImage


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """One trajectory with its advantage, and the weight of each of its model tokens in the step's loss.

    `weight` already holds the step's global denominator: summed over all samples of all ranks, weight times model
    tokens is 1 (token-mean). So however samples are split into micro-batches or ranks, their gradients simply add up.
    """

    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    positions_3T: NDArray[np.int64]
    images: tuple[ProcessedImage, ...]
    advantage: float
    weight: float


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples padded on the right, with what the loss needs of every model token."""

    ids_BT: Tensor
    positions_3BT: Tensor
    select_BT: Tensor
    vision: VisionBatch | None
    targets_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step saw, over all model tokens of the step on all ranks.

    `rollout_train_kl` is the k3 estimate, mean(rho - 1 - log rho) with log rho = trainer - rollout log-prob, taken with
    the weights that the rollout used. `logprob_gap_*` are of |trainer - rollout|. `entropy` is in nats per token.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    rollout_train_kl: float
    logprob_gap_mean: float
    logprob_gap_max: float
    entropy: float
    clip_frac: float
