"""The policy's own attempts: it plays problems in the agent loop, and what it got wrong becomes context of lessons."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from PIL import Image

from agents.engines.hf import HFEngine
from agents.model.policy import PolicyModel
from agents.rendering.images import ImageStore
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.types import SamplingParams, Trajectory, Turn
from envs.env import EnvArgs
from envs.geo3k.env import build_env
from envs.geo3k.problem import Problem
from envs.spec import EnvLimits
from trainer.starter.architecture import build_image_processor
from trainer.starter.demonstrations import demonstration_sample
from trainer.starter.lessons import OwnAttempts
from trainer.starter.plans import MAX_TURNS, Attempt, tool_call

_CALL = re.compile(r"(?s)(.*?)<tool_call>(.*)</tool_call>")
MAX_BATCH = {"cuda": 2048, "cpu": 64}
AT_ONCE = 2048


def play(
    model: PolicyModel,
    tokenizer: Any,
    drawn: Callable[[int], tuple[Problem, Image.Image]],
    indices: Iterable[int],
    device: torch.device,
) -> list[OwnAttempts]:
    """Play problems at temperature 1 with the tool; return the wrong attempts that began each, once per beginning.

    `drawn` gives the problem at an index and its picture.

    An episode whose first two answers were wrong gives two: after the first, and after both. Right answers and texts
    that a demonstration cannot show, such as broken calls, give none.
    """
    renderer = Renderer(tokenizer, ImageStore(build_image_processor(), merge_size=2))
    sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)
    limits = Limits(MAX_TURNS, 512, EnvLimits(inline=True))

    async def episodes() -> list[OwnAttempts]:
        # A network of its own, in the type of the shipped weights: the one in training may be compiled.
        copy = PolicyModel.from_config(model.config)
        copy.load_state_dict(model.state_dict())
        engine = HFEngine(
            copy.to(torch.bfloat16 if device.type == "cuda" else None), 4096, MAX_BATCH[device.type], device
        )
        loop = Episode(engine, renderer, limits, sampling)

        async def one(index: int) -> list[OwnAttempts]:
            problem, image = drawn(index)
            sample = demonstration_sample(problem, image)
            trajectory = await loop.run(sample, lambda: build_env(sample, EnvArgs(MAX_TURNS)), seed=index)
            return [OwnAttempts(index, wrong) for wrong in wrong_beginnings(trajectory)]

        todo, found = list(indices), []
        for start in range(0, len(todo), AT_ONCE):
            for each in await asyncio.gather(*map(one, todo[start : start + AT_ONCE])):
                found += each
        await engine.close()
        return found

    return asyncio.run(episodes())


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
    return attempt if isinstance(answer, str) and attempt.thought + tool_call(answer) == turn.text else None
