"""Token streams to try a run's network on: its own problems, opened as an episode opens them, and variants of them.

Legend: T tokens of a stream, N chosen tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from agents.renderer import Rendered, Renderer
from agents.types import EndReason, ProcessedImage, Trajectory, TrajectoryGroup, Turn
from envs.env import EnvArgs
from envs.runner import EnvLimits, EnvRunner
from envs.spec import BuildEnv
from envs.types import Message, Sample, SampleSource
from trainer.batching import training_samples
from trainer.config import AlgorithmConfig
from trainer.trainer import ModelFacts
from trainer.types import TrainingSample

#: Gives the log-prob of each id of a stream but the first, at temperature 1: a learner's or an engine's.
Score = Callable[[Sequence[int], Sequence[ProcessedImage]], Awaitable[NDArray[np.float32]]]


@dataclass(frozen=True, eq=False)
class Opening:
    """A problem as its episode begins: what is said before the first turn, the tools, and the prompt as tokens."""

    sample: Sample
    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    prompt: Rendered


async def open_problems(
    samples: SampleSource, build_env: BuildEnv, args: EnvArgs, limits: EnvLimits, renderer: Renderer, count: int
) -> list[Opening]:
    """Open the environments of the first problems; those that fail are left out."""
    found = []
    for index in range(min(count, len(samples))):
        sample = samples[index]
        runner = EnvRunner(lambda sample=sample: build_env(sample, args), limits)
        try:
            messages = (*sample.prompt, *await runner.open())
            found.append(Opening(sample, messages, runner.tools, renderer.prompt(messages, runner.tools)))
        except Exception:  # what an environment says may be shown or not; the agent loop makes data of it
            continue
        finally:
            await runner.close()
    return found


def answered(opening: Opening, renderer: Renderer) -> Rendered:
    """Return a problem's prompt with an answer behind it, so that text follows the picture wherever it stands."""
    label = opening.sample.label
    text = f"The answer is \\boxed{{{label if label is not None else 7}}}."
    ids = (*opening.prompt.ids, *renderer.encoder.encode(text), renderer.closer_id)
    return Rendered(ids, opening.prompt.images)


@dataclass(frozen=True, eq=False)
class Views:
    """One stream with its pictures, with others in their place, and with none; and where text follows the first one.

    `after_N` are places in the log-probs of the first two, `after_none_N` those of the same tokens in the third.
    """

    right: Rendered
    other: Rendered
    none: Rendered
    after_N: NDArray[np.int64]
    after_none_N: NDArray[np.int64]

    @classmethod
    def of(cls, stream: Rendered, renderer: Renderer) -> Views:
        """Make the variants: the other picture is the same one, upside down and in the opposite colours."""
        assert renderer.images is not None and stream.images, "there must be a picture"
        others = []
        for image in stream.images:
            assert image.picture is not None, "the picture is needed to make another one of it"
            turned = ImageOps.invert(image.picture.transpose(Image.Transpose.ROTATE_180))
            others.append(renderer.images.process(turned))
        ids_T = np.asarray(stream.ids)
        is_image_T = ids_T == renderer.image_token_id
        places_N = np.flatnonzero(~is_image_T)
        places_N = places_N[places_N > np.argmax(is_image_T)]
        num_images_before_T = np.cumsum(is_image_T)
        return cls(
            right=stream,
            other=Rendered(stream.ids, tuple(others)),
            none=Rendered(tuple(ids_T[~is_image_T].tolist()), ()),
            after_N=places_N - 1,
            after_none_N=places_N - num_images_before_T[places_N] - 1,
        )


def trajectory_of(stream: Rendered, num_prompt: int, logprobs: Sequence[float] = ()) -> Trajectory:
    """Return a stream as an episode of one turn: all behind the prompt was written by the model, so likely."""
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


def samples_of(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], facts: ModelFacts
) -> list[TrainingSample]:
    """Return episodes as the samples of one update, with advantages of our own: with 0 they are measured, not learnt.

    One episode alone is taken twice, for a group needs two.
    """
    chosen, weights = (*trajectories,), (*advantages,)
    if len(chosen) == 1:
        chosen, weights = chosen * 2, weights * 2
    group = TrajectoryGroup("doctor", chosen)
    return training_samples(
        [group], [weights], facts.image_token_id, facts.merge_size, AlgorithmConfig(), max_new_tokens=1
    )
