"""The parts of a step whose cost could grow wrongly: `parts_of(axis, size, folder)` and `LearnerStep`.

In: an axis and a size on it. Out: the parts by name. All but the learner's step work on episodes that an engine of
zero latency has played.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agents.model import STARTER_PATH
from agents.model.architectures import ModelFacts
from agents.recording import Recorder, Recording
from agents.recording.manifest import build_manifest
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.groups import GroupProblem, RolloutOptions
from agents.rollout.manager import RolloutManager
from agents.rollout.template_check import template_mismatch
from agents.types import SamplingParams, TrajectoryGroup
from agents.viewer.export import export
from agents.viewer.source import Source
from benchmarks.agent_loop import CALL, GROUP_SIZE, TEXTS, FixedEngine, ScoreEnv
from benchmarks.flops import forward_flops
from benchmarks.learner_ours import Options, fresh_model, our_learner
from benchmarks.learner_workload import Sizes, make_samples, shape_config
from envs.env import EnvArgs
from envs.registry import get_spec
from envs.spec import EnvLimits
from envs.types import Sample
from trainer.algorithms.advantages import compute_advantages
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import balanced_bins, build_minibatches, collate, pack_rows
from trainer.types import TrainingSample

MAX_TOKENS = 16_384
CONCURRENCY = 1024
PAGE = "viewer, page"
#: Prepares a measurement and returns what is measured: each has caches of its own.
Part = Callable[[], Callable[[], Any]]


@dataclass(frozen=True)
class Work:
    """What is played: so many episodes of so many turns, with so many images in the prompt."""

    episodes: int = 64
    turns: int = 3
    images: int = 0

    @classmethod
    def at(cls, axis: str, size: int) -> Work:
        """Return the work at a size on an axis.

        >>> Work.at("turns", 32)
        Work(episodes=64, turns=32, images=0)
        """
        if axis == "images":
            return cls(episodes=GROUP_SIZE, turns=1, images=size)
        return replace(cls(), **{axis: size})

    def problems(self) -> list[Sample]:
        """Return the problems; no two images are equal, so that none is found in a cache."""
        rng = np.random.default_rng(0)
        problems = []
        for number in range(self.episodes // GROUP_SIZE):
            pixels = rng.integers(0, 256, (self.images, 128, 160, 3), dtype=np.uint8)
            images = [{"type": "image", "image": Image.fromarray(each)} for each in pixels]
            content = [*images, {"type": "text", "text": f"Find x, given that y is {number}. Write \\boxed{{}}."}]
            problems.append(Sample(f"{number}", ({"role": "user", "content": content},), label="68"))
        return problems


class Loop:
    """The agent loop over some work; the log-probs are those of the engine, 0."""

    def __init__(self, work: Work) -> None:
        renderer = Renderer.from_checkpoint(STARTER_PATH)
        texts = [*(CALL % number for number in range(work.turns - 1)), TEXTS[-1]]
        turns = [renderer.encoder.encode(text) for text in texts]
        engine = FixedEngine([(*ids, renderer.stop_ids[-1]) for ids in turns])
        engine.context_length = 2**20
        sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)
        limits = Limits(max_turns=work.turns, max_new_tokens=2**16, env=EnvLimits(inline=True))
        self.episode = Episode(engine, renderer, limits, sampling)
        self.problems = work.problems()
        self.args = EnvArgs(max_turns=work.turns)

    def play(self, max_staleness: int = 0) -> list[TrajectoryGroup]:
        """Play all episodes as one step."""
        problems = [GroupProblem(sample, 0, index) for index, sample in enumerate(self.problems)]
        options = RolloutOptions(GROUP_SIZE, max_concurrent=CONCURRENCY, max_staleness=max_staleness)
        manager = RolloutManager(self.episode, ScoreEnv, self.args, problems.__getitem__, options)

        async def collect() -> list[TrajectoryGroup]:
            return list((await manager.collect(len(problems), steps_to_come=0)).groups)

        groups = asyncio.run(collect())
        ends = {trajectory.end_reason.value for group in groups for trajectory in group.trajectories}
        assert ends == {"completed"}, ends
        return groups


def record(folder: Path, renderer: Renderer, groups: list[TrajectoryGroup]) -> Path:
    """Write a recording, 8 groups a step, with outcomes and the trainer's log-probs; return its folder."""
    manifest = build_manifest(get_spec("geo3k"), renderer, "starter", {})
    with Recorder(folder / "episodes", manifest, renderer.encoder.spell) as recorder:
        for number, group in enumerate(groups):
            step = 1 + number // 8
            for trajectory in group.trajectories:
                recorder.write(trajectory, step)
                recorder.write_outcome(trajectory, step, "train", 0.5)
                recorder.write_scores(trajectory, step, trajectory.logprobs_T[trajectory.mask_T])
    return folder


def read(folder: Path) -> None:
    """Read all trajectories of a recording."""
    recording = Recording.open(folder)
    for episode in recording.episodes():
        recording.trajectory(episode)


def pack(groups: list[TrajectoryGroup], facts: ModelFacts) -> None:
    """Make the micro-batches of a step."""
    config = AlgorithmConfig()
    advantages = compute_advantages(groups, config)
    (samples,) = build_minibatches(groups, advantages, 1, facts, config, max_new_tokens=1024)
    for rows in balanced_bins(pack_rows(samples, MAX_TOKENS), MAX_TOKENS):
        collate(rows, facts.image_token_id, "cpu")


def open_page(path: Path) -> float:
    """Return the seconds until Chromium shows the first row of an exported page's table."""
    from benchmarks.browser import chromium
    from benchmarks.viewer import FIRST_ROW

    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.add_init_script(f"({FIRST_ROW})()")
        page.goto(f"file://{path}#/episodes", wait_until="commit")
        while not page.evaluate("window.firstRowMs"):  # what waits by itself needs eval, which the page forbids
            page.wait_for_timeout(50)
        return page.evaluate("window.firstRowMs") / 1e3


def parts_of(axis: str, size: int, folder: Path) -> dict[str, Part]:
    """Return the parts on the CPU that grow with an axis."""
    work = Work.at(axis, size)
    renderer = Renderer.from_checkpoint(STARTER_PATH)
    facts = ModelFacts.load(STARTER_PATH)
    groups = Loop(work).play()
    folders = (folder / str(number) for number in count(1))
    recorded = record(folder / "0", renderer, groups)
    parts: dict[str, Part] = {
        "agent loop": lambda: Loop(work).play,
        "recording": lambda: partial(record, next(folders), renderer, groups),
        "packing": lambda: partial(pack, groups, facts),
        "reading": lambda: partial(read, recorded),
    }
    first = groups[0].trajectories[0]
    if axis == "turns":
        parts["template check"] = lambda: partial(template_mismatch, first.streams[0], renderer)
    if axis == "episodes":
        page = recorded / "page.html"
        parts["agent loop, staleness 1"] = lambda: partial(Loop(work).play, max_staleness=1)
        parts["viewer, reading"] = lambda: partial(Source, recorded)
        parts["viewer, export"] = lambda: partial(export, page, [Source(recorded)])
        parts[PAGE] = lambda: partial(open_page, page)
    return parts


class LearnerStep:
    """One learner that takes steps over one stream each: of so many tokens, or with so many images of 64 tokens."""

    def __init__(self, model: str, device: str) -> None:
        self.config = shape_config(model)
        options = Options(2**18, recompute=1.0)
        self.learner = our_learner(fresh_model(self.config, device), options, device)

    def samples(self, axis: str, size: int) -> list[TrainingSample]:
        """Return the stream; of a context an eighth is the prompt."""
        if axis == "images":
            prompt, response, images = 1024, 1024, size
        else:
            prompt, response, images = size // 8, size - size // 8, 0
        sizes = Sizes(1, 1, (1, 16, 16), prompt, response, response, response, images)
        likely = np.float32(-math.log(self.config.get_text_config().vocab_size))
        made = make_samples(self.config, sizes)
        return [replace(each, logprobs_T=np.full_like(each.logprobs_T, likely), advantage=1.0) for each in made]

    def operations(self, axis: str, size: int) -> float:
        """Return the operations of a forward pass, which say how a step has to grow."""
        return forward_flops(self.config, self.samples(axis, size), shared=True).total

    def part(self, axis: str, size: int) -> Part:
        """Return a step over the stream."""
        samples = self.samples(axis, size)
        return lambda: partial(self.learner.step, [samples])
