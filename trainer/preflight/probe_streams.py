"""Token streams for the checks: the run's own problems, rendered as an episode renders them, and variants of them.

Legend: T tokens of a stream, N chosen tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from agents.model.architectures import ModelFacts
from agents.rendering.renderer import Rendered, Renderer
from agents.types import EndReason, ProcessedImage, Trajectory, TrajectoryGroup, Turn
from envs.env import EnvArgs
from envs.execution.runner import EnvRunner
from envs.spec import BuildEnv, EnvLimits
from envs.types import Message, Sample, SampleSource
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import training_samples
from trainer.types import TrainingSample

#: Returns the log-prob, at temperature 1, of each id of a stream but the first: the learner's or the engine's.
Score = Callable[[Sequence[int], Sequence[ProcessedImage]], Awaitable[NDArray[np.float32]]]


@dataclass(frozen=True, eq=False)
class OpenedProblem:
    """A problem at the start of its episode: the messages before the first turn, the tools, and the prompt's tokens."""

    sample: Sample
    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    prompt: Rendered


async def open_problems(
    samples: SampleSource, build_env: BuildEnv, args: EnvArgs, limits: EnvLimits, renderer: Renderer, count: int
) -> list[OpenedProblem]:
    """Open the environments of the first problems and return those that open."""
    opened = []
    for index in range(min(count, len(samples))):
        sample = samples[index]
        runner = EnvRunner(lambda sample=sample: build_env(sample, args), limits, sample.id)
        try:
            messages = (*sample.prompt, *await runner.open())
            opened.append(OpenedProblem(sample, messages, runner.tools, renderer.prompt(messages, runner.tools)))
        except Exception:  # in the agent loop, an environment that fails is data
            continue
        finally:
            await runner.close()
    return opened


def with_answer(problem: OpenedProblem, renderer: Renderer) -> Rendered:
    """Return a problem's prompt and an answer, so that text follows the image even if the prompt ends with it."""
    label = problem.sample.label
    text = f"The answer is \\boxed{{{label if label is not None else 7}}}."
    ids = (*problem.prompt.ids, *renderer.encoder.encode(text), renderer.closer_id)
    return Rendered(ids, problem.prompt.images)


@dataclass(frozen=True, eq=False)
class ImageVariants:
    """One stream with its own images, with changed images, and without images.

    `after_N` indexes the log-probs of the text after the first image, in `original` and `changed`; `after_removed_N`
    indexes the same tokens in `removed`.
    """

    original: Rendered
    changed: Rendered
    removed: Rendered
    after_N: NDArray[np.int64]
    after_removed_N: NDArray[np.int64]

    @classmethod
    def of(cls, stream: Rendered, renderer: Renderer) -> ImageVariants:
        """Make the variants; a changed image is the original upside down, with inverted colours."""
        assert renderer.images is not None and stream.images, "there must be an image"
        changed = []
        for image in stream.images:
            assert image.resized is not None, "the image is needed to make a changed one"
            turned = ImageOps.invert(image.resized.transpose(Image.Transpose.ROTATE_180))
            changed.append(renderer.images.process(turned))
        ids_T = np.asarray(stream.ids)
        is_image_T = ids_T == renderer.image_token_id
        places_N = np.flatnonzero(~is_image_T)
        places_N = places_N[places_N > np.argmax(is_image_T)]
        num_images_before_T = np.cumsum(is_image_T)
        return cls(
            original=stream,
            changed=Rendered(stream.ids, tuple(changed)),
            removed=Rendered(tuple(ids_T[~is_image_T].tolist()), ()),
            after_N=places_N - 1,
            after_removed_N=places_N - num_images_before_T[places_N] - 1,
        )


def as_trajectory(stream: Rendered, num_prompt: int, logprobs: Sequence[float] = ()) -> Trajectory:
    """Return a stream as an episode of one turn: the model wrote all tokens after the prompt, with these log-probs."""
    length = len(stream.ids)
    logprobs_T = np.zeros(length, dtype=np.float32)
    logprobs_T[num_prompt:] = logprobs or 0.0
    turn = Turn(num_prompt, length, "", "stop", ((0, length - num_prompt),), 0, (), {}, 0.0, 0.0)
    return Trajectory(
        sample_id="doctor",
        sample_index=0,
        seed=0,
        ids_T=np.asarray(stream.ids, dtype=np.int64),
        mask_T=np.arange(length) >= num_prompt,
        logprobs_T=logprobs_T,
        images=stream.images,
        turns=(turn,),
        reward=0.0,
        end_reason=EndReason.COMPLETED,
        prompt_length=num_prompt,
    )


def as_training_samples(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], facts: ModelFacts
) -> list[TrainingSample]:
    """Return episodes as the samples of one update, with the given advantages; with advantage 0 nothing is learnt.

    A single episode is used twice, because a group needs two.
    """
    chosen = (*trajectories,)
    weights = (*advantages,)
    if len(chosen) == 1:
        chosen = chosen * 2
        weights = weights * 2
    group = TrajectoryGroup("doctor", chosen)
    return training_samples(
        [group], [weights], facts.image_token_id, facts.merge_size, AlgorithmConfig(), max_new_tokens=1
    )
