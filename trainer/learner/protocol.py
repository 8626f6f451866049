"""The interface of a learner: the loop trains through it, with one rank in this process or a `LearnerGroup` of several.

A rank is an `FSDPLearner` or a `MegatronLearner`, behind the interface of a `RankLearner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.engines.weight_servers import Adapter
from agents.types import ProcessedImage
from trainer.types import RunFault, StepStats, TrainingSample


class LearnerLost(RunFault):
    """A learner process died, failed or gave no answer; all weights trained since the last checkpoint are lost."""


# Not a `RunFault`: the run goes on, with the checkpoint before it.
class CheckpointFailed(RuntimeError):
    """The learner's state could not be written; the learner itself still works."""


class Learner(Protocol):
    """Turns training samples into better weights.

    Example::

        stats = learner.step([samples])             # one optimizer update
        engine.load_weights(learner.weights(), version=1)
        learner.save(Path("runs/x/model"))
    """

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while the network is used. Hold it over several calls that must see the same weights."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that the network computes on; for several ranks, only its kind."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in, and that servers get their weights in."""
        ...

    @property
    def steps_done(self) -> int:
        """How often `step` has changed the weights. Equal numbers mean equal weights."""
        ...

    def step(self, minibatches: Sequence[Sequence[TrainingSample]]) -> StepStats:
        """Take one optimizer update per minibatch; return the statistics of the whole step."""
        ...

    # torch keeps what it has freed for its own next tensors, where no other process can have it.
    def free_memory(self) -> None:
        """Return the GPU memory that holds no data to the GPU, for servers that share it."""
        ...

    def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob, at temperature 1, of each id of a stream but the first, in nats."""
        ...

    def sum_logprobs(self, samples: Sequence[TrainingSample]) -> tuple[float, int]:
        """Return the sum of the log-probs of the samples' model tokens, in nats, and the number of these tokens."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the full weights by parameter name."""
        ...

    def adapter(self) -> Adapter:
        """Return the low-rank updates alone, in `dtype`; for a learner that trains nothing else."""
        ...

    def save(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the configuration and the weights, in `dtype`, into a model folder."""
        ...

    def begin_checkpoint(self, folder: Path) -> None:
        """Copy everything that `restore` needs, and write it into a folder in the background."""
        ...

    def is_checkpoint_written(self, wait: bool) -> bool:
        """Return whether the checkpoint is on disk; with `wait`, wait until it is.

        Raises:
            CheckpointFailed: it could not be written; the message says why.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Continue from what `begin_checkpoint` wrote: weights, optimizer, steps done.

        Raises:
            UserError: the folder holds another network.
        """
        ...

    def close(self) -> None:
        """End the processes of the learner. Another thread that waits for one gets `LearnerLost`."""
        ...


class WeightSource(Protocol):
    """What the transports of weights need of a rank.

    Example: `for name, weight in source.stream(): ...` on every rank, in the same order.
    """

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        ...

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full weights by their names in a checkpoint; every rank must take all."""
        ...

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of what `stream` yields, in its order; every rank must call it."""
        ...


class RankLearner(Learner, WeightSource, Protocol):
    """One rank of a learner. Every method must be called on all ranks, since all take part in it."""

    def weights(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return the full weights by parameter name on rank 0, cast and moved if asked."""
        ...
