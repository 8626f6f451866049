"""Frozen types on the way from trajectories to an optimizer step.

Legend: T tokens of a stream, N model tokens of a micro-batch in row order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agents.packed import PackedStreams
from agents.types import ProcessedImage


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """One trajectory with its advantage, and the weight of each of its model tokens in the step's loss.

    `weight` already holds the update's global denominator (`trainer.aggregation`). So however samples are split into
    micro-batches or ranks, their gradients simply add up. `key` is `Trajectory.key`, that of its episode.
    The first `prefix_length` tokens, with `num_prefix_images` of the images, are the prompt, which others may share.
    `turns_T` is the number of the model turn that a token is of, from 1; 0 where the model did not write.
    """

    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    turns_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float32]
    positions_3T: NDArray[np.int64]
    images: tuple[ProcessedImage, ...]
    prefix_length: int
    num_prefix_images: int
    advantage: float
    weight: float
    key: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, eq=False)
class Row:
    """Samples with one prompt, packed: the prompt once, then what each sample adds to it.

    Example: three samples of 10, 12 and 15 tokens with a prompt of 8 are a row of 8 + 2 + 4 + 7 = 21 tokens.
    """

    samples: tuple[TrainingSample, ...]

    @property
    def prefix_length(self) -> int:
        """Tokens of the common prompt."""
        return self.samples[0].prefix_length

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return self.prefix_length + sum(len(s.ids_T) - self.prefix_length for s in self.samples)

    @property
    def images(self) -> tuple[ProcessedImage, ...]:
        """The row's images in token order."""
        count = self.samples[0].num_prefix_images
        return self.samples[0].images[:count] + tuple(image for s in self.samples for image in s.images[count:])

    @property
    def has_advantage(self) -> bool:
        """Whether any sample has an advantage; if none has, the gradient of the row's policy loss is exactly 0."""
        return any(s.advantage != 0 for s in self.samples)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows packed after each other, with what the loss needs of every model token.

    `samples` are the samples whose model tokens follow each other in all tensors; `sample_N` numbers them.
    """

    samples: tuple[TrainingSample, ...]
    packed: PackedStreams
    sample_N: Tensor
    turns_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


@dataclass(frozen=True)
class StepStats:
    """What one training step saw, over all model tokens of the step on all ranks.

    `rollout_train_kl` is the k3 estimate, mean(rho - 1 - log rho) with log rho = trainer - rollout log-prob, taken with
    the weights that the step starts from; `kl_by_turn[k - 1]` is that over the tokens of turn k alone.
    `logprob_gap_*` are of |trainer - rollout|. `entropy` is in nats per token. `loss`, `grad_norm` and `objective`,
    which holds the objective's own figures by name, are means over the step's updates; `num_skipped` counts updates
    that were left out because their gradient was not finite. `logprobs` holds the trainer's log-probs of the N model
    tokens of every sample that was trained on, by its key, with the weights that the step starts from.
    """

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_updates: int
    num_skipped: int
    rollout_train_kl: float
    kl_by_turn: tuple[float, ...]
    logprob_gap_mean: float
    logprob_gap_p99: float
    logprob_gap_max: float
    entropy: float
    objective: Mapping[str, float]
    logprobs: Mapping[tuple[int, int, int], NDArray[np.float32]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def row(self) -> dict[str, float]:
        """Return the numbers by name, those of turn k as `rollout_train_kl/turn_k`."""
        numbers = asdict(replace(self, logprobs={}))
        del numbers["logprobs"]
        by_turn = enumerate(numbers.pop("kl_by_turn"), 1)
        objective = numbers.pop("objective")
        return numbers | objective | {f"rollout_train_kl/turn_{number}": kl for number, kl in by_turn}
