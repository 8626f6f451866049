"""Calls the user's functions that judge episodes once, on a scripted episode, before anything is spent on real ones."""

from __future__ import annotations

import asyncio

from agents.endpoints.judge import load_rewards
from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.rewards import NONE_APPLIES
from agents.types import EndReason, GenerateRequest, SamplingParams, Trajectory, TrajectoryGroup
from envs.checking.error_location import located_line
from envs.env import EnvArgs
from envs.errors import UserError
from envs.spec import BuildEnv, EnvLimits, EnvSpec
from envs.types import Sample, SampleSource
from trainer.algorithms.advantages import is_own, own_advantages
from trainer.config.algorithm import AlgorithmConfig
from trainer.setup.plugins import own_filter
from trainer.setup.problems import first_samples

#: Room for the scripted turns, whatever the run's own budget is.
MAX_NEW_TOKENS = 4096


def try_functions(
    spec: EnvSpec,
    build_env: BuildEnv,
    args: EnvArgs,
    renderer: Renderer,
    samples: SampleSource,
    algorithm: AlgorithmConfig = AlgorithmConfig(),
    group_filter: str = "",
    group_size: int = 2,
) -> None:
    """Call reward functions, group filter and advantage on the first of a few samples whose episode can be scored.

    Raises:
        UserError: one fails; names the function, its file and line. Nothing is called where no episode can be scored.
    """
    keeps = own_filter(group_filter)
    judges_groups = bool(keeps) or is_own(algorithm.advantage)
    if not (judges_groups or any(entry.reward for entry in spec.entries)):
        return
    for env_id, first in first_samples(spec, samples).items():
        entry = spec.parts.get(env_id, spec)
        rewards = load_rewards(entry.reward)
        played = (asyncio.run(_played(entry, build_env, args, renderer, sample)) for sample in first)
        # A broken episode says nothing of the functions that judge it.
        scorable = next((episode for episode in played if episode.end_reason.is_valid), None)
        if scorable is None:
            continue
        scored = asyncio.run(rewards.score(scorable, EnvLimits.of(entry)))
        if scored.end_reason is EndReason.REWARD_ERROR and not (scored.error or "").startswith(NONE_APPLIES):
            rule = "must give a scripted episode its reward"
            raise UserError("--reward", rule, located_line(scored.error or ""), "fix the function")
        # The same episode in every place: only whether the calls work is asked.
        group = TrajectoryGroup(scored.sample_id, (scored,) * group_size)
        if keeps:
            keeps(group)
        if is_own(algorithm.advantage):
            own_advantages([group], algorithm)


async def _played(spec: EnvSpec, build_env: BuildEnv, args: EnvArgs, renderer: Renderer, sample: Sample) -> Trajectory:
    """Return an episode in which every turn is the sample's label as an answer."""

    def answer(turn: int, request: GenerateRequest) -> str:
        # The label scores where a grader reads the answer; any other text would do for the call.
        return f"\\boxed{{{sample.label if sample.label is not None else 7}}}"

    engine = ScriptedEngine(renderer.tokenizer, answer, context_length=10 * MAX_NEW_TOKENS)
    limits = Limits(min(2, args.max_turns), MAX_NEW_TOKENS, EnvLimits.of(spec), check_template_every=0)
    episode = Episode(engine, renderer, limits, SamplingParams(stop_ids=renderer.stop_ids), history=spec.history)
    return await episode.run(sample, lambda: build_env(sample, args), seed=0)
