"""The checks of a prepared run with a running engine: weights, image sensitivity, agreement, and stale caches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from agents.checking.reference import text_gap
from agents.checking.weights import turns_over_update
from agents.engines.base import memory_engine
from agents.engines.weight_servers import servers_of
from agents.model.cpu import compute
from agents.model.mrope import num_images_within
from agents.rendering.renderer import Rendered
from agents.rollout.groups import derive_seed
from agents.rollout.manager import rollout_groups
from agents.types import Completion, GenerateRequest, Trajectory
from envs.checks import Verdict, combine, fault, ok, skipped
from trainer.preflight.checks.engine_agreement import check_agreement, check_episodes, describe_parts, gaps_by_part
from trainer.preflight.checks.positions import check_scores, text_places
from trainer.preflight.checks.stale_cache import LEAST_MOVE, CacheGaps, check_caches
from trainer.preflight.checks.versions import check_releases
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

    async def start(self) -> Verdict:
        """Start the engine."""
        await self.prepared.context.weight_sync.transport.start()
        return self.describe()

    def describe(self) -> Verdict:
        """Return which engine runs, and what is not known of the releases of its servers."""
        engine = self.prepared.context.engine
        servers = servers_of(engine)
        if servers:
            clients = [server.client for server in servers.servers.up]
        else:
            clients = []
        shown = ", ".join(sorted({client.release_name for client in clients if client.release_name}))
        doubts = check_releases(client.doubt for client in clients)
        return combine([ok(f"{type(engine).__name__} runs {shown}".strip()), *doubts])

    async def weights(self) -> Verdict:
        """Compare the engine's weights with the learner's: by name if it is embedded, else by log-probs of streams."""
        context = self.prepared.context
        if engine := memory_engine(context.engine):
            weights = await asyncio.to_thread(self.prepared.learner_weights)
            if not isinstance(weights, str):
                own = dict(engine.weights())
                return await asyncio.to_thread(check_same, own, rows_of(weights), "the engine", "the learner")
        verdicts = [await self._same_scores(name, index) for name, index in (("text", -1), ("images", 0))]
        return combine(verdict for verdict in verdicts if verdict is not None)

    async def _same_scores(self, name: str, index: int) -> Verdict | None:
        """Compare every server's log-probs of a stream with the learner's; None without an image to compare on."""
        prepared = self.prepared
        stream, _ = prepared.streams[index]
        if name == "images" and not stream.images:
            return None
        learner = await prepared.score(stream.ids, stream.images)
        scores = await prepared.context.weight_sync.transport.scores(stream.ids, stream.images)
        worst = max(scores, key=lambda score: self._text_gap(stream.ids, score, learner))
        places = text_places(stream.ids, prepared.context.facts.image_token_id)
        verdict = check_scores([worst[places]], [learner[places]], prepared.context.config.model.dtype, "the learner's")
        if name == "text":
            fix = "the engine runs other weights"
        else:
            fix = "other vision weights, or other pixels"
        return replace(verdict, found=f"on {name}, {verdict.found}", fix=fix if verdict.fix else "")

    def _text_gap(self, ids: Sequence[int], one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
        """Return the mean |d| over the text of a stream, in nats."""
        return text_gap(ids, one, other, self.prepared.context.facts.image_token_id)

    async def image_sensitivity(self) -> Verdict:
        """Check that images change the engine's log-probs of the text after them."""
        return await self.prepared.image_sensitivity(self.prepared.context.engine.score)

    async def agreement(self) -> Verdict:
        """Compare the engine's log-probs of the turns that it generates with the learner's."""
        context = self.prepared.context
        turns = context.spec.max_turns
        samples = context.train_samples
        groups = await rollout_groups(
            context.episode(turns, context.config.rollout.temperature),
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
            return broken or skipped("the engine wrote no token")
        stats = await self._step(self.played)
        verdict = check_agreement(stats, context.config.engine.probe_tolerance, await self._differing_parts())
        if broken:
            return combine([verdict, broken])
        return verdict

    async def _step(self, episodes: Sequence[Trajectory], advantages: Sequence[float] | None = None) -> StepStats:
        """Return the statistics of the learner's step on episodes; without advantages it learns nothing."""
        context = self.prepared.context
        samples = as_training_samples(episodes, advantages or [0.0] * len(episodes), context.facts)
        return await compute(context.learner.step, [samples])

    async def _differing_parts(self) -> str:
        """Return in which parts of a stream engine and learner differ; "" if in none."""
        trajectory = self._played_with_image()
        engine, learner = await self._scores(trajectory)
        return describe_parts(gaps_by_part(engine, learner, trajectory, self.prepared.context.facts.image_token_id))

    def _played_with_image(self) -> Trajectory:
        """Return the first played episode with an image or, if none has one, the first of all."""
        return next((t for t in self.played if t.images), self.played[0])

    async def _scores(self, trajectory: Trajectory) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the engine's and the learner's log-probs of an episode."""
        ids = trajectory.ids_T.tolist()
        images = trajectory.images
        return await self.prepared.context.engine.score(ids, images), await self.prepared.score(ids, images)

    async def caches(self) -> Verdict:
        """Check that no cache of the engine outlives a weight push. The check changes the learner's weights for good.

        It updates the learner, pushes the weights, and compares engine and learner on what the engine has read before:
        the stream scored again, its prompt continued in a new session, and in a session that was open meanwhile.
        """
        if not self.played:
            return skipped("no episode could be played")
        context = self.prepared.context
        trajectory = self._played_with_image()
        ids = trajectory.ids_T.tolist()
        prompt = tuple(ids[: trajectory.prompt_length])
        sampling = sampling_params(context.renderer, context.config.rollout.temperature)
        images = trajectory.images[: num_images_within(prompt, trajectory.images, context.facts.image_token_id)]
        request = GenerateRequest(prompt, images, CACHE_TOKENS, sampling, seed=1)
        engine, old = await self._scores(trajectory)
        before = self._text_gap(ids, engine, old)
        moved = 0.0
        sync_error = ""

        async def update() -> None:
            nonlocal moved, sync_error
            moved = await self._move_learner(trajectory, old)
            await context.engine.pause()
            try:
                await context.weight_sync.push(context.engine.weight_version + 1)
            except SyncError as error:
                sync_error = str(error)
            await context.engine.resume()

        def follow(request: GenerateRequest, first: Completion) -> GenerateRequest:
            suffix = context.renderer.suffix(({"role": "user", "content": "Go on."},), first.ids[-1])
            return replace(request, ids=(*request.ids, *first.ids, *suffix.ids), seed=2)

        new_session, open_session = await turns_over_update(context.engine, request, follow, update)
        after = {
            "scored again": self._text_gap(ids, *await self._scores(trajectory)),
            "new session": await self._generated_gap(*new_session),
            "open session": await self._generated_gap(*open_session),
        }
        learner = context.config.learner
        verdict = check_caches(CacheGaps(before, moved, after, not (learner.freeze_vision or learner.lora_rank)))
        if sync_error and verdict.status != "fault":
            return fault(sync_error, "see what is found of the engine's weights")
        return verdict

    async def _move_learner(self, trajectory: Trajectory, old: NDArray[np.float32]) -> float:
        """Update the learner until its log-probs of a stream have moved far enough; return how far, in nats."""
        ids = trajectory.ids_T.tolist()
        moved = 0.0
        advantages = [1.0 if number % 2 else -1.0 for number in range(len(self.played))]
        for _ in range(MAX_UPDATES):
            await self._step(self.played, advantages)
            moved = self._text_gap(ids, await self.prepared.score(ids, trajectory.images), old)
            if moved >= LEAST_MOVE:
                break
        return moved

    async def _generated_gap(self, request: GenerateRequest, completion: Completion) -> float:
        """Return the mean |engine - learner| over a generated turn, as a training step measures it."""
        stream = Rendered((*request.ids, *completion.ids), request.images)
        stats = await self._step([as_trajectory(stream, len(request.ids), completion.logprobs)])
        return stats.logprob_gap_mean
