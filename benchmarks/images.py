"""Requests with images against requests of text on one SGLang server. Needs a GPU.

`python -m benchmarks.images --model starter`; prints tables and writes `benchmarks/results/images_MODEL.json`. The
server is asked in two ways: `before` is SGLang's own (a data URI with every request), `after` sends each image once.
`--model 2b` is the shape of Qwen3-VL-2B with fresh weights, `starter` the bundled model; both read images of up to
1,024 tokens here. Samples come in groups of 8 that share their prompt. `--profile py-spy` also lists the server's
busiest functions while it answers the last workload, of text and with each image sent once.

`--parts groups` asks by the engine instead, as a run does.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.payloads import generate_body, parse_answer, parse_scores, score_body
from agents.engines.sglang.process import LocalProcess
from agents.engines.sglang.servers import Server
from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.rendering.renderer import Renderer
from agents.types import GenerateRequest, ProcessedImage, SamplingParams
from benchmarks.learner_workload import shape_config
from benchmarks.report import RESULTS, commit, markdown, write_result
from trainer.setup.components import sampling_params

GROUP_SIZE, PROMPT, NEW_TOKENS = 8, 40, 16
#: Times that the profiled workload is played, and samples of the profile a second.
PROFILED, PROFILE_HZ = 4, 200
#: Width and height of an image by its number of tokens.
SIZES = {20: (160, 128), 64: (256, 256), 110: (352, 320), 256: (512, 512), 1024: (1024, 1024)}
#: Tokens of an image, images a stream, requests at once.
CELLS = ("20,1,64", "20,1,256", "20,1,1024", "110,1,256", "110,4,256", "1024,1,256", "1024,4,64")
GROUP_CELLS = ("20,1,256", "110,1,256", "256,1,256", "1024,1,64", "1024,1,256")


@dataclass(frozen=True)
class Cell:
    """One workload."""

    image_tokens: int
    images: int
    concurrency: int

    @property
    def num_requests(self) -> int:
        return min(8 * self.concurrency, 1024)


def make_checkpoint(name: str, folder: Path, device: str) -> Renderer:
    """Write the starter, or fresh weights of the 2B shape, with room for large images."""
    shutil.copytree(STARTER_PATH, folder)
    if name == "2b":
        torch.manual_seed(0)
        with torch.device(device):
            PolicyModel.from_config(shape_config("2b")).save(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = 1024 * 1024
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 16_384
    (folder / "config.json").write_text(json.dumps(config))
    return Renderer.from_checkpoint(folder)


class Workload:
    """Streams with and without images, of equal length. Every cell gets images that no server has seen."""

    def __init__(self, renderer: Renderer, sampling: SamplingParams) -> None:
        self.renderer, self.sampling = renderer, replace(sampling, stop_ids=())
        self.random = np.random.default_rng(0)

    def image(self, random: np.random.Generator, tokens: int) -> ProcessedImage:
        width, height = SIZES[tokens]
        pixels = random.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        raw_image = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        assert self.renderer.images
        image = self.renderer.images.process(raw_image)
        assert image.num_tokens == tokens, (image.num_tokens, tokens)
        return image

    def stream(
        self, random: np.random.Generator, tokens: int, number: int
    ) -> tuple[tuple[int, ...], tuple[ProcessedImage, ...]]:
        images = tuple(self.image(random, tokens) for _ in range(number))
        text = random.integers(10, 600, PROMPT).tolist()
        start, end = (self.renderer.encoder.added[f"<|vision_{side}|>"] for side in ("start", "end"))
        shown = [token for image in images for token in (start, *self._pad(image), end)]
        return (*text[: PROMPT // 2], *shown, *text[PROMPT // 2 :]), images

    def _pad(self, image: ProcessedImage) -> list[int]:
        assert self.renderer.image_token_id is not None
        return [self.renderer.image_token_id] * image.num_tokens

    def requests(self, cell: Cell, with_images: bool) -> list[GenerateRequest]:
        """Return new requests, in groups, with their images encoded."""

        def group(random: np.random.Generator) -> list[GenerateRequest]:
            ids, images = self.stream(random, cell.image_tokens, cell.images)
            if not with_images:
                ids, images = tuple(random.integers(10, 600, len(ids)).tolist()), ()
            assert all(image.png for image in images)
            seed = int(random.integers(2**31))
            return [GenerateRequest(ids, images, NEW_TOKENS, self.sampling, seed)] * GROUP_SIZE

        with ThreadPoolExecutor() as threads:
            made = threads.map(group, self.random.spawn(cell.num_requests // GROUP_SIZE))
            return list(itertools.chain.from_iterable(made))


def prepared(requests: Sequence[GenerateRequest], image_token_id: int | None) -> tuple[str, list[dict[str, Any]]]:
    """Return a new salt, and the body of each request, which writes all its tokens."""
    salt, bodies = f"{time.monotonic()}", []
    for number, request in enumerate(requests):
        bodies.append(generate_body(request, [], f"{salt}-{number:06d}", image_token_id))
        bodies[-1]["sampling_params"]["ignore_eos"] = True
    return salt, bodies


async def rate(
    server: Server, requests: Sequence[GenerateRequest], concurrency: int, image_token_id: int | None
) -> float:
    """Return the requests answered a second."""
    salt, bodies = prepared(requests, image_token_id)
    waiting = list(zip(bodies, requests, strict=True))[::-1]

    async def client() -> None:
        while waiting:
            body, request = waiting.pop()
            answer = parse_answer(await server.generate(body, request.images, salt), request.sampling)
            assert len(answer.ids) == NEW_TOKENS and answer.prompt_length == len(request.ids), (
                answer,
                len(request.ids),
            )

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return len(requests) / (time.perf_counter() - started)


async def group_rate(
    engine: SGLangEngine, requests: Sequence[GenerateRequest], concurrency: int
) -> tuple[float, float]:
    """Return the turns written a second by the engine, and the tokens that the server read for each."""
    waiting, read = list(requests)[::-1], 0

    async def client() -> None:
        nonlocal read
        while waiting:
            request = waiting.pop()
            async with engine.session() as session:
                written = await session.generate(request)
            assert written.ids and written.prompt_length == len(request.ids), (written, len(request.ids))
            read += written.prompt_length - written.num_cached

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return len(requests) / (time.perf_counter() - started), read / len(requests)


async def groups(engine: SGLangEngine, workload: Workload, cell: Cell, repeats: int) -> list[dict[str, Any]]:
    """Return the median rates of groups by the engine, of text and of images."""
    rows = []
    for with_images in (False, True):
        # Compiles kernels.
        await group_rate(engine, workload.requests(replace(cell, concurrency=8), with_images), 8)
        requests = [workload.requests(cell, with_images) for _ in range(repeats)]
        found = [await group_rate(engine, each, cell.concurrency) for each in requests]
        median_rate, read = np.median(found, axis=0).tolist()
        rows.append({**vars(cell), "with_images": with_images, "rate": median_rate, "read": read})
    return rows


async def parity(
    before: Server, after: Server, workload: Workload, num_tokens: int, network: PolicyModel
) -> dict[str, float]:
    """Compare the log-probs of streams with images by both ways, by one way twice, and with those of the network."""
    differences: dict[str, list[np.ndarray]] = {"before": [], "itself again": [], "network": []}
    number = 0
    while sum(map(len, differences["before"])) < num_tokens:
        ids, images = workload.stream(workload.random, *((20, 1), (110, 4), (110, 1), (1024, 1))[number % 4])
        number += 1

        async def scores(server: Server, salt: str) -> np.ndarray:
            body = score_body(ids, images, workload.renderer.image_token_id)  # noqa: B023
            return parse_scores(await server.generate(body, images, salt), len(ids))  # noqa: B023

        kept = await scores(after, f"kept-{number}")
        differences["before"].append(kept - await scores(before, f"uri-{number}"))
        differences["itself again"].append(kept - await scores(after, f"again-{number}"))
        device = next(network.parameters()).device
        is_text = np.asarray(ids[1:]) != workload.renderer.image_token_id
        differences["network"].append((kept - stream_logprobs(network, ids, images, device, torch.bfloat16))[is_text])
    joined = {name: np.abs(np.concatenate(parts)) for name, parts in differences.items()}
    return {
        f"{name} {how}": float(f(d)) for name, d in joined.items() for how, f in (("max", np.max), ("mean", np.mean))
    } | {"tokens": len(joined["before"])}


#: Functions that say what a process does, and not only who called whom.
PLUMBING = re.compile(
    "asyncio|uvicorn|starlette|fastapi|threading|runpy|concurrent|multiprocessing|torch/|<module>|<string>"
)


def busiest(stacks: str, taken: float, number: int = 24) -> dict[str, list[list[Any]]]:
    """Return the busiest functions of a recording by py-spy: for each process name, share and share of its own code.

    Shares are of all samples `taken` of a thread, so what is missing from 1 is its idle time.
    """
    total: dict[str, Counter[str]] = {"server": Counter(), "scheduler": Counter()}
    own = {process: Counter[str]() for process in total}
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        process = "scheduler" if "sglang::scheduler" in stack else "server"
        named = {frame.rsplit(":", 1)[0] for frame in frames if "(" in frame and not PLUMBING.search(frame)}
        total[process].update(dict.fromkeys(named, int(count)))
        own[process][frames[-1].rsplit(":", 1)[0]] += int(count)
    return {
        process: [
            [name, round(count / taken, 3), round(own[process][name] / taken, 3)]
            for name, count in counts.most_common(number)
        ]
        for process, counts in total.items()
    }


async def profiled(
    server: Server, plays: Sequence[Callable[[], Awaitable[object]]], py_spy: str, kept: Path
) -> dict[str, list[list[Any]]]:
    """Record the server's processes during all `plays`; print and return their busiest functions.

    The recording itself stays at `kept`.
    """
    assert isinstance(server.process, LocalProcess)
    command = f"{py_spy} record --pid {server.process.pid} --subprocesses --nonblocking -f raw"
    command += f" -d 600 -r {PROFILE_HZ}"
    recording = subprocess.Popen([*shlex.split(command), "-o", str(kept)], stdout=subprocess.DEVNULL)
    started = time.perf_counter()
    for play in plays:
        await play()
    recording.send_signal(signal.SIGINT)
    await asyncio.to_thread(recording.wait)
    found = busiest(kept.read_text(), (time.perf_counter() - started) * PROFILE_HZ)
    for process, busy in found.items():
        print(markdown([f"{process}: function", "share", "own"], busy), flush=True)
    return found


async def profiles(
    engine: SGLangEngine, server: Server, workload: Workload, options: argparse.Namespace
) -> dict[str, dict[str, list[list[Any]]]]:
    """Return the busiest functions for text and for images, of the last workload, whose requests are made before."""
    by_engine, found = "groups" in options.parts, {}
    cell = Cell(*map(int, (options.group_cells if by_engine else options.cells)[-1].split(",")))
    for kind, with_images in (("text", False), ("images", True)):
        plays: list[Callable[[], Awaitable[object]]] = []
        for _ in range(PROFILED):
            requests = workload.requests(cell, with_images)
            if by_engine:
                plays.append(partial(group_rate, engine, requests, cell.concurrency))
            else:
                plays.append(partial(rate, server, requests, cell.concurrency, workload.renderer.image_token_id))
        found[kind] = await profiled(server, plays, options.profile, options.out / f"{kind}.stacks")
    return found


async def rates(
    after: Server, before: Server, workload: Workload, cell: Cell, options: argparse.Namespace
) -> dict[str, float]:
    """Return the median rate of each way."""
    ways = {"text": (after, False), "before": (before, True), "after": (after, True)}
    found = {}
    for way in options.ways:
        server, with_images = ways[way]
        found_rates = []
        for tried in (replace(cell, concurrency=8), *[cell] * options.repeats):  # the first one compiles kernels
            requests = workload.requests(tried, with_images)
            found_rates.append(await rate(server, requests, tried.concurrency, workload.renderer.image_token_id))
        found[way] = statistics.median(found_rates[1:])
    return found


async def measure(
    options: argparse.Namespace, folder: Path, renderer: Renderer, write: Callable[[dict[str, Any]], None]
) -> None:
    """Run all parts on one server; call `write` with the figures so far after each."""
    workload = Workload(renderer, sampling_params(renderer, 1.0))
    settings = SGLangSettings(
        model_path=str(folder), mem_fraction=options.mem_fraction, log_folder=options.out / "servers",
        arguments=tuple(shlex.split(options.engine_args)), max_restarts=0,
    )  # fmt: skip

    engine = SGLangEngine(settings, renderer.image_token_id)
    started = time.perf_counter()
    await engine.start()
    keep = [server.sent_images is not None for server in engine.servers.all]
    print(f"server up in {time.perf_counter() - started:.0f} s; keeps images: {keep}", flush=True)
    try:
        (after,) = engine.servers.all
        before = copy.copy(after)
        before.sent_images = None
        figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
        if "parity" in options.parts:
            network = PolicyModel.load(folder, torch.bfloat16).to(options.device)
            figures["parity"] = await parity(before, after, workload, options.parity_tokens, network)
            del network
            print(figures["parity"], flush=True)
            write(figures)
        for cell in options.group_cells if "groups" in options.parts else ():
            figures.setdefault("groups", []).extend(
                await groups(engine, workload, Cell(*map(int, cell.split(","))), options.repeats)
            )
            print(figures["groups"][-2:], flush=True)
            write(figures)
        rows = []
        cells = [Cell(*map(int, cell.split(","))) for cell in options.cells if "rates" in options.parts]
        for cell in cells:
            found = await rates(after, before, workload, cell, options)
            share = f"{found['after'] / found['text']:.2f}"
            rows.append([*vars(cell).values(), *(f"{r:.0f}" for r in found.values()), share])
            print(rows[-1], flush=True)
            figures.setdefault("rates", []).append({**vars(cell), **found})
            write(figures)
        columns = ["image tokens", "images", "at once", *options.ways, "after / text"]
        print(markdown(columns, rows))
        if options.profile:
            figures["profile"] = await profiles(engine, after, workload, options)
            write(figures)
    finally:
        await engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("starter", "2b"), default="starter")
    parser.add_argument("--parts", nargs="+", default=["parity", "rates"])
    parser.add_argument("--repeats", type=int, default=3, help="times that a rate is measured; the median counts")
    parser.add_argument("--ways", nargs="+", default=["text", "before", "after"])
    parser.add_argument("--cells", nargs="+", default=CELLS, help="tokens of an image, images a stream, at once")
    parser.add_argument("--group-cells", nargs="+", default=GROUP_CELLS, help="the same, for the groups")
    parser.add_argument("--parity-tokens", type=int, default=10_000)
    parser.add_argument("--mem-fraction", type=float, default=0.3)
    parser.add_argument("--engine-args", default="")
    parser.add_argument("--profile", default="", help="the command py-spy")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    at, command = commit(), f"python -m benchmarks.images {shlex.join(argv or sys.argv[1:])}"

    def write(figures: dict[str, Any]) -> None:
        write_result(options.out / f"images_{options.model}.json", command, figures, at, ("torch", "transformers"))

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        renderer = make_checkpoint(options.model, folder, options.device)
        asyncio.run(measure(options, folder, renderer, write))


if __name__ == "__main__":
    main()
