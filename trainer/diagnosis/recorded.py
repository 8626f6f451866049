"""The checks of a run that trains on recorded rollouts: its learner, tried on the first recorded streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agents.model import PolicyModel
from agents.renderer import Rendered
from agents.types import ProcessedImage, Trajectory
from trainer.diagnosis.finding import Verdict, skipped
from trainer.diagnosis.positions import check_positions
from trainer.diagnosis.sight import check_sight, look
from trainer.diagnosis.streams import Views, samples_of
from trainer.replaying import ReplayParts


@dataclass(eq=False)
class RecordedPatient:
    """A run that replays, and the first episode of each of its first groups; `network` is without weights."""

    parts: ReplayParts
    network: PolicyModel
    num_groups: int

    @cached_property
    def played(self) -> list[Trajectory]:
        """The episodes that are looked at."""
        if not self.parts.recorded.steps:
            return []
        groups = self.parts.recorded.rollout(1, self.parts.renderer.images).groups[: self.num_groups]
        return [group.trajectories[0] for group in groups if group.trajectories[0].num_model_tokens]

    async def positions(self) -> Verdict:
        """What the learner is told of places, against Transformers."""
        if not self.played:
            return skipped("no episode was recorded")
        return check_positions(samples_of(self.played, [0.0] * len(self.played), self.parts.facts), self.network)

    async def sight(self) -> Verdict:
        """Whether the learner sees."""
        pictured = next((t for t in self.played if t.images), None)
        if pictured is None:
            return skipped(f"none of the first {len(self.played)} recorded episodes shows a picture")
        stream = Rendered(tuple(pictured.ids_T.tolist()), pictured.images)
        return check_sight(*await look(self.score, Views.of(stream, self.parts.renderer)))

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the learner's log-probs."""
        return await asyncio.to_thread(self.parts.learner.score, ids, images)
