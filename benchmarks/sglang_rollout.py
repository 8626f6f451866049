"""Rollouts on real SGLang servers, held against the learner, the embedded engine and a bare client. Needs a GPU.

`python -m benchmarks.sglang_rollout --model starter --parts parity greedy throughput faults`; prints tables and writes
`benchmarks/results/sglang_MODEL.json`. `--model 2b` is the shape of Qwen3-VL-2B with fresh weights. Both are first
taught to call the tools of `geo3k` and `geo3k_zoom` by scripted lessons, so that episodes have several turns and
images arrive late; what they answer is mostly wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from agents.engines.base import Engine
from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.client import authorization
from agents.engines.sglang.images import image_fields
from agents.engines.sglang.servers import Server
from agents.model import STARTER_PATH
from agents.model.mrope import num_images_within
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.manager import rollout_groups
from agents.types import EndReason, ProcessedImage, SamplingDistribution, Trajectory, TrajectoryGroup
from benchmarks.learner_workload import shape_config
from benchmarks.lessons import lessons, teach
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.execution.load import load_env
from envs.problems import with_system_prompt
from envs.registry import get_spec
from envs.spec import EnvLimits
from tests.processes import kill_listener
from trainer.algorithms.advantages import compute_advantages
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.data.packing import training_samples
from trainer.learner.cuda_ipc import share_weights
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.setup.components import sampling_params
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import IpcTransport, ServersTransport

PARTS = ("parity", "greedy", "throughput", "faults")
ENVS = ("geo3k", "geo3k_zoom")
GROUP_SIZE = 8
MAX_NEW_TOKENS = 320


def make_checkpoint(name: str, folder: Path, steps: int, seed: int, device: str, num_words: int = 0) -> Renderer:
    """Write a taught checkpoint into a folder, whose turns begin with so many words of thoughts."""
    renderer = Renderer.from_checkpoint(STARTER_PATH)
    torch.manual_seed(seed)
    if name == "starter":
        model, lr = PolicyModel.load(STARTER_PATH).to(device), 1e-3
    else:
        with torch.device(device):
            model, lr = PolicyModel.from_config(shape_config("2b")), 1e-4
    started = time.perf_counter()
    groups = [group for env in ENVS for group in lessons(renderer, env, 256, seed, num_words)]
    played = time.perf_counter()
    number = sum(parameter.numel() for parameter in model.parameters())
    learner, loss = teach(model, groups, steps, lr)
    learner.save(folder, torch.float32)
    renderer.save(folder)
    print(
        f"{name}: {number / 1e6:.0f} M parameters, {steps} steps of lessons in {time.perf_counter() - played:.0f} s "
        f"(played in {played - started:.0f} s), loss {loss:.2f}",
        flush=True,
    )
    del learner, model
    gc.collect()
    torch.cuda.empty_cache()  # others use the GPU from here on
    return renderer


@dataclass(frozen=True, eq=False)
class Bench:
    """What all parts share."""

    options: argparse.Namespace
    folder: Path
    renderer: Renderer

    def engine(self, num_servers: int = 1) -> SGLangEngine:
        settings = SGLangSettings(
            model_path=str(self.folder),
            num_servers=num_servers,
            mem_fraction=self.options.mem_fraction,
            arguments=tuple(shlex.split(self.options.engine_args)),
            log_folder=self.options.out / "servers",
            command=tuple(shlex.split(self.options.server_command)),
            max_sessions=self.options.episodes,
            context_length=4096,
        )
        return SGLangEngine(settings, self.renderer.image_token_id)

    async def play(
        self, engine: Engine, env: str, problems: int, group_size: int, temperature: float, seed: int, **options: Any
    ) -> tuple[list[TrajectoryGroup], float]:
        """Play groups of an environment; return them and the seconds that took."""
        spec = get_spec(env)
        source = with_system_prompt(spec.load_dataset("train", problems, seed), spec.load_system_prompt())
        limits = Limits(3, MAX_NEW_TOKENS, EnvLimits.of(spec))
        loop = Episode(engine, self.renderer, limits, sampling_params(self.renderer, temperature))
        samples = [source[index] for index in range(problems)]
        started = time.perf_counter()
        args = spec.args(3, "hermes")
        groups = await rollout_groups(loop, samples, load_env(spec), args, group_size, seed, **options)
        return groups, time.perf_counter() - started


def counts(groups: Sequence[TrajectoryGroup], seconds: float) -> dict[str, Any]:
    """Return what a rollout held; prompt lengths are compared by the agent loop in every turn."""
    episodes = [t for group in groups for t in group.trajectories]
    turns = [turn for t in episodes for turn in t.turns]
    tokens = sum(t.num_model_tokens for t in episodes)
    return {
        "episodes": len(episodes),
        "turns": len(turns),
        "late_pictures": sum(len(t.images) > 1 for t in episodes),
        "ends": dict(Counter(t.end_reason.value for t in episodes)),
        "invalid": sum(t.end_reason is EndReason.INVALID_STREAM for t in episodes),
        "model_tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds),
        "turns_per_s": round(len(turns) / seconds, 1),
        "cached_frac": round(sum(turn.num_cached for turn in turns) / max(1, sum(turn.start for turn in turns)), 3),
        "check_frac": sum(t.timing.check_s for t in episodes) / max(1e-9, seconds),
    }


async def parity(bench: Bench) -> dict[str, Any]:
    """Rollouts before and after weight updates, each measured against the learner; updates over IPC, then from disk."""
    engine, rows, columns = bench.engine(), [], ("env", "weights", "episodes", "turns", "late_pictures", "invalid")
    options = bench.options
    model = PolicyModel.load(bench.folder)
    optim = OptimConfig(lr=options.lr, warmup_steps=0)
    packing = LearnerConfig(max_tokens_per_microbatch=options.max_tokens)
    sampling = sampling_params(bench.renderer, 1.0)
    try:
        started = time.perf_counter()
        learner = FSDPLearner(model, sampling, 100, optim, config=packing, device=options.device, dtype=torch.bfloat16)
        spec = get_spec("geo3k")
        prompt = with_system_prompt(spec.load_dataset("train", 1, 0), spec.load_system_prompt())[0].prompt
        probed = bench.renderer.prompt(prompt)
        folder = bench.folder / "sync"
        carriers = {
            "disk": ServersTransport(learner, engine, folder),
            "ipc": IpcTransport(learner, engine, folder, partial(share_weights, learner)),
        }
        first = carriers[options.transports[0]]
        sync = WeightSync(learner, first, probed.ids, probed.images, model.image_token_id, options.probe_tolerance)
        probe = await sync.start()
        print(f"server up after {time.perf_counter() - started:.0f} s; {probe}", flush=True)
        for env in ENVS:
            for transport in options.transports:
                version = learner.steps_done
                problems = options.episodes // GROUP_SIZE
                groups, seconds = await bench.play(engine, env, problems, GROUP_SIZE, 1.0, seed=version)
                ways = AlgorithmConfig()
                samples = training_samples(
                    groups, compute_advantages(groups, ways), model.image_token_id, model.merge_size, ways, 1024
                )
                train_started = time.perf_counter()
                stats = await asyncio.to_thread(learner.step, [samples])
                train_s = time.perf_counter() - train_started
                sync.transport = carriers[transport]
                await engine.pause()
                push = await sync.push(learner.steps_done)
                gap = await sync.probe()
                await engine.resume()
                rows.append(
                    {"env": env, "weights": version, **counts(groups, seconds)}
                    | {
                        "kl": stats.rollout_train_kl,
                        "kl_by_turn": list(stats.kl_by_turn),
                        "gap_mean": stats.logprob_gap_mean,
                        "gap_p99": stats.logprob_gap_p99,
                        "gap_max": stats.logprob_gap_max,
                        "entropy": stats.entropy,
                        "train_s": round(train_s, 2),
                        "then_pushed_by": transport,
                        "push_s": round(push.seconds, 3),
                        "probe_gap": gap,
                    }
                )
                print({k: v for k, v in rows[-1].items() if k not in ("ends",)}, flush=True)
    except torch.OutOfMemoryError as error:  # what was measured before is worth keeping
        rows.append({"failed": str(error).split(". ")[0]})
        print(rows[-1], flush=True)
    finally:
        await engine.close()
    columns = (*columns, "kl", "gap_mean", "gap_p99", "push_s")
    print(markdown(columns, [[_short(row.get(name)) for name in columns] for row in rows]))
    return {"rows": rows}


async def greedy(bench: Bench) -> dict[str, Any]:
    """The same problems at temperature 0 on both engines with the same weights, and why streams differ."""
    problems = bench.options.greedy
    embedded = HFEngine(PolicyModel.load(bench.folder, torch.bfloat16), max_batch=64, device=bench.options.device)
    judge = PolicyModel.load(bench.folder).to(bench.options.device).eval()
    servers, rows = bench.engine(), []
    try:
        await servers.start()
        for env in ENVS:
            ours, hf_s = await bench.play(embedded, env, problems, 1, 0.0, seed=3)
            theirs, sglang_s = await bench.play(servers, env, problems, 1, 0.0, seed=3)
            gaps = [
                gap
                for a, b in zip(ours, theirs, strict=True)
                if (gap := divergence(judge, bench.renderer, a.trajectories[0], b.trajectories[0])) is not None
            ]
            rows.append(
                {
                    "env": env,
                    "episodes": problems,
                    "identical": problems - len(gaps),
                    "near_ties": sum(gap <= 0.1 for gap in gaps),
                    "other": sum(gap > 0.1 for gap in gaps),
                    "largest_gap": max(gaps, default=0.0),
                    "gaps": sorted(round(gap, 4) for gap in gaps),
                    "hf_s": round(hf_s, 1),
                    "sglang_s": round(sglang_s, 1),
                }
            )
            print(rows[-1], flush=True)
    finally:
        await servers.close()
    columns = ("env", "episodes", "identical", "near_ties", "other", "largest_gap", "hf_s", "sglang_s")
    print(markdown(columns, [[_short(row[name]) for name in columns] for row in rows]))
    return {"rows": rows}


def divergence(judge: PolicyModel, renderer: Renderer, one: Trajectory, other: Trajectory) -> float | None:
    """Return how far apart, in nats of the float32 network, the first two tokens are where the streams part.

    None where the streams are equal. Both engines take the likelier token by their own bfloat16 arithmetic, so tokens
    that are about equally likely may change places.
    """
    length = min(len(one.ids_T), len(other.ids_T))
    differs = np.flatnonzero(one.ids_T[:length] != other.ids_T[:length])
    if not len(differs):
        return None if len(one.ids_T) == len(other.ids_T) else float("inf")
    at = int(differs[0])
    before = one.ids_T[:at].tolist()
    images = one.images[: num_images_within(before, one.images, judge.image_token_id)]
    device, distribution = next(judge.parameters()).device, SamplingDistribution(1.0, renderer.suppressed_ids)
    first, second = (
        stream_logprobs(judge, [*before, int(t.ids_T[at])], images, device, distribution=distribution)[-1]
        for t in (one, other)
    )
    return float(abs(first - second))


async def throughput(bench: Bench) -> dict[str, Any]:
    """Tokens per second through the agent loop, and of the same requests sent by a bare client as fast as it can."""
    engine, rows = bench.engine(), []
    try:
        await engine.start()
        sent: list[dict[str, Any]] = []
        send = engine.send

        async def noted(server: Server, body: dict[str, Any], images: Sequence[ProcessedImage], salt: str) -> Any:
            sent.append(body | image_fields(images, salt, release=server.client.release))
            return await send(server, body, images, salt)

        problems = bench.options.episodes
        await bench.play(engine, "geo3k", problems, 1, 0.0, seed=11)  # kernels, encoded images
        url = engine.servers.up[0].client.url
        for concurrency in bench.options.concurrency:
            for round_number in range(bench.options.rounds):
                await engine.servers.up[0].client.call("flush_cache", {})
                sent.clear()
                engine.send = noted  # type: ignore[method-assign]
                groups, loop_s = await bench.play(
                    engine, "geo3k", problems, 1, 0.0, seed=11, max_concurrent=concurrency
                )
                engine.send = send  # type: ignore[method-assign]
                tokens = sum(t.num_model_tokens for group in groups for t in group.trajectories)
                await engine.servers.up[0].client.call("flush_cache", {})
                key = engine.servers.settings.api_key
                bare_tokens, bare_s = await bare_client(url, list(sent), concurrency, authorization(key))
                rows.append(
                    {
                        "concurrency": concurrency,
                        "round": round_number,
                        "requests": len(sent),
                        "loop_tokens": tokens,
                        "loop_tokens_per_s": round(tokens / loop_s),
                        "bare_tokens": bare_tokens,
                        "bare_tokens_per_s": round(bare_tokens / bare_s),
                        "share": round(tokens / loop_s / (bare_tokens / bare_s), 3),
                        "loop_requests_per_s": round(len(sent) / loop_s, 1),
                    }
                )
                print(rows[-1], flush=True)
    finally:
        await engine.close()
    print(markdown(tuple(rows[0]), [[_short(value) for value in row.values()] for row in rows]))
    return {"rows": rows}


async def bare_client(
    url: str, bodies: Sequence[dict[str, Any]], concurrency: int, headers: Mapping[str, str]
) -> tuple[int, float]:
    """Send recorded requests in order, so many at a time; return the tokens written and the seconds."""
    waiting = iter([{**body, "rid": f"bare-{time.time_ns()}-{number}"} for number, body in enumerate(bodies)])
    tokens = 0
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as http:

        async def worker() -> None:
            nonlocal tokens
            for body in waiting:
                async with http.post(f"{url}/generate", json=body) as response:
                    tokens += len((await response.json())["output_ids"])

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return tokens, time.perf_counter() - started


async def faults(bench: Bench) -> dict[str, Any]:
    """Kill one of two servers in mid-step, then the only one after a weight update; count episodes."""
    rows = []
    new = bench.folder / "shifted"
    model = PolicyModel.load(bench.folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std().nan_to_num(0.0) * 0.01)
    model.save(new)
    bench.renderer.save(new)
    for num_servers in (2, 1):
        engine = bench.engine(num_servers)
        try:
            await engine.start()
            engine.current_weights = lambda: new
            await engine.update_from_disk(new, version=1)
            await bench.play(engine, "geo3k", 16, 1, 1.0, seed=1)  # kernels
            ended: Counter[tuple[str, int]] = Counter()
            asked = engine.num_requests

            async def kill(engine: SGLangEngine = engine, after: int = asked + bench.options.episodes // 2) -> float:
                while engine.num_requests < after:
                    await asyncio.sleep(0.01)
                kill_listener(engine.servers.all[0].client.url)
                return time.perf_counter()

            killing = asyncio.create_task(kill())
            problems = bench.options.episodes // GROUP_SIZE
            count = lambda t, ended=ended: ended.update([(t.sample_id, t.sample_index)])  # noqa: E731
            groups, seconds = await bench.play(engine, "geo3k", problems, GROUP_SIZE, 1.0, seed=2, on_episode=count)
            finished = time.perf_counter()
            killed = await killing
            turns = (turn for group in groups for t in group.trajectories for turn in t.turns)
            versions = Counter[int]()
            for version, num_tokens in (run for turn in turns for run in turn.versions):
                versions[version] += num_tokens
            rows.append(
                {
                    "servers": num_servers,
                    "episodes": problems * GROUP_SIZE,
                    "ended_once": sum(number == 1 for number in ended.values()),
                    "lost": problems * GROUP_SIZE - len(ended),
                    "twice": sum(number > 1 for number in ended.values()),
                    "requests_retried": engine.num_retried,
                    "tokens_by_version": dict(versions),
                    **{k: v for k, v in counts(groups, seconds).items() if k in ("ends", "invalid", "seconds")},
                    "seconds_after_kill": round(finished - killed, 1),
                    "events": list(engine.servers.events),
                    "restarts": [server.num_restarts for server in engine.servers.all],
                }
            )
            print(rows[-1], flush=True)
        finally:
            await engine.close()
    columns = (
        "servers",
        "episodes",
        "ended_once",
        "lost",
        "twice",
        "requests_retried",
        "invalid",
        "seconds_after_kill",
    )
    print(markdown(columns, [[row[name] for name in columns] for row in rows]))
    return {"rows": rows}


def _short(value: object) -> object:
    return f"{value:.2e}" if isinstance(value, float) and 0 < abs(value) < 0.01 else value


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=("starter", "2b"), default="starter")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--episodes", type=int, default=512, help="episodes of each rollout")
    parser.add_argument("--greedy", type=int, default=256, help="problems of the comparison at temperature 0")
    parser.add_argument("--concurrency", type=int, nargs="+", default=(64, 256))
    parser.add_argument("--rounds", type=int, default=4, help="repetitions of the throughput comparison")
    parser.add_argument("--lesson-steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--max-tokens", type=int, default=8192, help="padded tokens of one forward and backward")
    parser.add_argument("--mem-fraction", type=float, default=0.3)
    parser.add_argument("--probe-tolerance", type=float, default=0.2)
    parser.add_argument("--engine-args", default="", help="more arguments of sglang.launch_server")
    parser.add_argument("--transports", nargs="+", default=("ipc", "disk"), help="how weights travel, one a step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--server-command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    at = commit()
    with tempfile.TemporaryDirectory(prefix="trueturn-") as work:
        folder = Path(work) / "checkpoint"
        bench = Bench(options, folder, make_checkpoint(options.model, folder, options.lesson_steps, 0, options.device))
        torch.cuda.empty_cache()
        figures: dict[str, Any] = {
            "model": options.model,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        }
        for part in options.parts:
            print(f"== {part}", flush=True)
            try:
                figures[part] = asyncio.run(globals()[part](bench))
            except Exception as error:  # the other parts are still worth having
                figures[part] = {"failed": f"{type(error).__name__}: {error}"}
                print(f"{part} failed: {type(error).__name__}: {error}", flush=True)
                traceback.print_exc()
            gc.collect()
            torch.cuda.empty_cache()
            path = options.out / f"sglang_{options.model}.json"
            command = f"python -m benchmarks.sglang_rollout {shlex.join(sys.argv[1:])}"
            write_result(path, command, figures, at, ("torch", "transformers"))


if __name__ == "__main__":
    main()
