"""Token streams for the checks: the run's own problems, rendered as an episode renders them, and variants of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.model.architectures import ModelFacts
from agents.rendering.renderer import Rendered
from agents.types import EndReason, Trajectory, TrajectoryGroup, Turn
from envs.execution.runner import EnvRunner
from envs.spec import EnvLimits
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import training_samples
from trainer.rollouts.live import LiveContext
from trainer.types import TrainingSample


async def open_problems(context: LiveContext, count: int) -> list[Trajectory]:
    """Open the environments of a run's first problems; return those that open, each with an answer as its only turn.

    The answer puts text behind the image even if the prompt ends with it.
    """
    args = context.env_args(context.spec.max_turns)
    renderer = context.renderer
    opened = []
    for index in range(min(count, len(context.train_samples))):
        sample = context.train_samples[index]
        runner = EnvRunner(lambda sample=sample: context.build_env(sample, args), EnvLimits.of(context.spec), sample.id)
        try:
            messages = (*sample.prompt, *await runner.open())
            prompt = renderer.prompt(messages, runner.tools)
        except Exception:  # in the agent loop, an environment that fails is data
            continue
        finally:
            await runner.close()
        answer = f"The answer is \\boxed{{{sample.label if sample.label is not None else 7}}}."
        ids = (*prompt.ids, *renderer.encoder.encode(answer), renderer.closer_id)
        opened.append(as_trajectory(Rendered(ids, prompt.images), len(prompt.ids)))
    return opened


def probe_episodes(context: LiveContext, opened: Sequence[Trajectory]) -> list[Trajectory]:
    """Return episodes with one image and with two, where a problem shows one, and at the end one without images."""
    found: list[Trajectory] = []
    for episode in opened:
        if episode.images:
            ids = tuple(episode.ids_T.tolist())
            # Positions after a second image depend on both grids.
            twice = Rendered((*ids[: episode.prompt_length], *ids), (*episode.images, *episode.images))
            found = [episode, as_trajectory(twice, 2 * episode.prompt_length)]
            break
    renderer = context.renderer
    plain = renderer.prompt(({"role": "user", "content": "What is 3 + 4? Write the answer as \\boxed{}."},))
    ids = (*plain.ids, *renderer.encoder.encode("The answer is \\boxed{7}."), renderer.closer_id)
    return [*found, as_trajectory(Rendered(ids, ()), len(plain.ids))]


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
    trajectories: Sequence[Trajectory], facts: ModelFacts, advantages: Sequence[float] = ()
) -> list[TrainingSample]:
    """Return episodes as the samples of one update; without advantages nothing is learnt from them."""
    weights = advantages or [0.0] * len(trajectories)
    if len(trajectories) == 1:  # a group needs two
        trajectories = [*trajectories, *trajectories]
        weights = [*weights, *weights]
    group = TrajectoryGroup("doctor", tuple(trajectories))
    return training_samples(
        [group], [weights], facts.image_token_id, facts.merge_size, AlgorithmConfig(), max_new_tokens=1
    )
