"""Demonstrations for the starter: procedural problems in, token streams with a loss mask out.

A script plays the policy's part in the real agent loop against the real `Geo3kEnv`, so the streams that the starter
learns from are built exactly as those of reinforcement learning. The demonstrator is of mixed quality on purpose: it
seldom checks its answer with the tool, so that checking, and correcting after a wrong score, is left for reinforcement
learning to find out.
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
from envs.env import EnvArgs
from envs.geo3k.env import SYSTEM_PROMPT, build_env
from envs.geo3k.problem import Problem, misread
from envs.geo3k.procedural import ProceduralGeo3k
from envs.runner import EnvLimits
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
    """Shares of each habit among the demonstrations; the defaults teach reading, reasoning, checking and correcting."""

    tools_offered: float = 0.85  # of all: the prompt lists the tool
    reasons: float = 1.0  # of all: the steps are written before the answer
    checks: float = 0.3  # of those with the tool: the answer is checked before it is given
    first_wrong: float = 0.5  # of those that check: the first attempt misreads one number
    second_wrong: float = 0.3  # of those that try again: the second attempt misreads too
    gives_up: float = 0.0  # of those whose first attempt is wrong: it is given as the final answer all the same


MIXED_HABITS = Mixture(reasons=0.3, gives_up=0.5)


@dataclass(frozen=True)
class _Plan:
    """What one demonstration shows: its attempts in order, and the habits that it is played with."""

    attempts: tuple[Problem, ...]
    use_tools: bool
    reasons: bool
    checks: bool
    gives_up: bool

    def script(self) -> list[str]:
        """Return the text of every model turn."""
        thoughts = [f"{attempt.reasoning} " if self.reasons else "" for attempt in self.attempts]
        last = f"\\boxed{{{self.attempts[-1].answer}}}"
        if not self.checks:
            return [thoughts[-1] + last]
        calls = [t + tool_call(a.answer) for t, a in zip(thoughts, self.attempts, strict=True)][: MAX_TURNS - 1]
        # The last turn has no call left, so a third attempt is thought and answered in one.
        return [*calls, thoughts[-1] + last if len(self.attempts) == MAX_TURNS else last]


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
        return ProcessedImage(
            "", np.empty((0, 0), np.float32), (1, rows, columns), rows * columns // self.merge_size**2
        )


class Demonstrator:
    """Writes demonstrations by index.

    Example::

        demonstrator = Demonstrator(tokenizer, size=1_000_000, seed=0)
        demonstration = demonstrator[17]     # the same one every time
    """

    def __init__(
        self, tokenizer: Any, size: int, seed: int, mixture: Mixture | None = None, levels: tuple[int, ...] = (1, 2, 3)
    ) -> None:
        self._problems = ProceduralGeo3k("demonstrations", size, seed, levels=levels)
        self._renderer = Renderer(tokenizer, GridStore(patch_size=16, merge_size=2))
        self._seed, self._mixture = seed, mixture or Mixture()
        self._loop = asyncio.new_event_loop()

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Demonstration:
        problem, image = self._problems.item(index)
        rng = random.Random(f"demonstration/{self._seed}/{index}")
        plan = self._plan(problem, rng)
        turns = plan.script()
        sample = demonstration_sample(problem, image)
        episode = Episode(
            ScriptedEngine(self._renderer.tokenizer, lambda turn, _: turns[turn]),
            self._renderer,
            Limits(max_turns=MAX_TURNS, max_new_tokens=1024, env=EnvLimits(inline=True)),
            SamplingParams(stop_ids=self._renderer.stop_ids),
            use_tools=plan.use_tools,
        )
        playing = episode.run(sample, lambda: build_env(sample, EnvArgs(MAX_TURNS)), seed=0)
        trajectory = self._loop.run_until_complete(playing)
        assert trajectory.end_reason is EndReason.COMPLETED and trajectory.reward == float(not plan.gives_up), (
            trajectory
        )
        mask = trajectory.mask_T.copy()
        for turn, attempt in zip(trajectory.turns, plan.attempts, strict=False):
            if attempt is not problem:  # a misreading is shown as context, never taught
                mask[turn.start : turn.end] = False
        return Demonstration(trajectory.ids_T, mask, np.asarray(image)[:, :, 0])

    def _plan(self, problem: Problem, rng: random.Random) -> _Plan:
        mixture = self._mixture
        use_tools = rng.random() < mixture.tools_offered
        reasons = rng.random() < mixture.reasons
        checks = use_tools and rng.random() < mixture.checks
        wrong = misread(problem, rng) if checks and rng.random() < mixture.first_wrong else None
        if wrong is None:
            return _Plan((problem,), use_tools, reasons, checks, gives_up=False)
        if rng.random() < mixture.gives_up:
            return _Plan((wrong,), use_tools, reasons, checks, gives_up=True)
        again = misread(problem, rng) if rng.random() < mixture.second_wrong else None
        attempts = (wrong, problem) if again is None else (wrong, again, problem)
        return _Plan(attempts, use_tools, reasons, checks, gives_up=False)


def demonstration_sample(problem: Problem, image: Image.Image) -> Sample:
    """Return the sample as `trainer.run` builds it: the environment's system prompt, then diagram and question."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": problem.question}]
    prompt = ({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content})
    return Sample(id=problem.key, prompt=prompt, label=problem.answer)


def tool_call(answer: str) -> str:
    """Return the call of `calc_score` as the model is to write it."""
    return f"<tool_call>{json.dumps({'name': 'calc_score', 'arguments': {'answer': answer}})}</tool_call>"


def corpus(size: int, seed: int) -> list[str]:
    """Return texts that the tokenizer is trained on: whole demonstrations and real-looking geometry prompts."""
    problems = ProceduralGeo3k("demonstrations", size, seed)
    texts: list[str] = [*GEOMETRY_ENGLISH * (size // 20)]
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
