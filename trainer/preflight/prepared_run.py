"""The checks of a prepared run that need no engine: they use its problems, its images and its learner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.checking.scores import Score, check_gap, check_sight, text_gap
from agents.model.cpu import compute
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Rendered
from agents.types import ProcessedImage, Trajectory
from envs.checks import Check, Verdict, skipped
from trainer.planning.memory import GIB, count_values
from trainer.preflight.checks.aggregation import check_aggregation
from trainer.preflight.checks.free_memory import host_free
from trainer.preflight.checks.gold_answers import grade_answers
from trainer.preflight.checks.image_processing import check_patches, noise_image, read_settings
from trainer.preflight.checks.packing import check_packing
from trainer.preflight.checks.positions import check_positions, reference_logprobs
from trainer.preflight.checks.prompt_lengths import check_lengths
from trainer.preflight.checks.weights import check_same, rows_of_checkpoint
from trainer.preflight.probe_streams import as_training_samples, as_trajectory, open_problems, probe_episodes
from trainer.rollouts.live import LiveContext
from trainer.rollouts.recorded import RecordedContext
from trainer.setup.run_context import RunContext

#: A second network is loaded only if it takes less than this in float32, and less than half of the free memory.
MAX_REFERENCE_BYTES = 16 * GIB


@dataclass(frozen=True, eq=False)
class LearnerChecks:
    """Checks the learner of a run on some episodes; `network` has no weights."""

    context: RunContext
    network: PolicyModel
    episodes: Sequence[Trajectory]

    @classmethod
    def recorded(cls, context: RecordedContext, network: PolicyModel, num_groups: int) -> LearnerChecks:
        """Return the checks of a run that replays rollouts, on one episode of each of its first groups."""
        if not context.recorded.steps:
            return cls(context, network, [])
        # Episodes of one group share a prompt and its images, so one of each shows more.
        groups = context.recorded.rollout(1, context.renderer.images).groups[:num_groups]
        episodes = [group.trajectories[0] for group in groups]
        return cls(context, network, [episode for episode in episodes if episode.num_model_tokens])

    def checks(self) -> Mapping[str, Check]:
        """Return the checks by name."""
        return {
            "aggregation": lambda: check_aggregation(self.context.config.algorithm, self.context.spec.max_turns),
            "positions": self.positions,
            "sight of the learner": self.sight,
        }

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the learner's log-probs of a stream."""
        return await compute(self.context.learner.score, ids, images)

    def positions(self) -> Verdict:
        """Compare the learner's positions with those of Transformers."""
        if not self.episodes:
            return skipped("no episode was recorded")
        return check_positions(as_training_samples(self.episodes, self.context.facts), self.network)

    async def sight(self, score: Score | None = None) -> Verdict:
        """Check that images change the log-probs of the text after them: the learner's, or those of `score`."""
        if not self.network.architecture.vision:
            return skipped(f"a {self.network.config.model_type} network takes no images")
        for stream in (stream for episode in self.episodes for stream in episode.streams):
            if stream.images:
                shown = Rendered(tuple(stream.ids_T.tolist()), stream.images)
                return await check_sight(score or self.score, shown, self.context.renderer)
        return skipped("none of the first problems shows an image")


@dataclass(frozen=True, eq=False)
class PreparedChecks(LearnerChecks):
    """Checks a prepared run on its first problems, whose prompts have `lengths` tokens.

    Example::

        checks = await PreparedChecks.open(context, network, num_problems=4)
        await checks.sight()   # Verdict("ok", "another image moves the text after it by 0.84 nats; noise 0")
    """

    context: LiveContext
    lengths: Sequence[int]

    @classmethod
    async def open(cls, context: LiveContext, network: PolicyModel, num_problems: int) -> PreparedChecks:
        """Open the first problems of a run, and return its checks."""
        opened = await open_problems(context, num_problems)
        return cls(context, network, probe_episodes(context, opened), [episode.prompt_length for episode in opened])

    def all_checks(self, num_answers: int, with_wrong: bool) -> Mapping[str, Check]:
        """Return the checks by name; the rewards of wrong answers are checked if wanted."""
        return {
            "data": self.data,
            "gold answers": partial(self.gold_answers, num_answers, with_wrong),
            "image preprocessing": self.image_preprocessing,
            "forward pass": self.forward_pass,
            "packed streams": self.packed_streams,
            "weights of the learner": self.weights,
            **self.checks(),
        }

    def data(self) -> Verdict:
        """Check the lengths of prompts."""
        config = self.context.config
        return check_lengths(
            self.lengths,
            len(self.context.train_samples),
            self.context.num_overlong,
            config.env.max_new_tokens,
            config.model.context_length,
        )

    async def gold_answers(self, count: int, with_wrong: bool) -> Verdict:
        """Check the rewards of right answers and, if wanted, of wrong answers."""
        success = self.context.spec.success_rule
        if success is None:
            return skipped("the environment says that there is no success, so no answer is known to be right")
        return await grade_answers(self.context, success, count, with_wrong)

    def image_preprocessing(self) -> Verdict:
        """Compare the image settings with the family's, and the patches of an image with its pixels."""
        # A store may be there although the network has no vision part, in a folder copied from two models.
        store = self.context.renderer.images
        if store is None or not self.network.architecture.vision:
            return skipped(f"a {self.network.config.model_type} network takes no images")
        settings = read_settings(self.context.model_path)
        return check_patches(store.process(noise_image()), settings, self.network.config.model_type)

    async def forward_pass(self) -> Verdict:
        """Compare the learner's log-probs with those of Transformers."""
        size = 4 * count_values(self.network.parameters())
        room = min(MAX_REFERENCE_BYTES, host_free() // 2)
        if size > room:
            found = f"a second network would take {size / GIB:.1f} GiB, {room / GIB:.1f} may be used for it"
            return skipped(found)
        path = self.context.model_path
        architecture = self.network.architecture
        # "sdpa", so that nothing of our own attention is compared with itself.
        reference = architecture.read(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        gaps = []
        for episode in self.episodes:
            ids = episode.ids_T.tolist()
            own = await self.score(ids, episode.images)
            expected = await compute(reference_logprobs, reference, ids, episode.images)
            gaps.append(text_gap(ids, own, expected, self.context.facts.image_token_id))
        return check_gap(max(gaps), self.context.config.model.dtype, "Transformers'")

    async def packed_streams(self) -> Verdict:
        """Compare the learner's log-probs of streams in one packed row with those of each stream alone."""
        first = self.episodes[-1]
        # The same words in another order, so that two streams share a prompt and differ after it.
        answer = first.ids_T[first.prompt_length :][::-1].tolist()
        ids = (*first.ids_T[: first.prompt_length].tolist(), *answer)
        second = as_trajectory(Rendered(ids, first.images), first.prompt_length)
        samples = as_training_samples([*self.episodes, second], self.context.facts)
        config = self.context.config
        return await check_packing(self.context.learner, samples, max(1, config.cluster.num_ranks), config.model.dtype)

    async def weights(self) -> Verdict:
        """Compare the learner's weights with the checkpoint's."""
        weights = await asyncio.to_thread(self.learner_weights)
        if isinstance(weights, str):
            return skipped(weights)
        rows = rows_of_checkpoint(self.context.model_path, self.network)
        return await asyncio.to_thread(check_same, weights, rows, "the learner", "the checkpoint")

    def learner_weights(self) -> Mapping[str, Tensor] | str:
        """Return the learner's weights; if other processes hold them and they do not fit here, a text that says so."""
        size = 4 * count_values(self.network.parameters())
        room = host_free() // 2
        if self.context.config.cluster.num_ranks and size > room:
            return f"the weights take {size / GIB:.1f} GiB here, {room / GIB:.1f} may be used for them"
        return self.context.learner.weights()
