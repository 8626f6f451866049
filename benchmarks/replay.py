"""How fast recorded episodes replay: `python -m benchmarks.replay --episodes 1024`.

A script plays episodes of two turns (a call, then the right answer) with the bundled starter's tokenizer and template,
and records them. Then they are replayed, first with the environment alone, then with the whole agent loop and their
token streams compared, and nothing may differ. Reading the recording is in the time; starting Python is not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.engines.scripted import ScriptedEngine
from agents.recording import Recorder, Recording
from agents.recording.manifest import build_manifest
from agents.rendering.renderer import Renderer
from agents.rendering.tokenizer_files import model_folder
from agents.replay import ReplayConfig, open_all, replay_all
from agents.rollout.episode import Episode, Limits
from agents.types import SamplingParams
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.checking.hostile import example_arguments, write_call
from envs.execution.load import load_env
from envs.problems import ProblemsConfig, open_problems
from envs.registry import get_spec
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample, private

ENVS = ("calculator", "geo3k", "geo3k_zoom")
PACKAGES = ("numpy", "pillow", "tokenizers", "transformers")


def texts(spec: EnvSpec, sample: Sample) -> Sequence[str]:
    """Return what the script writes: a call of the first tool, then the right answer."""
    env = load_env(spec)(private(sample), spec.args())
    env.reset()
    call = write_call(env.tools[0]["function"]["name"], example_arguments(env.tools[0], "7"), "hermes")
    return call, f"\\boxed{{{sample.label}}}"


def record(env_id: str, num_episodes: int, seed: int, folder: Path, renderer: Renderer) -> None:
    """Play and record episodes, one of each problem."""
    spec = get_spec(env_id)
    source = open_problems(spec, ProblemsConfig(seed=seed), num_episodes)
    sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)
    limits = Limits(spec.max_turns, 512, EnvLimits.of(spec))

    async def play_all(recorder: Recorder) -> None:
        for number in range(num_episodes):
            sample = source[number]
            written = texts(spec, sample)
            engine = ScriptedEngine(renderer.tokenizer, lambda turn, _, written=written: written[turn])
            build = load_env(spec)
            played = await Episode(engine, renderer, limits, sampling).run(
                sample, lambda sample=sample, build=build: build(private(sample), spec.args()), number, group=number
            )
            recorder.write(played, step=0)

    episode = Episode(ScriptedEngine(renderer.tokenizer, lambda turn, _: ""), renderer, limits, sampling)
    with Recorder(folder, build_manifest(spec, renderer, "starter", {"train": episode})) as recorder:
        asyncio.run(play_all(recorder))


def measure(folder: Path, model: str, max_concurrent: int, repeats: int) -> dict[str, float]:
    """Replay a few times; return the best episodes/s, with the processor's share."""
    best: dict[str, float] = {}
    for number in range(repeats):
        copy = folder / f"copy-{model}-{number}"  # so that no image is in memory already
        shutil.copytree(folder / "recorded", copy)
        config = ReplayConfig(run=str(copy), model=model, max_concurrent=max_concurrent)
        opened = open_all(config)
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = replay_all(config, opened)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert outcome.differing == [] and outcome.num_replayed == outcome.num_episodes, "an episode differs"
        if not best or wall < best["seconds"]:
            best = {
                "seconds": round(wall, 4),
                "episodes_per_s": round(outcome.num_replayed / wall, 1),
                "turns_per_s": round(outcome.num_turns / wall, 1),
                "cpu_ms_per_episode": round(cpu / outcome.num_replayed * 1e3, 3),
            }
    return best


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-concurrent", type=int, default=64)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "replay.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    at, rows, figures = commit(), [], list[dict[str, Any]]()
    renderer = Renderer.from_checkpoint(model_folder("starter"))
    for env_id in ENVS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            record(env_id, args.episodes, args.seed, folder / "recorded", renderer)
            num_tokens = sum(len(episode.ids) for episode in Recording.open(folder / "recorded").episodes())
            for what, model in (("environment alone", ""), ("token stream too", "starter")):
                best = measure(folder, model, args.max_concurrent, args.repeats)
                tokens_per_s = round(num_tokens / best["seconds"])
                figures.append({"env": env_id, "compared": what, "tokens_per_s": tokens_per_s, **best})
                numbers = (best["episodes_per_s"], best["turns_per_s"], tokens_per_s, best["cpu_ms_per_episode"])
                rows.append((env_id, what, *(f"{number:,.0f}" for number in numbers[:-1]), f"{numbers[-1]:.2f}"))
    columns = ("environment", "compared", "episodes/s", "turns/s", "tokens/s", "CPU ms/episode")
    print(markdown(columns, rows))
    given = f"--episodes {args.episodes} --repeats {args.repeats} --max-concurrent {args.max_concurrent}"
    command = f"python -m benchmarks.replay {given} --cores {args.cores} --seed {args.seed}"
    settings = {"seed": args.seed, "episodes": args.episodes, "max_concurrent": args.max_concurrent}
    write_result(args.out, command, {**settings, "figures": figures}, at, PACKAGES)


if __name__ == "__main__":
    main()
