"""The checks of a prepared run that need no engine: they use its problems, its images and its learner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agents.checking.image_gaps import Score, check_image_gaps, measure_image_gaps
from agents.model.cpu import compute
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Rendered
from agents.rendering.thinking import find_thinking
from agents.types import ProcessedImage, Trajectory
from envs.checks import Check, Verdict, combine, skipped
from envs.env import EnvArgs
from envs.spec import EnvLimits
from envs.types import message_images
from trainer.planning.memory import GIB, Parameters
from trainer.preflight.checks.chat_template import check_format, check_scripted_episode, play_scripted
from trainer.preflight.checks.free_memory import host_free
from trainer.preflight.checks.gold_answers import check_answers, grade_answers
from trainer.preflight.checks.image_processing import (
    check_patches,
    check_settings,
    read_settings,
    test_image,
    transformers_patches,
)
from trainer.preflight.checks.positions import (
    check_positions,
    check_scores,
    load_reference,
    reference_logprobs,
    text_places,
)
from trainer.preflight.checks.prompt_lengths import check_lengths
from trainer.preflight.checks.weights import check_learner, rows_of, rows_of_checkpoint
from trainer.preflight.probe_streams import (
    OpenedProblem,
    as_training_samples,
    as_trajectory,
    open_problems,
    with_answer,
)
from trainer.rollouts.live import LiveContext
from trainer.rollouts.recorded import RecordedContext
from trainer.setup.run_context import RunContext

#: A second network is loaded only if it takes less than this in float32, and less than half of the free memory.
MAX_REFERENCE_BYTES = 16 * GIB


@dataclass(frozen=True, eq=False)
class LearnerChecks:
    """Checks the learner of a run on the token streams that a subclass gives; `network` has no weights."""

    context: RunContext
    network: PolicyModel

    @cached_property
    def episodes(self) -> Sequence[Trajectory]:
        """The streams whose positions are compared."""
        raise NotImplementedError

    @cached_property
    def stream_with_image(self) -> Rendered | str:
        """A stream that shows an image or, if there is none, the reason."""
        raise NotImplementedError

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the learner's log-probs of a stream."""
        return await compute(self.context.learner.score, ids, images)

    def positions(self) -> Verdict:
        """Compare the learner's positions with those of Transformers."""
        if not self.episodes:
            return skipped("no episode was recorded")
        samples = as_training_samples(self.episodes, [0.0] * len(self.episodes), self.context.facts)
        return check_positions(samples, self.network)

    async def image_sensitivity(self, score: Score | None = None) -> Verdict:
        """Check that images change the log-probs of the text after them: the learner's, or those of `score`."""
        stream = self.stream_with_image
        if isinstance(stream, str):
            return skipped(stream)
        return check_image_gaps(await measure_image_gaps(score or self.score, stream, self.context.renderer))


@dataclass(frozen=True, eq=False)
class RecordedChecks(LearnerChecks):
    """Checks a run that replays rollouts, on one episode of each of its first groups."""

    context: RecordedContext
    num_groups: int

    @cached_property
    def episodes(self) -> Sequence[Trajectory]:
        """The recorded episodes."""
        if not self.context.recorded.steps:
            return []
        groups = self.context.recorded.rollout(1, self.context.renderer.images).groups[: self.num_groups]
        return [group.trajectories[0] for group in groups if group.trajectories[0].num_model_tokens]

    @cached_property
    def stream_with_image(self) -> Rendered | str:
        """The first recorded episode that shows an image."""
        for episode in self.episodes:
            if episode.images:
                return Rendered(tuple(episode.ids_T.tolist()), episode.images)
        return f"none of the first {len(self.episodes)} recorded episodes shows an image"

    def checks(self) -> Mapping[str, Check]:
        """Return the checks by name."""
        return {"positions": self.positions, "sight of the learner": self.image_sensitivity}


@dataclass(frozen=True, eq=False)
class PreparedChecks(LearnerChecks):
    """Checks a prepared run on its first problems.

    Example::

        checks = await PreparedChecks.open(context, network, num_problems=4)
        await checks.image_sensitivity()   # Verdict("ok", "another image moves the text after it by 0.84 nats, ...")
    """

    context: LiveContext
    problems: Sequence[OpenedProblem]

    def checks(self, num_answers: int, with_wrong: bool) -> Mapping[str, Check]:
        """Return the checks by name; the rewards of wrong answers are checked if wanted."""
        return {
            "data": self.data,
            "template in play": self.template_in_play,
            "gold answers": partial(self.gold_answers, num_answers, with_wrong),
            "image preprocessing": self.image_preprocessing,
            "positions": self.positions,
            "forward pass": self.forward_pass,
            "weights of the learner": self.weights,
            "sight of the learner": self.image_sensitivity,
        }

    @classmethod
    async def open(cls, context: LiveContext, network: PolicyModel, num_problems: int) -> PreparedChecks:
        """Open the first problems of a run, and return its checks."""
        limits = EnvLimits.of(context.spec)
        args = context.env_args(context.spec.max_turns)
        samples = context.train_samples
        renderer = context.renderer
        problems = await open_problems(samples, context.build_env, args, limits, renderer, num_problems)
        return cls(context, network, problems)

    @property
    def args(self) -> EnvArgs:
        """The arguments of an environment."""
        return self.context.env_args(self.context.spec.max_turns)

    @property
    def limits(self) -> EnvLimits:
        """The time limits of an environment."""
        return EnvLimits.of(self.context.spec)

    @cached_property
    def problem_with_image(self) -> OpenedProblem | None:
        """The first problem that shows an image before the first turn."""
        return next((problem for problem in self.problems if problem.prompt.images), None)

    @cached_property
    def stream_with_image(self) -> Rendered | str:
        """The stream of the first problem with an image."""
        if not self.network.architecture.vision:
            return f"a {self.network.config.model_type} network takes no images"
        if self.problem_with_image is None:
            return f"none of the first {len(self.problems)} problems shows an image"
        return with_answer(self.problem_with_image, self.context.renderer)

    @cached_property
    def streams(self) -> list[tuple[Rendered, int]]:
        """Streams with an answer, each with the length of its prompt; the last one has no image."""
        found: list[tuple[Rendered, int]] = []
        renderer = self.context.renderer
        if self.problem_with_image is not None:
            stream = with_answer(self.problem_with_image, renderer)
            prompt = self.problem_with_image.prompt
            twice = Rendered((*prompt.ids, *stream.ids), (*prompt.images, *stream.images))
            found += [(stream, len(prompt.ids)), (twice, 2 * len(prompt.ids))]
        plain = renderer.prompt(({"role": "user", "content": "What is 3 + 4? Write the answer as \\boxed{}."},))
        ids = (*plain.ids, *renderer.encoder.encode("The answer is \\boxed{7}."), renderer.closer_id)
        return [*found, (Rendered(ids, ()), len(plain.ids))]

    @cached_property
    def episodes(self) -> Sequence[Trajectory]:
        """The streams as episodes."""
        return [as_trajectory(stream, num_prompt) for stream, num_prompt in self.streams]

    def data(self) -> Verdict:
        """Check the lengths of prompts."""
        lengths = [len(problem.prompt.ids) for problem in self.problems]
        config = self.context.config
        context = self.context
        num_kept = len(context.train_samples)
        context_length = config.model.context_length
        return check_lengths(lengths, num_kept, context.num_overlong, config.env.max_new_tokens, context_length)

    async def template_in_play(self) -> Verdict:
        """Compare an episode of two scripted turns with the chat template's own rendering of it."""
        if not self.problems:
            return skipped("no problem could be opened")
        problem = self.problems[0]
        context = self.context
        thinking = find_thinking(context.renderer.template, context.spec.thinking)
        played = await play_scripted(problem, context.renderer, context.build_env, self.args, self.limits, thinking)
        format_verdicts = check_format(context.renderer, self.args, bool(problem.tools))
        return combine([check_scripted_episode(played), *format_verdicts])

    async def gold_answers(self, count: int, with_wrong: bool) -> Verdict:
        """Check the rewards of right answers and, if wanted, of wrong answers."""
        context, success = self.context, self.context.spec.success_rule
        if success is None:
            return skipped("the environment says that there is no success, so no answer is known to be right")
        rewards = await grade_answers(
            context.train_samples, context.build_env, self.args, self.limits, success, count, with_wrong
        )
        return check_answers(rewards, success, self.args.reward_min_val)

    def image_preprocessing(self) -> Verdict:
        """Compare the image settings with the network's, and the patches of images with those of Transformers."""
        store = self.context.renderer.images
        path = self.context.model_path
        if store is None or not self.network.architecture.vision:
            return skipped(f"a {self.network.config.model_type} network takes no images")
        settings = read_settings(path)
        images = [test_image()]
        images += message_images(self.problem_with_image.messages)[:1] if self.problem_with_image else []
        verdicts = [check_settings(settings, self.network.config.vision_config, self.network.config.model_type)]
        for image in images:
            theirs_PD, grid = transformers_patches(path, image.convert("RGB"))
            verdicts.append(check_patches(store.process(image), theirs_PD, grid, settings))
        return combine(verdicts)

    async def forward_pass(self) -> Verdict:
        """Compare the learner's log-probs with those of Transformers."""
        if isinstance(self.reference, str):
            return skipped(self.reference)
        own = []
        expected = []
        for stream, _ in self.streams:
            places = text_places(stream.ids, self.context.facts.image_token_id)
            own.append((await self.score(stream.ids, stream.images))[places])
            expected.append((await compute(reference_logprobs, self.reference, stream))[places])
        return check_scores(own, expected, self.context.config.model.dtype, "Transformers'")

    async def weights(self) -> Verdict:
        """Compare the learner's weights with the checkpoint's."""
        weights = await asyncio.to_thread(self.learner_weights)
        if isinstance(weights, str):
            return skipped(weights)
        if self.network.architecture.names_are_saved:
            return await asyncio.to_thread(check_learner, weights, rows_of_checkpoint(self.context.model_path))
        if isinstance(self.reference, str):
            return skipped(f"saved under other names than they have in memory, and {self.reference}")
        return check_learner(weights, rows_of(dict(self.reference.named_parameters())))

    @cached_property
    def reference(self) -> Any:
        """The checkpoint as Transformers runs it; if it is too large, a text that says so."""
        count = Parameters.of(self.network)
        size = 4 * (count.trained + count.frozen)
        room = min(MAX_REFERENCE_BYTES, host_free() // 2)
        if size > room:
            return f"a second network would take {size / GIB:.1f} GiB, {room / GIB:.1f} may be used for it"
        return load_reference(self.network, self.context.model_path)

    def learner_weights(self) -> Mapping[str, Tensor] | str:
        """Return the learner's weights; if other processes hold them and they do not fit here, a text that says so."""
        count = Parameters.of(self.network)
        size = 4 * (count.trained + count.frozen)
        room = host_free() // 2
        if self.context.config.cluster.num_ranks and size > room:
            return f"the weights take {size / GIB:.1f} GiB here, {room / GIB:.1f} may be used for them"
        return self.context.learner.weights()
