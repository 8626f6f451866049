"""Token streams for the checks: the run's own problems, rendered as an episode renders them, and variants of them.

Legend: T tokens of a stream, N chosen tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.model.architectures import ModelFacts
from agents.rendering.renderer import Rendered, Renderer
from agents.types import EndReason, Trajectory, TrajectoryGroup, Turn
from envs.env import EnvArgs
from envs.execution.runner import EnvRunner
from envs.spec import BuildEnv, EnvLimits
from envs.types import Message, Sample, SampleSource
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import training_samples
from trainer.types import TrainingSample


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
