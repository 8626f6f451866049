"""Makes demonstrations for the starter: token streams with a loss mask, or rows of messages.

`python -m trainer.starter.demonstrations --num 256 --out demos.jsonl` writes rows for `python -m trainer.sft`.

A script replaces the policy in the real agent loop with the real `Geo3kEnv`, so the starter learns from streams that
are built exactly as in reinforcement learning. The quality of the demonstrations is mixed on purpose: they seldom check
an answer with the tool, so that reinforcement learning can discover checking, and correcting after a wrong score.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from agents.engines.scripted import ScriptedEngine
from agents.model import STARTER_PATH
from agents.rendering.images import ImageStore
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.types import EndReason, ProcessedImage, SamplingParams, Trajectory
from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.env import EnvArgs
from envs.errors import UserError
from envs.geo3k.env import SYSTEM_PROMPT, build_env
from envs.geo3k.problem import Problem
from envs.geo3k.procedural import ProceduralGeo3k
from envs.spec import EnvLimits
from envs.types import Sample
from trainer.starter.plans import MAX_TURNS, Mixture, Plan, PlannedTurn, tool_call

#: Sentences like those of real geometry problems, so that the tokenizer does not split these into single bytes.
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


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One stream: its ids, True for tokens with a loss, and the grey diagram, (height, width) uint8."""

    ids_T: NDArray[np.int64]
    loss_mask_T: NDArray[np.bool_]
    image_HW: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class _Played:
    """The episode of one demonstration, and the turns of its plan."""

    trajectory: Trajectory
    turns: Sequence[PlannedTurn]
    tools: Sequence[dict[str, Any]]
    image: Image.Image


class GridStore(ImageStore):
    """Gives an image's grid without its patches; training cuts the patches on its own device."""

    def __init__(self, patch_size: int, merge_size: int) -> None:
        super().__init__(processor=None, merge_size=merge_size)
        self._patch_size = patch_size

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the grid and the number of tokens of a picture whose sides are multiples of a token's."""
        rows, columns = image.height // self._patch_size, image.width // self._patch_size
        return ProcessedImage(
            "", np.empty((0, 0), np.float32), (1, rows, columns), rows * columns // self.merge_size**2
        )


class Demonstrator:
    """Makes demonstrations, by index.

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
        played = self._play(index)
        mask = played.trajectory.mask_T.copy()
        for turn, planned in zip(played.trajectory.turns, played.turns, strict=True):
            if not planned.is_taught:
                mask[turn.start : turn.end] = False
        return Demonstration(played.trajectory.ids_T, mask, np.asarray(played.image)[:, :, 0])

    def row(self, index: int) -> dict[str, Any]:
        """Return the same demonstration as a row of a data set: messages, the picture as a data URI, and the tools."""
        played = self._play(index)
        turns = iter(played.turns)
        messages = [
            next(turns).message if message["role"] == "assistant" else _without_pictures(message)
            for message in played.trajectory.messages
        ]
        file = io.BytesIO()
        played.image.save(file, "PNG")
        picture = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        row: dict[str, Any] = {"id": played.trajectory.sample_id, "messages": messages, "images": [picture]}
        return row | ({"tools": list(played.tools)} if played.tools else {})

    def _play(self, index: int) -> _Played:
        """Play a plan in the agent loop with the real environment."""
        problem, image = self._problems.item(index)
        plan = Plan.draw(problem, self._mixture, random.Random(f"demonstration/{self._seed}/{index}"))
        turns = plan.turns()
        sample = demonstration_sample(problem, image)
        episode = Episode(
            ScriptedEngine(self._renderer.tokenizer, lambda turn, _: turns[turn].text),
            self._renderer,
            Limits(max_turns=MAX_TURNS, max_new_tokens=1024, env=EnvLimits(inline=True)),
            SamplingParams(stop_ids=self._renderer.stop_ids),
            use_tools=plan.use_tools,
        )
        env = build_env(sample, EnvArgs(MAX_TURNS))
        trajectory = self._loop.run_until_complete(episode.run(sample, lambda: env, seed=0))
        assert trajectory.end_reason is EndReason.COMPLETED and trajectory.reward == float(not plan.gives_up), (
            trajectory
        )
        return _Played(trajectory, turns, env.tools if plan.use_tools else (), image)


def _without_pictures(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with a placeholder for each picture."""
    parts = message["content"]
    if isinstance(parts, str):
        return message
    return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in parts]}


def demonstration_sample(problem: Problem, image: Image.Image) -> Sample:
    """Return the sample as `trainer.run` builds it: the environment's system prompt, then diagram and question."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": problem.question}]
    prompt = ({"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content})
    return Sample(id=problem.key, prompt=prompt, label=problem.answer)


def corpus(size: int, seed: int) -> list[str]:
    """Return the texts to train the tokenizer on: those of demonstrations, and realistic geometry problems."""
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


class DemonstrationsConfig(Section):
    """How many demonstrations to write, of what kind, and where to."""

    num: int = Field(default=256, ge=1, description="how many")
    seed: int = Field(default=0, ge=0, description="seed of problems and habits")
    out: Path = Field(default=Path("demos.jsonl"), description="file to write, one row a line")
    tools_offered: float = Field(default=1.0, ge=0, le=1, description="share whose prompt lists the tool")
    reasons: float = Field(default=1.0, ge=0, le=1, description="share that writes the steps before the answer")
    checks: float = Field(default=0.9, ge=0, le=1, description="share of those with the tool that calls it first")
    first_wrong: float = Field(default=0.3, ge=0, le=1, description="share of those that misreads at first")
    second_wrong: float = Field(default=0.3, ge=0, le=1, description="share of these that misreads again")
    gives_up: float = Field(default=0.0, ge=0, le=1, description="share of these that answers wrong at once")

    @property
    def mixture(self) -> Mixture:
        """The shares of each habit."""
        return Mixture(**self.model_dump(exclude={"num", "seed", "out"}))


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and write the demonstrations."""
    prog, description = "python -m trainer.starter.demonstrations", "Write conversations that solve geo3k's problems."
    config = parse(DemonstrationsConfig, argv, prog, description)
    demonstrator = Demonstrator(
        Renderer.from_checkpoint(STARTER_PATH).tokenizer, config.num, config.seed, config.mixture
    )
    try:
        with config.out.open("x", encoding="utf-8") as file:
            for index in range(config.num):
                file.write(json.dumps(demonstrator.row(index)) + "\n")
    except FileExistsError:
        raise UserError("--out", "must name a new file", str(config.out), "choose another name") from None
    except OSError as error:
        raise UserError(
            "--out", "must be writable", str(config.out), f"give another file ({error.strerror})"
        ) from error
    print(f"{config.num} conversations in {config.out}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(run))
