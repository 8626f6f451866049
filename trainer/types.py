"""The frozen types between trajectories and an optimizer step.

Legend: T tokens of a stream, N model tokens of a micro-batch in row order, K ids that one was drawn from, S samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agents.model.packed import PackedStreams
from agents.types import ProcessedImage

#: The advantage of all model tokens of a trajectory, or one for each of its turns.
Advantage = float | tuple[float, ...]


class RunFault(RuntimeError):
    """Ends a run that can go on from its last checkpoint once the cause is mended, which the message says."""


@dataclass(frozen=True, eq=False)
class TrainingSample:
    """One token stream of an episode, the episode's advantage, and the weight of each model token in the step's loss.

    `weight` already holds the update's global denominator (`trainer.algorithms.aggregation`), so gradients of
    micro-batches and ranks simply add up, however the samples are split. `key` is `Trajectory.key`, and `stream` the
    place in `Trajectory.streams`. The first `prefix_length` tokens, with `num_prefix_images` of the images, are what
    other samples may share: the first stream's prompt, or what a later stream's prompt has in common with it.
    `turns_T` is the episode's turn of each token, from 1; 0 for tokens of no turn. `kept_NK` and `routes_RLK` are those
    of the stream.
    """

    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    turns_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float32]
    positions_3T: NDArray[np.int64]
    images: tuple[ProcessedImage, ...]
    prefix_length: int
    num_prefix_images: int
    advantage: Advantage
    weight: float
    key: tuple[int, int, int] = (0, 0, 0)
    stream: int = 0
    kept_NK: NDArray[np.int32] | None = None
    routes_RLK: NDArray[np.uint8 | np.uint16] | None = None

    @property
    def advantages_N(self) -> NDArray[np.float32]:
        """The advantage of each of the N model tokens."""
        # Turns count from 1, so turn k has the k-th advantage.
        turns_N = self.turns_T[self.mask_T]
        if isinstance(self.advantage, tuple):
            return np.array(self.advantage, dtype=np.float32)[turns_N - 1]
        return np.full(len(turns_N), np.float32(self.advantage))

    @property
    def prompt_key(self) -> tuple[int, bytes, tuple[str, ...], bytes]:
        """The shared tokens as a key of mappings: group, ids, the digests of the images, and a hash of the experts."""
        # Equal ids are not enough: other images have the same placeholders.
        shown = self.images[: self.num_prefix_images]
        experts = b""
        if self.routes_RLK is not None:
            # A prompt is computed once for all samples that share it, so they must have sent it to the same experts.
            experts = hashlib.blake2b(self.routes_RLK[: self.prefix_length].tobytes(), digest_size=16).digest()
        # Later streams of all groups may begin alike, for a few tokens: that must not tie them to one row or rank.
        return self.key[0], self.ids_T[: self.prefix_length].tobytes(), tuple(i.digest for i in shown), experts


@dataclass(frozen=True, eq=False)
class Row:
    """Samples with the same prompt, packed: the prompt once, then the other tokens of each sample.

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
        # The prompt is computed once for all samples of the row.
        return self.prefix_length + sum(len(s.ids_T) - self.prefix_length for s in self.samples)

    @property
    def images(self) -> tuple[ProcessedImage, ...]:
        """The row's images in token order."""
        # Images of the prompt are shown once, as its tokens are.
        count = self.samples[0].num_prefix_images
        return self.samples[0].images[:count] + tuple(image for s in self.samples for image in s.images[count:])

    @property
    def has_advantage(self) -> bool:
        """Whether the advantage of any sample is not 0."""
        return any(np.any(s.advantage) for s in self.samples)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The inputs of the loss for every model token of a micro-batch.

    All tensors hold the model tokens of `samples` in that order; `sample_N` is the number of each token's sample.
    """

    samples: tuple[TrainingSample, ...]
    sample_N: Tensor
    turns_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


@dataclass(frozen=True, eq=False)
class MicroBatch(TokenBatch):
    """Rows packed one after another, with the inputs of the loss."""

    packed: PackedStreams


@dataclass(frozen=True, eq=False)
class ModelTokens:
    """The inputs of the objective for the model tokens of a micro-batch. Log-probs and entropies: nats, float32.

    `old_logprobs_N` are the trainer's before the step's first update, `rollout_logprobs_N` the engine's, and
    `ref_logprobs_N` the reference network's, if there is one. `weights_N` comes from `aggregation.token_weights`.
    `sample_N` (int64, 0 to S - 1, never decreasing) is the number of the token's sample. Only `logprobs_N` and
    `entropy_N` have gradients.

    Example, two samples of two tokens and one on the first update of a step, with mean over tokens::

        ModelTokens(
            logprobs_N=lp, entropy_N=h, old_logprobs_N=lp.detach(), rollout_logprobs_N=torch.tensor([-0.7, -2.3, -1.1]),
            ref_logprobs_N=None, advantages_N=torch.tensor([0.7, 0.7, -0.7]), weights_N=torch.full((3,), 1 / 3),
            sample_N=torch.tensor([0, 0, 1]), num_samples=2,
        )
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    old_logprobs_N: Tensor
    rollout_logprobs_N: Tensor
    ref_logprobs_N: Tensor | None
    advantages_N: Tensor
    weights_N: Tensor
    sample_N: Tensor
    num_samples: int


def check_shape(values_N: object, tokens: ModelTokens) -> None:
    """Raise TypeError unless a user's algorithm gave a tensor with a value for each token."""
    # A scalar would broadcast, and train every token alike without a word.
    if not isinstance(values_N, Tensor) or values_N.shape != tokens.logprobs_N.shape:
        if isinstance(values_N, Tensor):
            got = tuple(values_N.shape)
        else:
            got = type(values_N).__name__
        raise TypeError(f"{len(tokens.logprobs_N)} tokens need a tensor of that shape, not {got}")


@dataclass(frozen=True)
class StepStats:
    """Statistics of one training step, over all model tokens of the step on all ranks.

    - `loss`, `grad_norm`: means over the updates that the step took; 0 if it took none, because no minibatch had a
      gradient, or a finite one. `objective`: the objective's own metrics, means over the tokens of all minibatches.
    - `num_skipped`: updates that were skipped because their loss or gradient was not finite.
    - `rollout_train_kl`: the k3 estimate, mean(rho - 1 - log rho) with log rho = trainer - rollout log-prob, under the
      weights that the step starts from. `kl_by_turn[k - 1]` is the same over the tokens of turn k alone.
    - `logprob_gap_*`: of |trainer - rollout| log-probs.
    - `entropy`: nats per token.
    - `memory`: GiB that tensors take on the GPU of the rank with the most: `learner_peak_gib` in the step,
      `learner_kept_gib` after it.
    - `routing`: of a mixture with the engine's routes, on the step's first micro-batch. `other_experts`: the share of
      (token, layer) where the trainer by itself takes other experts, also by layer. `kl_free`: the k3 estimate without
      the routes. `load_max`: the largest expert's share of the choices times the number of experts, and `entropy` of
      these shares in nats, both means over layers.
    - `logprobs`: the trainer's log-probs of the N model tokens of every training sample, by its key and stream, under
      the weights that the step starts from.
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
    memory: Mapping[str, float] = field(default_factory=dict, compare=False)
    routing: Mapping[str, float] = field(default_factory=dict, compare=False)
    logprobs: Mapping[tuple[int, int, int, int], NDArray[np.float32]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def row(self) -> dict[str, float]:
        """Return the numbers by name, those of turn k as `rollout_train_kl/turn_k`."""
        # asdict copies deeply, and log-probs are the largest part of a step.
        numbers = asdict(replace(self, logprobs={}))
        del numbers["logprobs"]
        by_turn = enumerate(numbers.pop("kl_by_turn"), 1)
        more = numbers.pop("objective")
        for group in ("memory", "routing"):
            more |= {f"{group}/{name}": number for name, number in numbers.pop(group).items()}
        return numbers | more | {f"rollout_train_kl/turn_{number}": kl for number, kl in by_turn}
