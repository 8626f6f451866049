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
from functools import lru_cache
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
from envs.env import Env, EnvArgs
from envs.errors import UserError
from envs.geo3k.env import SYSTEM_PROMPT, build_env
from envs.geo3k.problem import STYLES, Problem, Style
from envs.geo3k.procedural import ProceduralGeo3k, Split
from envs.geo3k.zoom import SYSTEM_PROMPT as ZOOM_SYSTEM_PROMPT
from envs.geo3k.zoom import Geo3kZoomEnv
from envs.spec import EnvLimits
from envs.types import Sample
from trainer.starter.architecture import build_image_processor
from trainer.starter.plans import (
    MAX_TURNS,
    ZOOMS,
    Attempt,
    Mixture,
    Plan,
    PlannedTurn,
    tool_call,
    zoom_call,
    zoom_windows,
)

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
#: What reading lessons and second attempts say besides. The style `overprint` has the names of `plain`.
LESSON_ENGLISH = (
    "Read the numbers. Read the figure.",
    "Step by step. Look again: 47, 65. Compute again. Another way.",
    *(name.replace("_", " ") for style, families in STYLES.items() if style != "overprint" for name in families),
)


@dataclass(frozen=True, eq=False)
class Demonstration:
    """One stream: its ids, True for tokens with a loss, and its pictures, (height, width, 3) uint8 each.

    `kind`, `family`, `level` and the numbers in the picture, `givens`, say what it shows, for measuring.
    """

    ids_T: NDArray[np.int64]
    loss_mask_T: NDArray[np.bool_]
    images: tuple[NDArray[np.uint8], ...]
    kind: str = "problem"
    family: str = ""
    level: int = 0
    givens: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Played:
    """The episode of one demonstration, and the turns of its plan."""

    trajectory: Trajectory
    turns: Sequence[PlannedTurn]
    tools: Sequence[dict[str, Any]]
    image: Image.Image
    problem: Problem


class GridStore(ImageStore):
    """Gives a picture as the starter reads it, without its patches; training cuts these on its own device."""

    def __init__(self) -> None:
        processor = build_image_processor()
        super().__init__(processor, merge_size=processor.merge_size)

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the picture, resized if it has to be, its grid and its number of tokens."""
        time, rows, columns = grid = self.grid(image)
        size = columns * self._processor.patch_size, rows * self._processor.patch_size
        picture = image if image.size == size else image.resize(size, resample=self._processor.resample)
        no_patches = np.empty((0, 0), np.float32)
        return ProcessedImage("", no_patches, grid, time * rows * columns // self.merge_size**2, picture)


class Player:
    """Plays scripted turns in the real agent loop with the real environments."""

    def __init__(self, renderer: Renderer) -> None:
        self._texts: Sequence[str] = ()
        engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: self._texts[turn])
        sampling = SamplingParams(stop_ids=renderer.stop_ids)

        def episode(max_turns: int, use_tools: bool) -> Episode:
            limits = Limits(max_turns=max_turns, max_new_tokens=1024, env=EnvLimits(inline=True))
            return Episode(engine, renderer, limits, sampling, use_tools=use_tools)

        self._episodes = {use_tools: episode(MAX_TURNS, use_tools) for use_tools in (False, True)}
        self._zoom_episode = episode(ZOOMS + 1, True)
        self._loop = asyncio.new_event_loop()

    def play(self, plan: Plan, problem: Problem, image: Image.Image) -> _Played:
        """Play a plan on its problem."""
        turns = plan.turns()
        sample = demonstration_sample(problem, image)
        env = build_env(sample, EnvArgs(MAX_TURNS))
        trajectory = self._run(self._episodes[plan.use_tools], sample, env, [turn.text for turn in turns])
        assert trajectory.reward == float(not plan.gives_up), trajectory
        return _Played(trajectory, turns, env.tools if plan.use_tools else (), image, problem)

    def zoom(self, problem: Problem, image: Image.Image, windows: Sequence[tuple[int, int]]) -> Trajectory:
        """Zoom into these windows, then solve the problem."""
        sample = demonstration_sample(problem, image, ZOOM_SYSTEM_PROMPT)
        answer = f"{problem.reasoning} \\boxed{{{problem.answer}}}"
        texts = [*(zoom_call(*window) for window in windows), answer]
        trajectory = self._run(self._zoom_episode, sample, Geo3kZoomEnv(sample, EnvArgs(ZOOMS + 1)), texts)
        assert trajectory.reward == 1.0 and len(trajectory.images) == 1 + len(windows), trajectory
        return trajectory

    def _run(self, episode: Episode, sample: Sample, env: Env, texts: Sequence[str]) -> Trajectory:
        self._texts = texts
        trajectory = self._loop.run_until_complete(episode.run(sample, lambda: env, seed=0))
        assert trajectory.end_reason is EndReason.COMPLETED, trajectory
        return trajectory


class Demonstrator:
    """Makes demonstrations, by index.

    Example::

        demonstrator = Demonstrator(tokenizer, size=1_000_000, seed=0)
        demonstration = demonstrator[17]     # the same one every time

    `problems` are further arguments of `ProceduralGeo3k`. `demonstrator.after(17, wrong)` goes on after wrong attempts
    at the same problem.
    """

    def __init__(
        self,
        tokenizer: Any,
        size: int,
        seed: int,
        mixture: Mixture | None = None,
        problems: Mapping[str, Any] | None = None,
        split: Split = "demonstrations",
    ) -> None:
        self.problems = ProceduralGeo3k(split, size, seed, **(problems or {}))
        self.renderer = Renderer(tokenizer, GridStore())
        self._seed, self._mixture = seed, mixture or Mixture()
        self._player = Player(self.renderer)
        self._drawn = lru_cache(maxsize=2)(self.problems.drawn)  # neighbours share one, with own attempts between

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Demonstration:
        return self.variant(index, index)

    def variant(self, index: int, habits: int) -> Demonstration:
        """Return a demonstration on the problem at an index; `habits` is the seed of what it shows of it."""
        return _demonstration(self._play(index, habits), "problem")

    def drawn(self, index: int) -> tuple[Problem, Image.Image]:
        """Return the problem at an index and its picture, which is kept for the next lesson."""
        return self._drawn(index)[:2]

    def solution(self, index: int) -> Demonstration:
        """Return a demonstration that checks the right answer at the first attempt."""
        problem, image = self.drawn(index)
        plan = Plan((Attempt.at(problem, reasons=True),), use_tools=True, checks=True)
        return _demonstration(self._player.play(plan, problem, image), "problem")

    def after(self, index: int, wrong: Sequence[Attempt]) -> Demonstration:
        """Return a demonstration that goes on after wrong attempts at the problem at an index."""
        problem, image = self.drawn(index)
        plan = Plan.after(wrong, problem, self._mixture, random.Random(f"after/{self._seed}/{index}/{len(wrong)}"))
        return _demonstration(self._player.play(plan, problem, image), "attempt")

    def zoom(self, index: int, is_blind: bool) -> Demonstration:
        """Return a demonstration of `geo3k_zoom`: it looks at all labels enlarged, or answers at once."""
        problem, image, boxes = self._drawn(index)
        trajectory = self._player.zoom(problem, image, [] if is_blind else zoom_windows(boxes, *image.size))
        images, about = pixels(trajectory.images), ("zoom", problem.family, problem.level, drawn_numbers(problem))
        return Demonstration(trajectory.ids_T, trajectory.mask_T.copy(), images, *about)

    def row(self, index: int) -> dict[str, Any]:
        """Return the same demonstration as a row of a data set: messages, the picture as a data URI, and the tools."""
        played = self._play(index, index)
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

    def _play(self, index: int, habits: int) -> _Played:
        problem, image = self.drawn(index)
        plan = Plan.draw(problem, self._mixture, random.Random(f"demonstration/{self._seed}/{habits}"))
        return self._player.play(plan, problem, image)


def _demonstration(played: _Played, kind: str) -> Demonstration:
    trajectory, problem = played.trajectory, played.problem
    mask_T = trajectory.mask_T.copy()
    for turn, planned in zip(trajectory.turns, played.turns, strict=True):
        if not planned.is_taught:
            mask_T[turn.start : turn.end] = False
    about = kind, problem.family, problem.level, drawn_numbers(problem)
    return Demonstration(trajectory.ids_T, mask_T, pixels(trajectory.images), *about)


def drawn_numbers(problem: Problem) -> tuple[str, ...]:
    """Return the numbers that the picture of a problem shows and its solution needs."""
    return tuple(str(problem.givens[place]) for place in problem.drawn_givens)


def pixels(images: Sequence[ProcessedImage]) -> tuple[NDArray[np.uint8], ...]:
    """Return the pixels of pictures of a `GridStore`, (height, width, 3) each."""
    return tuple(np.asarray(image.picture) for image in images)


def _without_pictures(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with a placeholder for each picture."""
    parts = message["content"]
    if isinstance(parts, str):
        return message
    return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in parts]}


def demonstration_sample(problem: Problem, image: Image.Image, system_prompt: str = SYSTEM_PROMPT) -> Sample:
    """Return the sample as `trainer.run` builds it: the environment's system prompt, then diagram and question."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": problem.question}]
    prompt = ({"role": "system", "content": system_prompt}, {"role": "user", "content": content})
    return Sample(id=problem.key, prompt=prompt, label=problem.answer)


def corpus(size: int, seed: int) -> list[str]:
    """Return the texts to train the tokenizer on: those of demonstrations, and realistic geometry problems."""
    sources = [ProceduralGeo3k("demonstrations", size, seed, style=style) for style in ("plain", "textbook")]
    texts: list[str] = [*(GEOMETRY_ENGLISH + LESSON_ENGLISH) * (size // 20)]
    for index in range(size):
        problem = sources[index % len(sources)].problem(index)
        texts += [problem.question, f"{problem.reasoning} {tool_call(problem.answer)}", f"\\boxed{{{problem.answer}}}"]
        sample = demonstration_sample(problem, Image.new("RGB", (1, 1)))
        env = build_env(sample, EnvArgs(MAX_TURNS))
        env.reset()
        texts += [SYSTEM_PROMPT, ZOOM_SYSTEM_PROMPT, zoom_call(100 * (index % 6), 100 * (index // 6 % 6))]
        texts += [json.dumps(tool["function"]) for tool in (*env.tools, *Geo3kZoomEnv(sample).tools)]
        for attempt in (problem.answer, "0", "", problem.answer):
            observation, _, _ = env.step(tool_call(attempt))
            texts.append(observation["obs_str"])
    return texts


class DemonstrationsConfig(Section):
    """How many demonstrations to write, of what kind, and where to."""

    num: int = Field(default=256, ge=1, description="how many")
    seed: int = Field(default=0, ge=0, description="seed of problems and habits")
    out: Path = Field(default=Path("demos.jsonl"), description="file to write, one row a line")
    style: Style = Field(default="overprint", description="how the problems are drawn (docs/diagrams.md)")
    tools_offered: float = Field(default=1.0, ge=0, le=1, description="share whose prompt lists the tool")
    reasons: float = Field(default=1.0, ge=0, le=1, description="share that writes the steps before the answer")
    checks: float = Field(default=0.9, ge=0, le=1, description="share of those with the tool that calls it first")
    first_wrong: float = Field(default=0.3, ge=0, le=1, description="share of those that misreads at first")
    second_wrong: float = Field(default=0.3, ge=0, le=1, description="share of these that misreads again")
    gives_up: float = Field(default=0.0, ge=0, le=1, description="share of these that answers wrong at once")
    corrects: bool = Field(default=True, description="an attempt after a wrong one begins with what was wrong")

    @property
    def mixture(self) -> Mixture:
        """The shares of each habit."""
        return Mixture(**self.model_dump(exclude={"num", "seed", "out", "style"}))


def run(argv: Sequence[str] | None = None) -> int:
    """Parse the flags and write the demonstrations."""
    prog, description = "python -m trainer.starter.demonstrations", "Write conversations that solve geo3k's problems."
    config = parse(DemonstrationsConfig, argv, prog, description)
    tokenizer = Renderer.from_checkpoint(STARTER_PATH).tokenizer
    demonstrator = Demonstrator(tokenizer, config.num, config.seed, config.mixture, {"style": config.style})
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
