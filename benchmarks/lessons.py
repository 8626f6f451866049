"""Teaches a network to call tools, from episodes that a script plays: for benchmarks that need several turns.

A network with fresh weights never ends a turn or calls a tool. A few dozen steps on these lessons and it does, with
arguments that are guesses: nothing else is learnt.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

import torch

from agents.engines.scripted import ScriptedEngine
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.manager import rollout_groups
from agents.types import GenerateRequest, SamplingParams, TrajectoryGroup
from envs.checking.hostile import write_call
from envs.execution.load import load_env
from envs.problems import with_system_prompt
from envs.registry import get_spec
from envs.spec import EnvLimits
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.config.sft import LIKELIHOOD
from trainer.data.packing import training_samples
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.setup.components import sampling_params

#: Problems of a step, twice each.
GROUPS_PER_STEP = 8
#: Words of a turn's thoughts, a token each. A word tells its part, so the last one says all that the next depends on.
PARTS = ("the angle is of", "triangle circle length sum", "area radius answer find", "and a ratio height")


def thoughts(draw: random.Random, num_words: int) -> str:
    """Return words of all parts, one part after another, `num_words` in the mean: each part ends at random."""
    words: list[str] = []
    for part in PARTS if num_words else ():
        words.append(draw.choice(part.split()))
        while draw.random() > len(PARTS) / num_words:
            words.append(draw.choice(part.split()))
    return " ".join(words)


def lesson(turn: int, request: GenerateRequest, env: str, num_words: int = 0) -> str:
    """Return a turn: thoughts, then mostly one or two calls with random arguments, then a random answer."""
    draw = random.Random(f"{request.seed // 1000}/{turn}")
    text = thoughts(draw, num_words)
    if turn == 2 or draw.random() < (0.15, 0.5)[min(turn, 1)]:
        return f"{text}\\boxed{{{draw.randint(1, 99)}}}"
    if env == "geo3k":
        return text + write_call("calc_score", {"answer": str(draw.randint(1, 99))}, "hermes")
    left, top = 100 * draw.randint(0, 4), 100 * draw.randint(0, 4)
    box = {"left": left, "top": top, "right": left + 500, "bottom": top + 500}
    return text + write_call("zoom", box, "hermes")


def lessons(renderer: Renderer, env: str, count: int, seed: int, num_words: int = 0) -> list[TrajectoryGroup]:
    """Play `count` problems twice each by the script, with so many words of thoughts a turn."""
    spec = get_spec(env)
    samples = with_system_prompt(spec.load_dataset("train", count, seed), spec.load_system_prompt())
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, request: lesson(turn, request, env, num_words))
    limits = Limits(3, 300 + 9 * num_words, EnvLimits(inline=True))
    loop = Episode(engine, renderer, limits, sampling_params(renderer, 1.0))
    problems = [samples[index] for index in range(count)]
    return asyncio.run(rollout_groups(loop, problems, load_env(spec), spec.args(3, "hermes"), 2, seed))


def teach(model: PolicyModel, groups: Sequence[TrajectoryGroup], steps: int, lr: float) -> tuple[FSDPLearner, float]:
    """Return a learner that has taken steps on the scripted turns, and the last one's mean loss per token."""
    device = next(model.parameters()).device
    learner = FSDPLearner(
        model,
        SamplingParams(),
        steps,
        OptimConfig(lr=lr, schedule="cosine", beta2=0.95, weight_decay=0.0),
        LIKELIHOOD,
        LearnerConfig(max_tokens_per_microbatch=16384),
        device,
        torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    order, loss = random.Random(0), math.nan
    for _ in range(steps):
        chosen = order.sample(groups, GROUPS_PER_STEP)
        wanted = [[1.0] * len(group.trajectories) for group in chosen]
        samples = training_samples(chosen, wanted, model.image_token_id, model.merge_size, LIKELIHOOD, 0)
        loss = learner.step([samples]).loss
    return learner, loss
