"""The checks of a prepared run that need no engine: its problems, its pictures, its learner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agents.model import PolicyModel
from agents.renderer import Rendered
from agents.types import ProcessedImage
from envs.env import EnvArgs
from envs.runner import EnvLimits
from envs.types import message_images
from trainer.diagnosis.answers import check_answers, mark
from trainer.diagnosis.data import check_lengths
from trainer.diagnosis.finding import Verdict, skipped, together
from trainer.diagnosis.free import GIB, host_free
from trainer.diagnosis.pictures import check_patches, check_settings, read_settings, test_picture, transformers_patches
from trainer.diagnosis.positions import (
    check_positions,
    check_scores,
    load_reference,
    reference_logprobs,
    text_places,
)
from trainer.diagnosis.sight import check_sight, look
from trainer.diagnosis.streams import Opening, Views, answered, open_problems, samples_of, trajectory_of
from trainer.diagnosis.template import check_format, check_played, play_scripted
from trainer.diagnosis.weights import CheckpointFiles, check_learner, rows_of
from trainer.memory import Parameters
from trainer.setup import RunParts

#: A network is loaded a second time only where that takes less, in float32, and less than half of what is free.
MAX_REFERENCE_BYTES = 16 * GIB


@dataclass(eq=False)
class Patient:
    """A prepared run and its first problems; `network` is the checkpoint's, without weights.

    Example::

        patient = await Patient.admit(parts, network, num_problems=4)
        await patient.sight()       # Verdict("ok", "another picture moves the text after it by 0.84 nats, ...")
    """

    parts: RunParts
    network: PolicyModel
    openings: Sequence[Opening]

    @classmethod
    async def admit(cls, parts: RunParts, network: PolicyModel, num_problems: int) -> Patient:
        """Open the first problems."""
        limits, args = EnvLimits.of(parts.spec), parts.env_args(parts.spec.max_turns)
        samples, renderer = parts.train_samples, parts.renderer
        return cls(parts, network, await open_problems(samples, parts.build_env, args, limits, renderer, num_problems))

    @property
    def args(self) -> EnvArgs:
        """What an environment is told of an episode."""
        return self.parts.env_args(self.parts.spec.max_turns)

    @property
    def limits(self) -> EnvLimits:
        """How long an environment may take."""
        return EnvLimits.of(self.parts.spec)

    @cached_property
    def pictured(self) -> Opening | None:
        """The first problem that shows a picture before the first turn."""
        return next((opening for opening in self.openings if opening.prompt.images), None)

    @cached_property
    def blindness(self) -> str:
        """Why there is nothing to see, "" where there is."""
        if not self.network.architecture.vision:
            return f"a {self.network.config.model_type} network takes no pictures"
        return "" if self.pictured else f"none of the first {len(self.openings)} problems shows a picture"

    @cached_property
    def streams(self) -> list[tuple[Rendered, int]]:
        """Streams with an answer, and how long their prompts are; those with pictures first, the last has none."""
        found: list[tuple[Rendered, int]] = []
        renderer = self.parts.renderer
        if self.pictured is not None:
            stream, prompt = answered(self.pictured, renderer), self.pictured.prompt
            twice = Rendered((*prompt.ids, *stream.ids), (*prompt.images, *stream.images))
            found += [(stream, len(prompt.ids)), (twice, 2 * len(prompt.ids))]
        plain = renderer.prompt(({"role": "user", "content": "What is 3 + 4? Write the answer as \\boxed{}."},))
        ids = (*plain.ids, *renderer.encoder.encode("The answer is \\boxed{7}."), renderer.closer_id)
        return [*found, (Rendered(ids, ()), len(plain.ids))]

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the learner's log-probs."""
        return await asyncio.to_thread(self.parts.learner.score, ids, images)

    async def data(self) -> Verdict:
        """Lengths of prompts."""
        lengths = [len(opening.prompt.ids) for opening in self.openings]
        config, parts = self.parts.config, self.parts
        num_kept, room = len(parts.train_samples), config.model.context_length
        return check_lengths(lengths, num_kept, parts.num_overlong, config.env.max_new_tokens, room)

    async def template(self) -> Verdict:
        """Two scripted turns against the template's own rendering."""
        if not self.openings:
            return skipped("no problem could be opened")
        opening, parts = self.openings[0], self.parts
        played = await play_scripted(opening, parts.renderer, parts.build_env, self.args, self.limits)
        return together([check_played(played), *check_format(parts.renderer, self.args, bool(opening.tools))])

    async def answers(self, count: int, with_wrong: bool) -> Verdict:
        """Rewards of right and wrong answers."""
        parts = self.parts
        marks = await mark(parts.train_samples, parts.build_env, self.args, self.limits, count, with_wrong)
        return check_answers(marks, self.args.reward_max_val, self.args.reward_min_val)

    async def preprocessing(self) -> Verdict:
        """Settings and patches of pictures."""
        store, path = self.parts.renderer.images, self.parts.model_path
        if store is None or not self.network.architecture.vision:
            return skipped(f"a {self.network.config.model_type} network takes no pictures")
        settings = read_settings(path)
        pictures = [test_picture()]
        pictures += list(message_images(self.pictured.messages))[:1] if self.pictured else []
        verdicts = [check_settings(settings, self.network.config.vision_config, self.network.config.model_type)]
        for picture in pictures:
            theirs_PD, grid = transformers_patches(path, picture.convert("RGB"))
            verdicts.append(check_patches(store.process(picture), theirs_PD, grid, settings))
        return together(verdicts)

    async def positions(self) -> Verdict:
        """What the learner is told of places, against Transformers."""
        played = [trajectory_of(stream, num) for stream, num in self.streams]
        return check_positions(samples_of(played, [0.0] * len(played), self.parts.facts), self.network)

    async def forward(self) -> Verdict:
        """What the learner makes of streams, against Transformers."""
        if not isinstance(self.reference, str):
            own, expected = [], []
            for stream, _ in self.streams:
                places = text_places(stream.ids, self.parts.facts.image_token_id)
                own.append((await self.score(stream.ids, stream.images))[places])
                expected.append((await asyncio.to_thread(reference_logprobs, self.reference, stream))[places])
            return check_scores(own, expected, self.parts.config.model.dtype, "Transformers'")
        return skipped(self.reference)

    async def sight(self) -> Verdict:
        """Whether the learner sees."""
        if self.blindness:
            return skipped(self.blindness)
        return check_sight(*await look(self.score, self.views))

    async def weights(self) -> Verdict:
        """The learner's weights against the checkpoint's."""
        weights = await asyncio.to_thread(self.learner_weights)
        if isinstance(weights, str):
            return skipped(weights)
        if self.network.architecture.names_are_saved:
            return await asyncio.to_thread(check_learner, weights, CheckpointFiles(self.parts.model_path).rows)
        if isinstance(self.reference, str):
            return skipped(f"saved under other names than they have in memory, and {self.reference}")
        return check_learner(weights, rows_of(dict(self.reference.named_parameters())))

    @cached_property
    def views(self) -> Views:
        """The stream with a picture, seen in several ways."""
        assert self.pictured is not None, self.blindness
        return Views.of(answered(self.pictured, self.parts.renderer), self.parts.renderer)

    @cached_property
    def reference(self) -> Any:
        """The checkpoint as Transformers runs it; a text that says why not, where it is too large."""
        count = Parameters.of(self.network)
        size = 4 * (count.trained + count.frozen)
        room = min(MAX_REFERENCE_BYTES, host_free() // 2)
        if size > room:
            return f"a second network would take {size / GIB:.1f} GiB, {room / GIB:.1f} may be used for it"
        return load_reference(self.network, self.parts.model_path)

    def learner_weights(self) -> Mapping[str, Tensor] | str:
        """Return the learner's weights; a text that says why not, where they would have to be sent here whole."""
        count = Parameters.of(self.network)
        size, room = 4 * (count.trained + count.frozen), host_free() // 2
        if self.parts.config.cluster.num_ranks and size > room:
            return f"the weights take {size / GIB:.1f} GiB here, {room / GIB:.1f} may be used for them"
        return self.parts.learner.weights()
