"""The checks of a prepared run with a running engine: weights, sight, agreement, and stale caches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.checking.scores import LEAST_MOVE, Update, check_gap, check_update, text_gap
from agents.engines.base import memory_engine
from agents.model.cpu import compute
from agents.model.mrope import num_images_within
from agents.rendering.renderer import Rendered
from agents.rollout.groups import derive_seed
from agents.rollout.manager import rollout_groups
from agents.types import Completion, GenerateRequest, Trajectory
from envs.checks import Verdict, combine, skipped
from trainer.preflight.checks.engine_agreement import check_agreement, check_episodes
from trainer.preflight.checks.weights import check_same, rows_of
from trainer.preflight.prepared_run import PreparedChecks
from trainer.preflight.probe_streams import as_training_samples, as_trajectory
from trainer.setup.components import sampling_params
from trainer.types import StepStats
from trainer.weight_sync.sync import SyncError

#: Episodes per problem, and tokens of each turn that the check of the caches generates.
COPIES = 2
CACHE_TOKENS = 48
#: The most updates that may be needed until the learner's log-probs have moved far enough.
MAX_UPDATES = 8


@dataclass(eq=False)
class EngineChecks:
    """Checks the engine of a prepared run; `played` holds the episodes that it has generated.

    Example::

        checks = EngineChecks(prepared, num_problems=4)
        await checks.start()
        await checks.agreement()          # Verdict("ok", "KL 1.1e-13 over 412 tokens (by turn ...), ...")
    """

    prepared: PreparedChecks
    num_problems: int
    played: list[Trajectory] = field(default_factory=list)

    async def start(self) -> str:
        """Start the engine."""
        await self.prepared.context.weight_sync.transport.start()
        return f"{type(self.prepared.context.engine).__name__} runs"

    async def weights(self) -> Verdict:
        """Compare the engine's weights with the learner's: by name if it is embedded, else by log-probs of streams."""
        if engine := memory_engine(self.prepared.context.engine):
            weights = await asyncio.to_thread(self.prepared.learner_weights)
            if not isinstance(weights, str):
                own = dict(engine.weights())
                return await asyncio.to_thread(check_same, own, rows_of(weights), "the engine", "the learner")
        first, *_, last = self.prepared.episodes
        verdict = await self._same_scores(last)
        # The first episode has an image where one was found: only it shows other weights of the vision tower.
        if verdict.status == "ok" and first.images:
            return await self._same_scores(first)
        return verdict

    async def _same_scores(self, episode: Trajectory) -> Verdict:
        """Compare every server's log-probs of an episode with the learner's."""
        ids = episode.ids_T.tolist()
        learner = await self.prepared.score(ids, episode.images)
        scores = await self.prepared.context.weight_sync.transport.scores(ids, episode.images)
        facts = self.prepared.context.facts
        gap = max(text_gap(ids, score, learner, facts.image_token_id) for score in scores)
        return check_gap(gap, self.prepared.context.config.model.dtype, "the learner's")

    async def sight(self) -> Verdict:
        """Check that images change the engine's log-probs of the text after them."""
        return await self.prepared.sight(self.prepared.context.engine.score)

    async def agreement(self) -> Verdict:
        """Compare the engine's log-probs of the turns that it generates with the learner's."""
        context = self.prepared.context
        turns = context.spec.max_turns
        samples = context.train_samples
        groups = await rollout_groups(
            context.episode(),
            [samples[index] for index in range(min(self.num_problems, len(samples)))],
            context.build_env,
            context.env_args(turns),
            group_size=COPIES,
            seed=derive_seed(context.config.seed, "doctor"),
        )
        everything = [trajectory for group in groups for trajectory in group.trajectories]
        broken = check_episodes(everything)
        self.played = [t for t in everything if t.end_reason.is_valid and t.num_model_tokens]
        if not self.played:
            return combine([skipped("the engine wrote no token"), *broken])
        stats = await self._step(self.played)
        return combine([check_agreement(stats, context.config.engine.probe_tolerance), *broken])

    async def _step(self, episodes: Sequence[Trajectory], advantages: Sequence[float] = ()) -> StepStats:
        """Return the statistics of the learner's step on episodes; without advantages it learns nothing."""
        context = self.prepared.context
        return await compute(context.learner.step, [as_training_samples(episodes, context.facts, advantages)])

    async def caches(self) -> Verdict:
        """Check that no cache of the engine outlives a weight push, which changes the learner's weights for good."""
        if not self.played:
            return skipped("no episode could be played")
        context = self.prepared.context
        image_token_id = context.facts.image_token_id
        streams = [stream for t in self.played for stream in t.streams]
        # One with an image, if there is one: encoded images are cached too.
        chosen = next((stream for stream in streams if stream.images), streams[0])
        stream = Rendered(tuple(chosen.ids_T.tolist()), chosen.images)
        prompt = stream.ids[: chosen.prompt_length]
        images = stream.images[: num_images_within(prompt, stream.images, image_token_id)]
        sampling = sampling_params(context.renderer, context.config.rollout.temperature)
        request = GenerateRequest(prompt, images, CACHE_TOKENS, sampling, seed=1)

        async def run() -> float:
            moved = await self._move_learner(stream)
            await context.engine.pause()
            # What a failed push leaves behind is what the check measures next.
            with contextlib.suppress(SyncError):
                await context.weight_sync.push(context.engine.weight_version + 1)
            await context.engine.resume()
            return moved

        update = Update(run, self.prepared.score, self._generated_gap, context.config.model.dtype)
        return await check_update(context.engine, stream, request, update, context.renderer)

    async def _move_learner(self, stream: Rendered) -> float:
        """Update the learner until its log-probs of a stream have moved far enough; return how far, in nats."""
        old = await self.prepared.score(stream.ids, stream.images)
        moved = 0.0
        # Advantages of both signs, so that the update is not zero whatever the loss normalises.
        advantages = [1.0 if number % 2 else -1.0 for number in range(len(self.played))]
        for _ in range(MAX_UPDATES):
            await self._step(self.played, advantages)
            new = await self.prepared.score(stream.ids, stream.images)
            moved = text_gap(stream.ids, new, old, self.prepared.context.facts.image_token_id)
            if moved >= LEAST_MOVE:
                break
        return moved

    async def _generated_gap(self, request: GenerateRequest, completion: Completion) -> float:
        """Return the mean |engine - learner| over a generated turn, as a training step measures it."""
        stream = Rendered((*request.ids, *completion.ids), request.images)
        stats = await self._step([as_trajectory(stream, len(request.ids), completion.logprobs)])
        return stats.logprob_gap_mean
