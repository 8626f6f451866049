"""How the viewer's page behaves with many episodes: `python -m benchmarks.viewer --episodes 10000`.

Plays a scripted policy of mixed habits in the real agent loop against the real environment, eight samples a problem,
each problem with its own image; log-probs are drawn at random, as no network is asked. The recording is exported as
one page, which Chromium opens. Prints a table and writes `benchmarks/results/viewer.json`.

`python -m benchmarks.viewer --screenshots docs --run runs/x [--other runs/y]` takes the images of docs/viewer.md;
`--only episode --episode train-146-2` that of one episode alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agents.engines.scripted import ScriptedEngine
from agents.model import STARTER_PATH
from agents.recording import Recorder
from agents.recording.manifest import build_manifest
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.types import SamplingParams, Trajectory
from agents.viewer.export import export
from agents.viewer.source import Source
from benchmarks.browser import chromium
from benchmarks.report import RESULTS, commit, markdown, write_result
from benchmarks.screenshots import take_screenshots
from envs.env import EnvArgs
from envs.geo3k.env import build_env
from envs.geo3k.procedural import ProceduralGeo3k
from envs.images import image_digest
from envs.registry import get_spec
from envs.spec import EnvLimits
from starter.demonstrations import demonstration_sample
from starter.plans import MAX_TURNS, Mixture, Plan

GROUP_SIZE, GROUPS_PER_STEP = 8, 8
#: Habits that give rewards of both kinds.
HABITS = Mixture(tools_offered=1.0, checks=0.6, gives_up=0.5)
PACKAGES = ("numpy", "pillow", "playwright")

FIRST_ROW = """() => {
  const look = () => {
    const row = document.querySelector(".table-space .row a");
    if (row) window.firstRowMs = performance.now(); else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""
SCROLL = """async ([pixels, frames]) => {
  const table = document.querySelector(".table"), times = [];
  table.scrollTop = 0;
  await new Promise((done) => setTimeout(done, 300));
  for (let k = 0, last = 0; k <= frames; k += 1) {
    const now = await new Promise(requestAnimationFrame);
    if (k) times.push(now - last);
    last = now;
    table.scrollTop += pixels;
  }
  return times;
}"""
OPEN = """async (hash) => {
  const started = performance.now(), id = hash.split("/")[2].split("?")[0];
  const selector = hash.includes("color=") ? ".tokens .t" : ".turn";
  location.hash = hash;
  while (document.querySelector("h1")?.textContent !== id || !document.querySelector(selector))
    await new Promise(requestAnimationFrame);
  return performance.now() - started;
}"""
SELECT = """(query) => {
  const started = performance.now();
  const found = chosenPlaces(app.runs[0], query).length;
  return [performance.now() - started, found];
}"""


def play_all(renderer: Renderer, num_episodes: int) -> Iterator[Trajectory]:
    """Yield episodes of a scripted policy, problem by problem."""
    problems = ProceduralGeo3k("train", -(-num_episodes // GROUP_SIZE), seed=0)
    loop, rng = asyncio.new_event_loop(), np.random.default_rng(0)
    for k in range(num_episodes):
        group, sample_index = divmod(k, GROUP_SIZE)
        problem, image = problems.item(group)
        turns = Plan.draw(problem, HABITS, random.Random(k)).turns()
        episode = Episode(
            ScriptedEngine(renderer.tokenizer, lambda turn, _, turns=turns: turns[turn].text),
            renderer,
            Limits(max_turns=MAX_TURNS, max_new_tokens=1024, env=EnvLimits(inline=True)),
            SamplingParams(stop_ids=renderer.stop_ids),
        )
        sample = demonstration_sample(problem, image)
        env = build_env(sample, EnvArgs(MAX_TURNS))
        played = loop.run_until_complete(episode.run(sample, lambda env=env: env, seed=k))
        logprobs_T = np.where(played.mask_T, -rng.gamma(0.2, 0.8, len(played.mask_T)), 0).astype(np.float32)
        images = tuple(replace(each, digest=image_digest(image)) for each in played.images)
        yield replace(played, group=group, sample_index=sample_index, logprobs_T=logprobs_T, images=images)
    loop.close()


def write_run(folder: Path, num_episodes: int) -> None:
    """Record so many episodes, with outcomes, the trainer's log-probs and metrics."""
    renderer = Renderer.from_checkpoint(STARTER_PATH)
    spec, rng, rewards = get_spec("geo3k"), np.random.default_rng(1), list[float]()
    with Recorder(
        folder / "episodes", build_manifest(spec, renderer, "starter", {}), renderer.encoder.spell
    ) as recorder:
        for played in play_all(renderer, num_episodes):
            step = 1 + played.group // GROUPS_PER_STEP
            logprobs_N = played.logprobs_T[played.mask_T]
            recorder.write(played, step)
            recorder.write_outcome(played, step, "train", round(played.reward - 0.5, 3))
            recorder.write_scores(played, step, logprobs_N + rng.normal(0, 2e-3, len(logprobs_N)).astype(np.float32))
            rewards.append(played.reward)
    size = GROUP_SIZE * GROUPS_PER_STEP
    rows = [
        {
            "step": 1 + k // size,
            "reward": float(np.mean(rewards[k : k + size])),
            "entropy": float(rng.uniform(0.1, 0.2)),
        }
        for k in range(0, len(rewards), size)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def frames(times: list[float]) -> dict[str, float]:
    """Return what a scroll was like, in ms.

    Example: `frames([16.0, 16.0, 34.0])` has a mean of 22.0 and a share of 0.333 of frames above 20 ms.
    """
    p95, p99 = np.percentile(times, [95, 99])
    share = float(np.mean(np.array(times) > 20))
    figures = {"mean": np.mean(times), "p95": p95, "p99": p99, "most": max(times)}
    return {name: round(float(value), 1) for name, value in figures.items()} | {"above_20_ms": round(share, 4)}


def measure(page_path: Path, ids: list[str]) -> dict[str, Any]:
    """Return the figures of one page in Chromium."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.add_init_script(f"({FIRST_ROW})()")
        page.goto(f"file://{page_path}#/episodes", wait_until="commit")
        while not page.evaluate("window.firstRowMs"):  # what waits by itself needs eval, which the page forbids
            page.wait_for_timeout(50)
        page.wait_for_timeout(500)
        load_ms = page.evaluate("window.firstRowMs")
        slow, fast = page.evaluate(SCROLL, [44, 600]), page.evaluate(SCROLL, [720, 600])
        selections = {
            name: [round(page.evaluate(SELECT, query)[0], 1) for _ in range(2)]
            for name, query in (("sorted by gap", {"sort": "-max_gap"}), ("searched", {"q": "boxed 68"}))
        }
        chosen = random.Random(0).sample(ids, min(20, len(ids)))
        opened = [page.evaluate(OPEN, f"#/episode/{each}") for each in chosen]
        tokens = [page.evaluate(OPEN, f"#/episode/{each}?color=gap") for each in reversed(chosen)]
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        session.send("Performance.enable")
        heap = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
        resident = max(resident_mb(each["id"]) for each in processes if each["type"] == "renderer")
        version = browser.version
    return {
        "chromium": version,
        "load_ms": round(load_ms),
        "scroll_ms": {"a row a frame": frames(slow), "all of it in 600 frames": frames(fast)},
        "select_ms": selections,
        "open_ms": {"conversation": spread(opened), "tokens": spread(tokens)},
        "heap_mb": round(heap["JSHeapUsedSize"] / 1e6, 1),
        "resident_mb": resident,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return mean and largest of some values."""
    return {"mean": round(float(np.mean(values)), 1), "most": round(max(values), 1)}


def resident_mb(process: int) -> float:
    """Return the memory that a process holds, of Linux alone."""
    path = Path(f"/proc/{process}/statm")
    return round(int(path.read_text().split()[1]) * 4096 / 1e6, 1) if path.exists() else 0.0


def run(num_episodes: int, folder: Path) -> dict[str, Any]:
    """Write a run, export it, and open it."""
    write_run(folder / "run", num_episodes)
    source, started = Source(folder / "run"), time.perf_counter()
    size = export(folder / "page.html", [source])
    export_s = time.perf_counter() - started
    num_tokens = int(sum(float(value or 0) for value in source.columns["num_tokens"]))
    ids = [str(each) for each in source.columns["id"]]
    figures = {"episodes": len(source), "tokens": num_tokens, "page_mb": round(size / 1e6, 1)}
    return figures | {"export_s": round(export_s, 1), **measure(folder / "page.html", ids)}


def table(figures: list[dict[str, Any]]) -> str:
    """Return a Markdown table, one row a size."""
    columns = ("episodes", "page, MB", "first row, ms", "frame, ms: mean / p95 / p99", "flung, ms", "search, ms")
    columns += ("episode, ms", "tokens, ms", "heap, MB")
    rows = []
    for each in figures:
        slow, fast = each["scroll_ms"].values()
        scrolls = [f"{way['mean']} / {way['p95']} / {way['p99']}" for way in (slow, fast)]
        opened, tokens = (each["open_ms"][name]["mean"] for name in ("conversation", "tokens"))
        searched = each["select_ms"]["searched"][0]
        rows.append(
            (each["episodes"], each["page_mb"], each["load_ms"], *scrolls, searched, opened, tokens, each["heap_mb"])
        )
    return markdown(columns, rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[10_000])
    parser.add_argument("--out", type=Path, default=RESULTS / "viewer.json")
    parser.add_argument("--screenshots", type=Path, help="folder for pictures of --run; nothing is measured then")
    parser.add_argument("--run", type=Path, help="run whose pictures are taken")
    parser.add_argument("--episode", default="", help="episode that is shown; empty: one that is worth it")
    parser.add_argument("--only", default="", help="name of the picture that is taken; empty: all")
    parser.add_argument("--other", type=Path, help="run that it is compared with")
    args = parser.parse_args()
    if args.screenshots:
        if not args.run:
            parser.error("--screenshots needs --run")
        take_screenshots(args.screenshots, args.run, args.other, args.episode, args.only)
        return
    at, figures = commit(), []
    for num_episodes in args.episodes:
        with tempfile.TemporaryDirectory() as folder:
            figures.append(run(num_episodes, Path(folder)))
            print(table(figures[-1:]), flush=True)
    command = f"python -m benchmarks.viewer --episodes {' '.join(map(str, args.episodes))}"
    write_result(args.out, command, {"figures": figures}, at, PACKAGES)
    print(table(figures))


if __name__ == "__main__":
    main()
