"""The checks of a run that trains on recorded rollouts: they try its learner on the first recorded streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agents.model.policy import PolicyModel
from agents.rendering.renderer import Rendered
from agents.types import ProcessedImage, Trajectory
from trainer.preflight.checks.image_sensitivity import check_image_sensitivity, score_variants
from trainer.preflight.checks.positions import check_positions
from trainer.preflight.finding import Verdict, skipped
from trainer.preflight.probe_streams import ImageVariants, as_training_samples
from trainer.rollouts.recorded import RecordedContext


@dataclass(eq=False)
class RecordedChecks:
    """Checks a run that replays, on one episode of each of its first groups; `network` has no weights."""

    context: RecordedContext
    network: PolicyModel
    num_groups: int

    @cached_property
    def episodes(self) -> list[Trajectory]:
        """The recorded episodes that the checks use."""
        if not self.context.recorded.steps:
            return []
        groups = self.context.recorded.rollout(1, self.context.renderer.images).groups[: self.num_groups]
        return [group.trajectories[0] for group in groups if group.trajectories[0].num_model_tokens]

    async def positions(self) -> Verdict:
        """Compare the learner's positions with those of Transformers."""
        if not self.episodes:
            return skipped("no episode was recorded")
        samples = as_training_samples(self.episodes, [0.0] * len(self.episodes), self.context.facts)
        return check_positions(samples, self.network)

    async def image_sensitivity(self) -> Verdict:
        """Check that images change the learner's log-probs of the text after them."""
        with_image = next((t for t in self.episodes if t.images), None)
        if with_image is None:
            return skipped(f"none of the first {len(self.episodes)} recorded episodes shows an image")
        stream = Rendered(tuple(with_image.ids_T.tolist()), with_image.images)
        variants = ImageVariants.of(stream, self.context.renderer)
        return check_image_sensitivity(*await score_variants(self.score, variants))

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the learner's log-probs of a stream."""
        return await asyncio.to_thread(self.context.learner.score, ids, images)
