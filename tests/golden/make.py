"""Make the golden recordings anew, after a change of an environment that is meant: `python -m tests.golden.make`.

Each is played by a script in the real agent loop, with the tokenizer and template of the bundled starter: right and
wrong answers, tool calls, calls that cannot be made, silence, and budgets that run out.
`tests/agents/replaying/test_golden.py` replays them all.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agents.engines.scripted import ScriptedEngine
from agents.recording import Manifest, Recorder
from agents.recording.manifest import build_manifest
from agents.recording.schema import EVALUATE
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from agents.rollout.episode import Episode, Limits
from agents.types import SamplingParams, Timing, Trajectory
from envs.checking.hostile import example_arguments, hostile_scripts, write_call
from envs.env import Env
from envs.execution.load import load_env
from envs.problems import ProblemsConfig, open_problems, read_sample
from envs.registry import get_spec
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample, private

FOLDER = Path(__file__).parent
ENVS = ("geo3k", "geo3k_single", "geo3k_zoom", "calculator", "guess", "coins", "desktop", "frozen_lake")
NUM_SAMPLES = 3
CONTEXT_LENGTH = 4096
#: Tokens after the prompt, by way.
BUDGETS = {"scripted": 1024, "short": 40}
#: Which of the texts that no environment may stumble over are played.
HOSTILE = (
    "broken JSON", "no name", "arguments of wrong types", "truncated call", "the call in a wrapper", "unknown tool",
    "extra argument", "no arguments", "five calls", "a call, then prose", "a call in the other format", "empty text",
)  # fmt: skip
ACROSS_THE_ICE = ("down", "down", "right", "right", "down", "right")


@dataclass(frozen=True)
class Line:
    """What a script writes, turn after turn; the last text again and again once the others are written."""

    way: str
    texts: Sequence[str]


def lines(env: Env, label: str | None, number: int) -> Iterator[Line]:
    """Yield the scripts that are played on the sample of a number."""
    moves = tuple(write_call("act", {"action": action}, "hermes") for action in ACROSS_THE_ICE)
    solution = tuple(env.solution()) or ((f"\\boxed{{{label}}}",) if label else moves)
    yield Line("scripted", solution)
    if label is not None:
        yield Line("scripted", (f"Answer: {label}",))  # no box: not right for every grader
    if number:
        return
    yield Line("scripted", ("I think that it is 99.", "\\boxed{-1}", "\\boxed{-2}"))
    yield Line("scripted", ("Let me see.",))
    yield Line("short", ("so " * 60,))
    for tool in env.tools:
        call = write_call(tool["function"]["name"], example_arguments(tool, "7"), "hermes")
        yield Line("scripted", (call, *solution))
        yield Line("short", (call, *solution))
    chosen = [script for script in hostile_scripts(env.tools, "hermes") if script.name in HOSTILE]
    yield from (Line("scripted", (*script.texts, *solution)) for script in chosen)


def make_episode(renderer: Renderer, spec: EnvSpec, line: Line) -> Episode:
    """Return the agent loop in which a script is played."""
    texts = line.texts
    return Episode(
        ScriptedEngine(renderer.tokenizer, lambda turn, _: texts[min(turn, len(texts) - 1)], CONTEXT_LENGTH),
        renderer,
        Limits(spec.max_turns, BUDGETS[line.way], EnvLimits.of(spec), check_template_every=1),
        SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids),
        history=spec.history,
    )


def manifest(renderer: Renderer, spec: EnvSpec) -> Manifest:
    """Return what the recording says of itself, without what is another on every machine and day."""
    ways = {way: make_episode(renderer, spec, Line(way, ("",))) for way in BUDGETS}
    described = build_manifest(spec, renderer, "starter", ways)
    return described.model_copy(update={"created": "", "registry": "", "versions": {}})


def timeless(t: Trajectory) -> Trajectory:
    """Return an episode without its times."""
    turns = tuple(replace(turn, engine_s=0.0, env_s=0.0) for turn in t.turns)
    return replace(t, turns=turns, timing=Timing())


def open_env(spec: EnvSpec, sample: Sample) -> Env:
    """Return an environment whose tools and solution are known."""
    env = load_env(spec)(private(sample), spec.args())
    env.reset()
    return env


def make(env_id: str, folder: Path, renderer: Renderer) -> int:
    """Record every script in an environment; return the number of episodes."""
    spec = get_spec(env_id)
    source, group = open_problems(spec, ProblemsConfig(seed=7), NUM_SAMPLES), 0
    shutil.rmtree(folder, ignore_errors=True)
    with Recorder(folder, manifest(renderer, spec)) as recorder:
        for number in range(NUM_SAMPLES):
            sample = read_sample(spec, source, number)
            for line in lines(open_env(spec, sample), sample.label, number):
                playing = make_episode(renderer, spec, line).run(
                    sample, lambda sample=sample: load_env(spec)(private(sample), spec.args()), seed=group, group=group
                )
                recorder.write(timeless(asyncio.run(playing)), step=0, phase=EVALUATE, way=line.way)
                group += 1
    return group


def main() -> None:
    """Make all."""
    renderer = Renderer.from_checkpoint(model_folder("starter"))
    for env_id in ENVS:
        num_episodes = make(env_id, FOLDER / env_id, renderer)
        size = sum(file.stat().st_size for file in (FOLDER / env_id).rglob("*") if file.is_file())
        print(f"{env_id}: {num_episodes} episodes, {size:,} bytes")


if __name__ == "__main__":
    main()
