"""What the loop asks of whoever owns the training weights: the `Learner` of this process, or a group of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.architectures import architecture_of, read_config
from agents.model import NO_IMAGE_TOKEN
from agents.types import ProcessedImage
from trainer.types import StepStats, TrainingSample


class LearnerLost(RuntimeError):
    """A learner process died or failed; the weights since the start of the run went with it."""


class CheckpointFailed(RuntimeError):
    """The learner's state could not be written; the learner itself goes on."""


class Trainer(Protocol):
    """Turns training samples into better weights.

    Example::

        stats = trainer.step([samples])             # one optimizer update
        engine.load_weights(trainer.weights(), version=1)
        trainer.save(Path("runs/x/model"))
    """

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while the network is used; who needs several calls to see the same weights holds it over them."""
        ...

    @property
    def device(self) -> torch.device:
        """What it computes on; of several ranks, the kind."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in, and servers are given."""
        ...

    @property
    def steps_done(self) -> int:
        """How often `step` has changed the weights: they are the same as long as this is."""
        ...

    def step(self, minibatches: Sequence[Sequence[TrainingSample]]) -> StepStats:
        """Take one optimizer update per minibatch; return what the whole step saw."""
        ...

    def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id of a stream but the first, at temperature 1, in nats."""
        ...

    def likelihood(self, samples: Sequence[TrainingSample]) -> tuple[float, int]:
        """Return the sum of the log-probs of the samples' model tokens, in nats, and how many these are."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the full weights by parameter name."""
        ...

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write a model folder's configuration and weights; `dtype` is that of the file."""
        ...

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy all that `restore` needs and write it into a folder in the background."""
        ...

    def is_checkpoint_written(self, wait: bool) -> bool:
        """Return whether what was begun is on disk, which can be waited for.

        Raises:
            CheckpointFailed: it could not be written; says why.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Go on from what `begin_checkpoint` wrote: weights, optimizer, steps done.

        Raises:
            UserError: it is of another network.
        """
        ...


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a network without loading it.

    Example: Qwen3-VL has image token 151655 and merges 2 x 2 patches; one without images has -1 and 1.
    """

    model_type: str
    architectures: tuple[str, ...]
    image_token_id: int
    merge_size: int
    max_positions: int
    names_are_saved: bool

    @classmethod
    def load(cls, path: str | Path) -> ModelFacts:
        """Read a checkpoint's configuration.

        Raises:
            UserError: there is none, or it is of no supported architecture.
        """
        config = read_config(path)
        architecture = architecture_of(config)
        sees = architecture.vision
        return cls(
            model_type=config.model_type,
            architectures=tuple(config.architectures or ()),
            image_token_id=int(config.image_token_id) if sees else NO_IMAGE_TOKEN,
            merge_size=int(config.vision_config.spatial_merge_size) if sees else 1,
            max_positions=int(config.get_text_config().max_position_embeddings),
            names_are_saved=architecture.names_are_saved,
        )
