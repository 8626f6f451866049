"""Writes demonstrations: conversations that solve geometry problems, as rows for `trainer.sft`.

`python -m starter.demonstrations --num 256 --out demos.jsonl`. A script plays in the real environments. The quality of
the demonstrations is mixed on purpose: they seldom check an answer with the tool, so that reinforcement learning can
discover checking, and correcting after a wrong score.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import Field

from envs.config.cli import exit_code, parse
from envs.config.settings import Section
from envs.env import Env, EnvArgs
from envs.errors import UserError
from envs.geo3k.env import SYSTEM_PROMPT, build_env
from envs.geo3k.problem import Box, Problem
from envs.geo3k.zoom import SYSTEM_PROMPT as ZOOM_SYSTEM_PROMPT
from envs.geo3k.zoom import Geo3kZoomEnv
from envs.types import Message, Sample, content_parts, message_images
from starter.plans import MAX_TURNS, ZOOMS, Mixture, Plan, PlannedTurn, boxed, zoom_call, zoom_windows
from starter.textbook.problems import problems_of

Row = dict[str, Any]


def demonstration_sample(problem: Problem, image: Image.Image, system_prompt: str = SYSTEM_PROMPT) -> Sample:
    """Return the sample as `trainer.run` builds it: the environment's system prompt, then diagram and question."""
    content = [{"type": "image", "image": image}, {"type": "text", "text": problem.question}]
    prompt = ({"role": "system", "content": system_prompt}, {"role": "user", "content": content})
    return Sample(id=problem.key, prompt=prompt, label=problem.answer)


def conversation(
    sample: Sample, env: Env, turns: Sequence[PlannedTurn], use_tools: bool = False, reward: float = 1.0
) -> Row:
    """Play turns in an environment; return all messages as a row, its images as data URIs.

    The turns must end the episode with this reward.
    """
    messages: list[Message] = list(sample.prompt)
    env.reset()
    done = False
    for turn in turns:
        assert not done, f"{sample.id}: the episode ended before {turn}"
        messages.append(turn.message)
        observation, done, _ = env.step(turn.text)
        if not done:
            shown = env.format_observation(observation)
            messages += [shown] if isinstance(shown, dict) else shown
    assert done and env.reward(turns[-1].text) == reward, (sample, turns)
    images = [_data_uri(image) for image in message_images(messages)]
    row: Row = {"id": sample.id, "messages": [_without_images(message) for message in messages], "images": images}
    return {**row, "tools": list(env.tools)} if use_tools else row


def solved(problem: Problem, image: Image.Image, plan: Plan) -> Row:
    """Return the conversation of a plan on its problem."""
    sample = demonstration_sample(problem, image)
    env = build_env(sample, EnvArgs(MAX_TURNS))
    return conversation(sample, env, plan.turns(), plan.use_tools, float(not plan.gives_up))


def zoomed(problem: Problem, image: Image.Image, boxes: Sequence[Box]) -> Row:
    """Return a conversation of `geo3k_zoom` that looks at all labels enlarged, then solves the problem."""
    sample = demonstration_sample(problem, image, ZOOM_SYSTEM_PROMPT)
    env = Geo3kZoomEnv(sample, EnvArgs(ZOOMS + 1))
    turns = [PlannedTurn("", zoom_call(*window)) for window in zoom_windows(boxes, *image.size)]
    answer = PlannedTurn(f"{problem.reasoning} {boxed(problem.answer)}")
    return conversation(sample, env, [*turns, answer], use_tools=True)


def _data_uri(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _without_images(message: Message) -> Message:
    """Return a message with a placeholder for each image."""
    if isinstance(message["content"], str):
        return message
    parts = [{"type": "image"} if part["type"] == "image" else part for part in content_parts(message)]
    return {**message, "content": parts}


class DemonstrationsConfig(Section):
    """How many demonstrations to write, of what kind, and where to."""

    num: int = Field(default=256, ge=1, description="how many")
    seed: int = Field(default=0, ge=0, description="seed of problems and habits")
    out: Path = Field(default=Path("demos.jsonl"), description="file to write, one row a line")
    style: str = Field(default="overprint", description="how the problems are drawn (docs/diagrams.md)")
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
    prog = "python -m starter.demonstrations"
    description = "Write conversations that solve geo3k's problems."
    config = parse(DemonstrationsConfig, argv, prog, description)
    problems = problems_of("demonstrations", config.num, config.seed, config.style)
    try:
        with config.out.open("x", encoding="utf-8") as file:
            for index in range(config.num):
                problem, image = problems.item(index)
                habits = random.Random(f"demonstration/{config.seed}/{index}")
                row = solved(problem, image, Plan.draw(problem, config.mixture, habits))
                file.write(json.dumps(row) + "\n")
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
