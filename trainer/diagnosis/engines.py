"""The checks of a prepared run whose engine has started: weights, sight, agreement, and caches after new weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from agents.engine import Session
from agents.engines.hf import HFEngine
from agents.positions import num_images_within
from agents.renderer import Rendered
from agents.rollout import derive_seed, rollout_groups
from agents.types import Completion, GenerateRequest, Trajectory
from trainer.diagnosis.agreement import check_agreement, check_episodes, describe_parts, gaps_by_part
from trainer.diagnosis.caches import LEAST_MOVE, Followed, check_followed
from trainer.diagnosis.finding import Verdict, fault, skipped, together
from trainer.diagnosis.patient import Patient
from trainer.diagnosis.positions import check_scores, text_places
from trainer.diagnosis.sight import check_sight, look
from trainer.diagnosis.streams import samples_of, trajectory_of
from trainer.diagnosis.weights import check_same, rows_of
from trainer.setup import sampling_params
from trainer.weight_sync import SyncError

#: Episodes of each problem that is played, and tokens of a turn that is written to try caches.
COPIES, CACHE_TOKENS = 2, 48
#: Updates that may be taken until the learner has moved enough.
MAX_UPDATES = 8


@dataclass(eq=False)
class Examined:
    """A patient with its engine running; `played` are episodes that it wrote.

    Example::

        examined = Examined(patient)
        await examined.agreement(num_problems=4)    # Verdict("ok", "KL 1.1e-13 over 412 tokens (by turn ...), ...")
    """

    patient: Patient
    played: list[Trajectory] = field(default_factory=list)

    async def weights(self) -> Verdict:
        """The engine's weights against the learner's: by name where it is embedded, else by what they say."""
        parts = self.patient.parts
        if isinstance(parts.engine, HFEngine):
            weights = await asyncio.to_thread(self.patient.learner_weights)
            if not isinstance(weights, str):
                own = dict(parts.engine.model.named_parameters())
                return await asyncio.to_thread(check_same, own, rows_of(weights), "the engine", "the learner")
        verdicts = [await self._same_scores(name, index) for name, index in (("text", -1), ("pictures", 0))]
        return together(verdict for verdict in verdicts if verdict is not None)

    async def _same_scores(self, name: str, index: int) -> Verdict | None:
        """Hold what every server says of a stream against the learner."""
        patient = self.patient
        stream, _ = patient.streams[index]
        if name == "pictures" and not stream.images:
            return None
        places = text_places(stream.ids, patient.parts.facts.image_token_id)
        learner = (await patient.score(stream.ids, stream.images))[places]
        scores = await patient.parts.sync.carrier.scores(stream.ids, stream.images)
        worst = max(scores, key=lambda score: float(np.nan_to_num(np.abs(score[places] - learner), nan=np.inf).mean()))
        verdict = check_scores([worst[places]], [learner], patient.parts.config.model.dtype, "the learner's")
        fix = "the engine runs other weights" if name == "text" else "other vision weights, or other pixels"
        return replace(verdict, found=f"on {name}, {verdict.found}", fix=fix if verdict.fix else "")

    async def sight(self) -> Verdict:
        """Whether the engine sees."""
        if self.patient.blindness:
            return skipped(self.patient.blindness)
        return check_sight(*await look(self.patient.parts.engine.score, self.patient.views))

    async def agreement(self, num_problems: int) -> Verdict:
        """Whether turns that the engine writes are the learner's."""
        parts = self.patient.parts
        turns, samples = parts.spec.max_turns, parts.train_samples
        groups = await rollout_groups(
            parts.episode(turns, parts.config.rollout.temperature),
            [samples[index] for index in range(min(num_problems, len(samples)))],
            parts.build_env,
            parts.env_args(turns),
            group_size=COPIES,
            seed=derive_seed(parts.config.seed, "doctor"),
        )
        everything = [trajectory for group in groups for trajectory in group.trajectories]
        broken = check_episodes(everything)
        self.played = [t for t in everything if t.end_reason.is_valid and t.num_model_tokens]
        if not self.played:
            return broken or skipped("the engine wrote no token")
        samples_seen = samples_of(self.played, [0.0] * len(self.played), parts.facts)
        stats = await asyncio.to_thread(parts.learner.step, [samples_seen])
        verdict = check_agreement(stats, parts.config.engine.probe_tolerance, await self._where())
        return together([verdict, broken]) if broken else verdict

    async def _where(self) -> str:
        """Return in which part of a stream engine and learner part."""
        trajectory = next((t for t in self.played if t.images), self.played[0])
        engine, learner = await self._both(trajectory)
        return describe_parts(gaps_by_part(engine, learner, trajectory, self.patient.parts.facts.image_token_id))

    async def _both(self, trajectory: Trajectory) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        ids = trajectory.ids_T.tolist()
        return await self.patient.parts.engine.score(ids, trajectory.images), await self.patient.score(
            ids, trajectory.images
        )

    async def caches(self) -> Verdict:
        """Whether new weights reach what the engine has read before; the learner's weights are gone after this."""
        if not self.played:
            return skipped("no episode could be played")
        parts, played = self.patient.parts, self.played
        trajectory = next((t for t in played if t.images), played[0])
        prompt = tuple(trajectory.ids_T[: trajectory.prompt_length].tolist())
        sampling = sampling_params(parts.renderer, parts.config.rollout.temperature)
        images = trajectory.images[: num_images_within(prompt, trajectory.images, parts.facts.image_token_id)]
        request = GenerateRequest(prompt, images, CACHE_TOKENS, sampling, seed=1)
        before = await self._gap(trajectory)
        old = await self.patient.score(trajectory.ids_T.tolist(), trajectory.images)
        trouble = ""
        async with parts.engine.session() as session:
            first = await session.generate(request)
            moved = await self._move(trajectory, old)
            await parts.engine.pause()
            try:
                await parts.sync.push(parts.engine.weight_version + 1)
            except SyncError as error:
                trouble = str(error)
            await parts.engine.resume()
            suffix = parts.renderer.suffix(({"role": "user", "content": "Go on."},), first.ids[-1])
            longer = replace(request, ids=(*prompt, *first.ids, *suffix.ids), seed=2)
            again, fresh = await asyncio.gather(session.generate(longer), self._write(request))
        after = {
            "scored again": await self._gap(trajectory),
            "new session": await self._written_gap(request, fresh),
            "open session": await self._written_gap(longer, again),
        }
        learner = parts.config.learner
        verdict = check_followed(Followed(before, moved, after, not (learner.freeze_vision or learner.lora_rank)))
        if trouble and verdict.status != "fault":
            return fault(trouble, "see what is found of the engine's weights")
        return verdict

    async def _write(self, request: GenerateRequest) -> Completion:
        session: Session
        async with self.patient.parts.engine.session() as session:
            return await session.generate(request)

    async def _move(self, trajectory: Trajectory, old: NDArray[np.float32]) -> float:
        """Take updates until the learner says something else of the stream; return by how much."""
        parts, ids = self.patient.parts, trajectory.ids_T.tolist()
        places, moved = text_places(ids, parts.facts.image_token_id), 0.0
        advantages = [1.0 if number % 2 else -1.0 for number in range(len(self.played))]
        for _ in range(MAX_UPDATES):
            await asyncio.to_thread(parts.learner.step, [samples_of(self.played, advantages, parts.facts)])
            new = await self.patient.score(ids, trajectory.images)
            moved = float(np.abs(new - old)[places].mean())
            if not moved < LEAST_MOVE:
                break
        return moved

    async def _gap(self, trajectory: Trajectory) -> float:
        engine, learner = await self._both(trajectory)
        places = text_places(trajectory.ids_T.tolist(), self.patient.parts.facts.image_token_id)
        return float(np.abs(engine - learner)[places].mean())

    async def _written_gap(self, request: GenerateRequest, completion: Completion) -> float:
        """Return how far the learner is from what was written, as a step would measure it."""
        stream = Rendered((*request.ids, *completion.ids), request.images)
        written = trajectory_of(stream, len(request.ids), completion.logprobs)
        parts = self.patient.parts
        stats = await asyncio.to_thread(parts.learner.step, [samples_of([written], [0.0], parts.facts)])
        return stats.logprob_gap_mean
