"""The network that an engine should run, as the trainer runs it: what every token's log-prob must be.

Legend: N places of new tokens, V vocabulary, T tokens of one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.checking.scores import BOUNDS, LEAST_MOVE
from agents.model.packed import VisionBatch
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import sampling_logprobs, stream_logprobs
from agents.types import Completion, GenerateRequest, ProcessedImage, SamplingDistribution

#: Other weights must also move the log-probs by this many bounds, to be told from the first ones.
MOVE_BOUNDS = 20.0


@dataclass(frozen=True, eq=False)
class Reference:
    """A network without any engine: one forward pass over a whole stream.

    Example::

        reference = Reference.load("path/to/model", "float32", "cpu")
        reference.gap(request, completion)      # 3e-7: mean |d| in nats over the completion's tokens
    """

    model: PolicyModel
    dtype: str
    device: str

    @classmethod
    def load(cls, path: str, dtype: str, device: str) -> Reference:
        """Read a checkpoint."""
        return cls(PolicyModel.load(path, getattr(torch, dtype)).to(device).eval(), dtype, device)

    @property
    def bound(self) -> float:
        """Largest mean |d| in nats that is rounding."""
        return BOUNDS[self.dtype]

    @torch.no_grad()
    def table(self, request: GenerateRequest, ids: Sequence[int]) -> Tensor:
        """Return the log-probs (N, V) of every token of a turn, by the request's distribution."""
        stream = (*request.ids, *ids)
        # The row before a token decides it: the last token of the prompt decides the first new one.
        select_BT = torch.zeros(1, len(stream), dtype=torch.bool, device=self.device)
        select_BT[0, len(request.ids) - 1 : -1] = True
        logits_NV = self.model(
            torch.tensor([stream], device=self.device),
            torch.from_numpy(self.model.positions(stream, request.images))[:, None].to(self.device),
            None,
            select_BT,
            VisionBatch.build([request.images], self.device),
        )
        return sampling_logprobs(logits_NV, request.sampling.distribution).cpu()

    def gap(
        self, request: GenerateRequest, completion: Completion, distribution: SamplingDistribution | None = None
    ) -> float:
        """Return the mean |d| in nats between a completion's log-probs and this network's; inf where one is NaN."""
        ids = (*request.ids, *completion.ids)
        scores = self.logprobs(ids, request.images, distribution or request.sampling.distribution)
        gaps_N = np.abs(scores[len(request.ids) - 1 :] - np.asarray(completion.logprobs))
        return float(np.nan_to_num(gaps_N.mean(), nan=np.inf))

    def logprobs(
        self,
        ids: Sequence[int],
        images: Sequence[ProcessedImage],
        distribution: SamplingDistribution = SamplingDistribution(),
    ) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first."""
        return stream_logprobs(self.model, ids, images, self.device, getattr(torch, self.dtype), distribution)

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first, as an engine does."""
        return self.logprobs(ids, images)

    @torch.no_grad()
    def disturbed(self, path: str, ids: Sequence[int], images: Sequence[ProcessedImage]) -> Reference:
        """Return the network with so much noise on its weights that the log-probs of a stream move."""
        other = Reference.load(path, self.dtype, self.device)
        before = self.logprobs(ids, images)
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            for parameter in other.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                # A parameter of one value has no deviation: it stays.
                parameter.add_(noise * (0.1 * parameter.float().std().nan_to_num(0.0)).to(parameter))
            moved = float(np.abs(other.logprobs(ids, images) - before).mean())
            if moved > max(LEAST_MOVE, MOVE_BOUNDS * self.bound):
                break
        return other
