"""What a window of history costs and saves: `python -m benchmarks.history`.

Plays long episodes of screenshots with an engine that answers at once, once with all images kept and once with the last
four. Each way has a process of its own, so that its peak memory is its own. Prints a table and writes the figures to
`benchmarks/results/history.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from PIL import Image

from agents.engines.scripted import ScriptedEngine
from agents.model import STARTER_PATH
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.types import EndReason, SamplingParams, Trajectory
from benchmarks.report import RESULTS, ROOT, commit, markdown, write_result
from envs.env import Env
from envs.history import History
from envs.spec import EnvLimits
from envs.types import Sample

PACKAGES = ("numpy", "pillow", "tokenizers")
NUM_SCREENS = 64
#: Small, because an episode keeps the pixels of all its screens, four bytes each.
WIDTH = 320
HEIGHT = 240
SCREENS = [
    Image.frombytes("RGB", (WIDTH, HEIGHT), Random(seed).randbytes(WIDTH * HEIGHT * 3)) for seed in range(NUM_SCREENS)
]


class ScreensEnv(Env):
    """Answers every turn with a screenshot."""

    def __init__(self, number: int) -> None:
        self.number = number

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show the first screen."""
        return self._screen(), {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Show the next screen."""
        return self._screen(), False, {}

    def _screen(self) -> dict[str, Any]:
        self.number += 1
        image = SCREENS[self.number % NUM_SCREENS]
        return {"obs_str": "Go on.", "role": "user", "multi_modal_data": {"image": [image]}}

    def reward(self, final_text: str) -> float:
        """Return the reward."""
        return 1.0


def play(num_episodes: int, num_turns: int, keep_images: int | None) -> dict[str, float]:
    """Return the figures of one way."""
    renderer = Renderer.from_checkpoint(STARTER_PATH)
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: "Click at 40, 80.", context_length=32_768)
    limits = Limits(num_turns, 32_768, EnvLimits(inline=True))
    sampling = SamplingParams(stop_ids=renderer.stop_ids, suppressed_ids=renderer.suppressed_ids)
    loop = Episode(engine, renderer, limits, sampling, history=History(keep_images=keep_images))
    sample = Sample("screens", ({"role": "user", "content": "Find the button."},))

    async def all_played() -> list[Trajectory]:
        plays = [loop.run(sample, lambda number=number: ScreensEnv(number), number) for number in range(num_episodes)]
        return await asyncio.gather(*plays)

    started = time.perf_counter()
    played = asyncio.run(all_played())
    seconds = time.perf_counter() - started
    assert {t.end_reason for t in played} == {EndReason.MAX_TURNS}
    return {
        "seconds": seconds,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "streams_per_episode": mean(len(t.streams) for t in played),
        "tokens_per_episode": mean(t.num_tokens for t in played),
        "longest_stream": max(len(stream.ids_T) for t in played for stream in t.streams),
        "most_images": max(len(stream.images) for t in played for stream in t.streams),
    }


def in_own_process(args: argparse.Namespace, keep_images: int) -> dict[str, float]:
    """Return the figures of one way, played in a process of its own."""
    sizes = ["--episodes", str(args.episodes), "--turns", str(args.turns), "--only", str(keep_images)]
    command = [sys.executable, "-m", "benchmarks.history", *sizes]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return a row for each way."""
    columns = ("images kept", "streams", "tokens", "longest stream", "seconds", "peak GiB")
    rows = []
    for name, way in figures.items():
        lengths = (f"{way['streams_per_episode']:.0f}", f"{way['tokens_per_episode']:.0f}", way["longest_stream"])
        rows.append((name, *lengths, f"{way['seconds']:.1f}", f"{way['peak_gib']:.2f}"))
    return markdown(columns, rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--keep-images", type=int, default=4)
    parser.add_argument("--only", type=int, help="play one way and print its figures: images kept, 0 for all")
    parser.add_argument("--out", type=Path, default=RESULTS / "history.json")
    args = parser.parse_args()
    if args.only is not None:
        print(json.dumps(play(args.episodes, args.turns, args.only or None)))
        return
    at = commit()
    ways = {"all": in_own_process(args, 0), str(args.keep_images): in_own_process(args, args.keep_images)}
    print(table(ways))
    command = f"python -m benchmarks.history --episodes {args.episodes} --turns {args.turns}"
    write_result(args.out, command, {"kept": ways}, at, PACKAGES)


if __name__ == "__main__":
    main()
