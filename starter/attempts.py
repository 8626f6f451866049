"""The policy's own attempts: it plays problems in the agent loop, and what it got wrong becomes context of lessons."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from agents.types import Trajectory, TrajectoryGroup, Turn
from envs.env import EnvArgs
from envs.geo3k.env import build_env
from envs.geo3k.problem import Problem
from envs.spec import EnvLimits
from starter.demonstrations import demonstration_sample
from starter.plans import MAX_TURNS, Attempt, score_call, written

_CALL = re.compile(r"(?s)(.*?)<tool_call>(.*)</tool_call>")
CONTEXT_LENGTH = 4096
MAX_NEW_TOKENS = 512
MAX_BATCH = {"cuda": 2048, "cpu": 64}


@dataclass(frozen=True)
class OwnAttempts:
    """Wrong attempts of the policy itself at a problem, oldest first, as it played."""

    problem: Problem
    image: Image.Image
    wrong: tuple[Attempt, ...]


def own_attempts(
    model: Path, problems: Sequence[tuple[Problem, Image.Image]], device: str, seed: int
) -> list[OwnAttempts]:
    """Play problems at temperature 1 with the tool; return the wrong attempts that began each.

    An episode whose first two answers were wrong gives two: after the first, and after both. Right answers and texts
    that a demonstration cannot show, such as broken calls, give none.
    """
    # Imported late, because processes that only draw lessons need no torch.
    import torch

    from agents.engines.hf import HFEngine
    from agents.model.policy import PolicyModel
    from agents.rendering.renderer import Renderer
    from agents.rollout.episode import Episode, Limits
    from agents.rollout.manager import rollout_groups
    from trainer.setup.components import sampling_params

    place = torch.device(device)
    network = PolicyModel.load(model, torch.bfloat16 if place.type == "cuda" else torch.float32).to(place)
    renderer = Renderer.from_checkpoint(model)
    limits = Limits(MAX_TURNS, MAX_NEW_TOKENS, EnvLimits(inline=True))
    samples = [demonstration_sample(problem, image) for problem, image in problems]

    async def play() -> list[TrajectoryGroup]:
        engine = HFEngine(network, CONTEXT_LENGTH, MAX_BATCH[place.type], place)
        try:
            episode = Episode(engine, renderer, limits, sampling_params(renderer, 1.0))
            return await rollout_groups(episode, samples, build_env, EnvArgs(MAX_TURNS), 1, seed)
        finally:
            await engine.close()

    found = []
    for (problem, image), group in zip(problems, asyncio.run(play()), strict=True):
        found += [OwnAttempts(problem, image, wrong) for wrong in wrong_beginnings(group.trajectories[0])]
    return found


def wrong_beginnings(trajectory: Trajectory) -> list[tuple[Attempt, ...]]:
    """Return the wrong attempts of an episode's first turns: the first alone, then the first two."""
    wrong: list[Attempt] = []
    beginnings = []
    for turn in trajectory.turns[: MAX_TURNS - 1]:
        attempt = _attempt(turn)
        if attempt is None:
            break
        wrong.append(attempt)
        beginnings.append(tuple(wrong))
    return beginnings


def _attempt(turn: Turn) -> Attempt | None:
    """Return a turn as a wrong attempt, None if it is not one that a plan can repeat to the letter."""
    match = _CALL.fullmatch(turn.text)
    if not match or turn.info.get("tool_score") != 0.0:
        return None
    try:
        answer = json.loads(match[2])["arguments"]["answer"]
    except (ValueError, KeyError, TypeError):
        return None
    attempt = Attempt(match[1], answer)
    is_repeatable = isinstance(answer, str) and attempt.thought + written(score_call(answer)) == turn.text
    return attempt if is_repeatable else None
