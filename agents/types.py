"""Frozen types of a rollout: what is asked of an engine, what comes back, and the finished trajectory.

Legend of the shape suffixes: T tokens of one stream, G samples of one group, P patches of one image, D values of a
patch.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image


class EndReason(StrEnum):
    """Why an episode ended. Only `completed` is the environment's word; the limits are the agent loop's."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"
    CONTEXT_FULL = "context_full"
    PARSE_ERROR = "parse_error"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    ABORTED = "aborted"
    INVALID_STREAM = "invalid_stream"

    @property
    def is_valid(self) -> bool:
        """Whether the episode's reward says something about the policy; others are left out of statistics and loss."""
        return self is EndReason.COMPLETED or self.is_truncated

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the agent loop cut the episode off."""
        return self in (EndReason.MAX_TURNS, EndReason.TOKEN_BUDGET, EndReason.CONTEXT_FULL)


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the model takes it, addressed by the hash of its pixels.

    Example: a 160 x 128 picture in 16-pixel patches has `grid_thw` (1, 8, 10), 80 rows of `pixels_PD` and, merged
    2 x 2, 20 tokens. `picture` is the one that the patches were cut from: RGB, resized to 16 times the grid.
    """

    digest: str
    pixels_PD: NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    num_tokens: int
    picture: Image.Image | None = field(default=None, repr=False)

    @functools.cached_property
    def png(self) -> bytes:
        """The resized picture as a PNG file, for an engine in another process: made once, without loss.

        The model's own processor does not resize it again, and cuts the same patches from it. Raises ValueError where
        the image was made without its picture.
        """
        if self.picture is None:
            raise ValueError(f"image {self.digest} was made without its picture")
        file = io.BytesIO()
        self.picture.save(file, "PNG", compress_level=1)
        return file.getvalue()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the image takes, a PNG file as large as its pixels included."""
        width, height = self.picture.size if self.picture else (0, 0)
        return self.pixels_PD.nbytes + 2 * 3 * width * height


@dataclass(frozen=True)
class SamplingLaw:
    """What turns logits into the distribution that tokens are drawn from.

    Example: `SamplingLaw(0.7, (5,))` divides logits by 0.7 and never draws id 5.
    """

    temperature: float = 1.0
    suppressed_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. The trainer applies the same temperature and the same suppressed ids to its log-probs.

    `temperature` 0 takes the most likely token; its log-probs are those of temperature 1.
    """

    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()

    @property
    def law(self) -> SamplingLaw:
        """The distribution under which log-probs are reported and trained."""
        return SamplingLaw(self.temperature or 1.0, self.suppressed_ids)


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """One model turn to write: the whole stream so far, placeholders expanded, with the images in it."""

    ids: tuple[int, ...]
    images: tuple[ProcessedImage, ...]
    max_new_tokens: int
    sampling: SamplingParams
    seed: int


def add_run(runs: list[tuple[int, int]], version: int, count: int) -> None:
    """Append tokens of a weight version to runs of (version, tokens); neighbours of one version become one run."""
    if runs and runs[-1][0] == version:
        count += runs.pop()[1]
    if count:
        runs.append((version, count))


@dataclass(frozen=True)
class Completion:
    """The ids that the engine sampled (the stop id included), verbatim, with the log-prob of each.

    `versions` are runs of (weight version, tokens): `((3, 40), (4, 12))` says that weights 3 wrote 40 tokens and, after
    a pause for new weights, weights 4 wrote 12 more. `prompt_length` is the engine's own count of what it read, and
    `num_cached` how much of that it had kept from before.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    prompt_length: int
    versions: tuple[tuple[int, int], ...]
    num_cached: int = 0


@dataclass(frozen=True, eq=False)
class Turn:
    """One model turn: the span `[start, end)` of its tokens in the stream, its text, and what the environment said.

    `observations` is the environment's answer as chat messages, empty where it gave none; after the last turn the model
    is no longer shown them. `done` is its word that the task has ended. `versions` and `num_cached` are the
    completion's. Times are seconds.
    """

    start: int
    end: int
    text: str
    finish: str
    versions: tuple[tuple[int, int], ...]
    num_cached: int
    observations: tuple[Mapping[str, Any], ...]
    info: Mapping[str, Any]
    engine_s: float
    env_s: float
    done: bool = False


@dataclass(frozen=True)
class Timing:
    """Where an episode's wall time went, in seconds; what is left of `total_s` is the agent loop's own and waiting.

    `began` is when it began, in seconds since 1970.
    """

    began: float = 0.0
    total_s: float = 0.0
    engine_s: float = 0.0
    env_s: float = 0.0
    check_s: float = 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """One finished episode as one append-only token stream.

    `mask_T` is True on the tokens that the model sampled, and only there; `logprobs_T` is 0 elsewhere. It is sample
    `sample_index` of the problem of number `group`, whose group was played again `attempt` times before. The first
    `num_prompt_messages` of `messages` are the problem's own; `tools` are the schemas that the prompt shows.

    Example: prompt of 4 tokens, the model writes 3, the environment 2, the model 2::

        ids_T       p p p p m m m e e m m
        mask_T      0 0 0 0 1 1 1 0 0 1 1
    """

    sample_id: str
    sample_index: int
    seed: int
    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    images: tuple[ProcessedImage, ...]
    turns: tuple[Turn, ...]
    reward: float
    end_reason: EndReason
    prompt_length: int
    messages: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    timing: Timing = Timing()
    label: str | None = None
    num_prompt_messages: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    group: int = 0
    attempt: int = 0

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.sample_id!r}, {len(self.turns)} turns, {len(self.ids_T)} tokens, "
            f"reward {self.reward}, {self.end_reason.value}{f', {self.error!r:.200}' if self.error else ''})"
        )

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells it from all others that were played for the same: group, sample, attempt."""
        return self.group, self.sample_index, self.attempt

    @property
    def num_model_tokens(self) -> int:
        """Tokens that the model sampled."""
        return int(self.mask_T.sum())

    @property
    def versions_T(self) -> NDArray[np.int32]:
        """The version of the weights that wrote each token; -1 where the model did not."""
        versions_T = np.full(len(self.ids_T), -1, dtype=np.int32)
        for turn in self.turns:
            runs = np.array(turn.versions, dtype=np.int32).reshape(-1, 2)
            versions_T[turn.start : turn.end] = np.repeat(runs[:, 0], runs[:, 1])
        return versions_T


@dataclass(frozen=True, eq=False)
class TrajectoryGroup:
    """The G trajectories of one problem.

    `discarded` holds those of earlier tries that left fewer than two valid ones: they are recorded and counted, and are
    in no statistics.
    """

    sample_id: str
    trajectories: tuple[Trajectory, ...]
    discarded: tuple[Trajectory, ...] = ()

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """The trajectories whose reward counts."""
        return tuple(t for t in self.trajectories if t.end_reason.is_valid)

    @property
    def fates(self) -> tuple[str, ...]:
        """What broken episodes did to the group: "resampled", "dropped", both or nothing, to be counted."""
        return ("resampled",) * bool(self.discarded) + ("dropped",) * self.is_dropped

    @property
    def is_dropped(self) -> bool:
        """Whether nothing can be learnt from the group, since a comparison takes two."""
        return len(self.valid) < 2
