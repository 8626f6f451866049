"""Demonstrations for the starter: procedural problems in, token streams with a loss mask out.

A script plays the policy's part in the real agent loop against the real `Geo3kEnv`, so the streams that the starter learns from
are built exactly as those of reinforcement learning. The demonstrator is of mixed quality on purpose: it seldom checks its answer
with the tool, so that checking, and correcting after a wrong score, is left for reinforcement learning to find out.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from agents.engines.scripted import ScriptedEngine
from agents.episode import Episode, Limits
from agents.images import ImageStore
from agents.renderer import Renderer
from agents.types import EndReason, ProcessedImage, SamplingParams
from envs.geo3k.env import SYSTEM_PROMPT, build_env
from envs.geo3k.problem import Problem, misread
from envs.geo3k.procedural import ProceduralGeo3k
from envs.registry import EnvArgs
from envs.types import Sample

MAX_TURNS = 3

#: Sentences in the manner of real geometry rows, so that those do not fall apart into single bytes.
GEOMETRY_ENGLISH = (
    "Find the measure of angle ABC in the figure. Express your answer in degrees.",
    "Find the value of the variable y. Round to the nearest tenth if necessary.",
    "In the figure, m \\angle 1 = 50 and m \\angle 3 = 60. Find m \\angle 8.",
    "Find the perimeter of \\triangle RUW if \\triangle RUW \\sim \\triangle STV, ST = 24 and VS = 12.",
    "Quadrilateral WXYZ is a rectangle. If XZ = 2c and ZY = 6, find WY. Find the length of AB.",
    "Circle O has a radius of 13 inches. The radius is perpendicular to the chord. Find the diameter.",
    "The two polygons are similar. Each pair of lines is parallel. Line l is a tangent of \\odot S.",
    "For the parallelogram, trapezoid, rhombus, square or hexagon, what is the area of the shaded region?",
)


@dataclass(frozen=True)
class Mixture:
    """Shares of each behaviour among the demonstrations."""

    tools_offered: float = 0.85  # of all: the prompt lists the tool
    checks: float = 0.3  # of those with the tool: the answer is checked before it is given
    first_wrong: float = 0.5  # of those that check: the first attempt misreads one number
    second_wrong: float = 0.3  # of those: the second attempt misreads too


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One stream: ids, True where the loss counts, and the diagram in its one colour channel, (height, width) uint8."""

    ids_T: NDArray[np.int64]
    loss_mask_T: NDArray[np.bool_]
    image_HW: NDArray[np.uint8]


class GridStore(ImageStore):
    """Gives an image's grid without its patches, which training cuts on its own device."""

    def __init__(self, patch_size: int, merge_size: int) -> None:
        super().__init__(processor=None, merge_size=merge_size)
        self._patch_size = patch_size

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return grid and token count of a picture whose sides are whole tokens."""
        rows, columns = image.height // self._patch_size, image.width // self._patch_size
        return ProcessedImage("", np.empty((0, 0), np.float32), (1, rows, columns), rows * columns // self.merge_size**2)


class Demonstrator:
    """Writes demonstrations by index.

    Example::

        demonstrator = Demonstrator(tokenizer, size=1_000_000, seed=0)
        demonstration = demonstrator[17]     # the same one every time
    """

    def __init__(
        self, tokenizer: Any, size: int, seed: int, mixture: Mixture | None = None, levels: tuple[int, ...] = (1, 2, 3)
    ) -> None:
        self._problems = ProceduralGeo3k("train", size, seed, levels=levels)
        self._renderer = Renderer(tokenizer, GridStore(patch_size=16, merge_size=2))
        self._seed, self._mixture = seed, mixture or Mixture()
        self._loop = asyncio.new_event_loop()

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Demonstration:
        problem, image = self._problems.item(index)
        rng = random.Random(f"demonstration/{self._seed}/{index}")
        attempts, use_tools, checks = self._plan(problem, rng)
        turns = _script(attempts, checks)
        sample = demonstration_sample(problem, image)
        episode = Episode(
            ScriptedEngine(self._renderer.tokenizer, lambda turn, _: turns[turn]),
            self._renderer,
            Limits(max_turns=MAX_TURNS, max_new_tokens=1024, env_timeout_s=0),
            SamplingParams(stop_ids=self._renderer.stop_ids),
            use_tools=use_tools,
        )
        playing = episode.run(sample, lambda: build_env(sample, EnvArgs(MAX_TURNS)), seed=0)
        trajectory = self._loop.run_until_complete(playing)
        assert trajectory.end_reason is EndReason.COMPLETED and trajectory.reward == 1.0, trajectory
        mask = trajectory.mask_T.copy()
        for turn, attempt in zip(trajectory.turns, attempts, strict=False):
            if attempt is not problem:  # shown as context, never taught
                mask[turn.start : turn.end] = False
        return Demonstration(trajectory.ids_T, mask, np.asarray(image)[:, :, 0])

    def _plan(self, problem: Problem, rng: random.Random) -> tuple[list[Problem], bool, bool]:
        """Draw what this demonstration shows: its attempts in order (the last is right), tool offered, tool used."""
        mixture = self._mixture
        use_tools = rng.random() < mixture.tools_offered
        checks = use_tools and rng.random() < mixture.checks
        attempts: list[Problem] = []
        if checks and rng.random() < mixture.first_wrong:
            attempts.append(misread(problem, rng) or problem)
            if attempts[0] is not problem and rng.random() < mixture.second_wrong:
                attempts.append(misread(problem, rng) or problem)
        if not attempts or attempts[-1] is not problem:
            attempts.append(problem)
        return attempts, use_tools, checks


def demonstration_sample(problem: Problem, image: Image.Image) -> Sample:
    """Return the sample as `trainer.run` builds it: the environment's system prompt, then diagram and question."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": problem.question}]
    prompt = ({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content})
    return Sample(id=problem.key, prompt=prompt, label=problem.answer)


def tool_call(answer: str) -> str:
    """Return the call of `calc_score` as the model is to write it."""
    return f"<tool_call>{json.dumps({'name': 'calc_score', 'arguments': {'answer': answer}})}</tool_call>"


def _script(attempts: list[Problem], checks: bool) -> list[str]:
    """Return the text of every model turn."""
    last = attempts[-1]
    if not checks:
        return [f"{last.reasoning} \\boxed{{{last.answer}}}"]
    turns = [f"{attempt.reasoning} {tool_call(attempt.answer)}" for attempt in attempts[: MAX_TURNS - 1]]
    if len(attempts) == MAX_TURNS:  # no call is left for the third attempt
        return [*turns, f"{last.reasoning} \\boxed{{{last.answer}}}"]
    return [*turns, f"\\boxed{{{last.answer}}}"]


def corpus(size: int, seed: int) -> list[str]:
    """Return texts that the tokenizer is trained on: whole demonstrations and real-looking geometry prompts."""
    problems = ProceduralGeo3k("train", size, seed)
    texts = list(GEOMETRY_ENGLISH) * (size // 20)
    for index in range(size):
        problem = problems.problem(index)
        texts += [problem.question, f"{problem.reasoning} {tool_call(problem.answer)}", f"\\boxed{{{problem.answer}}}"]
        sample = demonstration_sample(problem, Image.new("RGB", (1, 1)))
        env = build_env(sample, EnvArgs(MAX_TURNS))
        env.reset()
        texts.append(SYSTEM_PROMPT)
        texts += [json.dumps(tool["function"]) for tool in env.tools]
        for attempt in (problem.answer, "0", "", problem.answer):
            observation, _, _ = env.step(tool_call(attempt))
            texts.append(observation["obs_str"])
    return texts


