"""Seconds of a decode step of one SGLang server by the number of streams, for several ways to start it.

`python -m benchmarks.decoding --model 2b --variant ours --variant "fi --attention-backend flashinfer"`: a variant is a
name, variables of the server's environment (`NAME=value`), fields of a request (`return_logprob=false`) and arguments
of the server. Eight streams begin alike, then each goes on with other tokens, and all write as many; the longer of two
lengths takes longer by its further steps alone. `each_us` is what a further stream adds to a step. A stream is also
scored by each variant: the differences of its log-probs from the first variant's. Prints tables and writes
`decoding_MODEL.json`; needs a GPU.

`--images 20` shows each stream an image of 20 tokens, eight streams the same. `--profile py-spy` lists the busiest
functions of each variant's server while it writes for the most streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from agents.engines.sglang.payloads import parse_answer, parse_scores, score_body
from agents.engines.sglang.servers import Server, ServerPool
from agents.engines.sglang.settings import SGLangSettings
from agents.types import GenerateRequest, SamplingParams
from benchmarks.images import GROUP_SIZE, PROFILED, SIZES, Workload, make_checkpoint, prepared, profiled
from benchmarks.report import RESULTS, commit, markdown, write_result
from trainer.setup.components import sampling_params

#: Tokens that are written: the difference is what a step is measured by. When the shorter has ended, all have begun.
SHORT, LONG = 128, 384
SCORED = 512


@dataclass(frozen=True)
class Variant:
    """A way to start a server and to ask it."""

    name: str
    variables: dict[str, str]
    fields: dict[str, Any]
    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read `NAME [VARIABLE=value ...] [field=json ...] [--argument ...]`."""
        name, *words = shlex.split(text)
        count = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
        pairs = [word.partition("=")[::2] for word in words[:count]]
        variables = {key: value for key, value in pairs if key.isupper()}
        fields = {key: json.loads(value) for key, value in pairs if not key.isupper()}
        return cls(name, variables, fields, tuple(words[count:]))


class Streams:
    """Asks a server for many streams at once."""

    def __init__(self, workload: Workload, prompt: int, image: int, fields: dict[str, Any]) -> None:
        self.workload, self.prompt, self.image, self.fields = workload, prompt, image, fields

    def _requests(self, count: int, length: int) -> list[GenerateRequest]:
        random, groups = self.workload.random, -(-count // GROUP_SIZE)
        shown = [self.workload.stream(random, self.image, bool(self.image)) for _ in range(groups)]
        requests = []
        for number in range(count):
            ids, images = shown[number // GROUP_SIZE]
            text = random.integers(10, 600, max(0, self.prompt - len(ids))).tolist()
            requests.append(GenerateRequest((*ids, *text), images, length, self.workload.sampling, seed=number))
        return requests

    async def seconds(self, server: Server, count: int, length: int) -> float:
        """Return how long the server takes to write `count` streams of `length` tokens."""
        requests = self._requests(count, length)
        salt, bodies = prepared(requests, self.workload.renderer.image_token_id)
        asked = [(body | self.fields, request.images) for body, request in zip(bodies, requests, strict=True)]
        started = time.perf_counter()
        answers = await asyncio.gather(*(server.generate(body, images, salt) for body, images in asked))
        seconds = time.perf_counter() - started
        if self.fields.get("return_logprob", True):
            assert all(len(parse_answer(answer, SamplingParams()).ids) == length for answer in answers)
        return seconds

    async def step_s(self, server: Server, count: int, repeats: int) -> float:
        """Return the seconds of a decode step of so many streams."""
        await self.seconds(server, count, 16)
        found = [
            await self.seconds(server, count, LONG) - await self.seconds(server, count, SHORT) for _ in range(repeats)
        ]
        return min(found) / (LONG - SHORT)


async def measure(variant: Variant, options: argparse.Namespace, folder: Path, workload: Workload) -> Any:
    """Return the seconds of a step by the number of streams, the log-probs of a stream, and a profile if asked for."""
    settings = SGLangSettings(
        str(folder),
        mem_fraction=options.mem_fraction,
        dtype=options.dtype,
        arguments=variant.arguments,
        command=tuple(shlex.split(options.server_command)),
        log_folder=options.out / "servers" / variant.name,
        max_sessions=max(options.streams),
        max_restarts=0,
        context_length=4096,
    )

    async def nothing(_: Any) -> None: ...

    pool = ServerPool(settings, nothing)
    started = time.perf_counter()
    await pool.start()
    try:
        (server,) = pool.all
        print(f"{variant.name}: up in {time.perf_counter() - started:.0f} s", flush=True)
        ids = np.random.default_rng(1).integers(10, 600, SCORED).tolist()
        scores = parse_scores(await server.client.call("generate", score_body(ids, (), None)), SCORED)
        streams, steps = Streams(workload, options.prompt, options.images, variant.fields), {}
        for count in options.streams:
            steps[count] = await streams.step_s(server, count, options.repeats)
            print(f"{variant.name}: {count} streams, {1000 * steps[count]:.2f} ms a step", flush=True)
        profile = {}
        if options.profile:
            print(variant.name)
            play, kept = partial(streams.seconds, server, max(options.streams), LONG), options.out / "decoding.stacks"
            profile = await profiled(server, [play] * PROFILED, options.profile, kept)
        return steps, scores, profile
    finally:
        await pool.close()


def row_of(name: str, steps: dict[int, float], gap: NDArray[np.float32]) -> dict[str, Any]:
    """Return the figures of a variant; the line through its steps is the one with the least squares."""
    each, base = np.polyfit(list(steps), list(steps.values()), 1) if len(steps) > 1 else (np.nan, np.nan)
    return {
        "variant": name,
        **{f"{count}_ms": round(1000 * seconds, 3) for count, seconds in steps.items()},
        "base_ms": round(1000 * float(base), 3),
        "each_us": round(1e6 * float(each), 2),
        "gap_mean": float(gap.mean()),
        "gap_max": float(gap.max()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each variant; print and write after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=("starter", "2b"), default="2b")
    parser.add_argument("--variant", action="append", help="its name, variables, fields and arguments, in one argument")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64, 128, 256, 512])
    parser.add_argument("--prompt", type=int, default=200, help="tokens that a stream begins with")
    parser.add_argument("--images", type=int, default=0, choices=(0, *SIZES), help="tokens of each stream's image")
    parser.add_argument("--profile", default="", help="the command py-spy")
    parser.add_argument("--repeats", type=int, default=2, help="times that a step is measured; the least counts")
    parser.add_argument("--mem-fraction", type=float, default=0.6)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--server-command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    at, command = commit(), f"python -m benchmarks.decoding {shlex.join(argv or sys.argv[1:])}"
    gpu, rows = torch.cuda.get_device_name() if options.device == "cuda" else "", list[dict[str, Any]]()
    first: NDArray[np.float32] | None = None
    profiles: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="trueturn-") as temporary:
        folder = Path(temporary) / "model"
        renderer = make_checkpoint(options.model, folder, options.device)
        workload = Workload(renderer, sampling_params(renderer, 1.0))
        for variant in map(Variant.parse, options.variant or ["ours"]):
            with patch.dict(os.environ, variant.variables):
                try:
                    steps, scores, profiles[variant.name] = asyncio.run(measure(variant, options, folder, workload))
                except Exception as error:  # the others are still worth having
                    print(f"{variant.name} failed: {error}"[-2000:], flush=True)
                    continue
            first = scores if first is None else first
            rows.append(row_of(variant.name, steps, np.abs(scores - first)))
            name = f"decoding_{options.model}.json"
            figures = {"gpu": gpu, "rows": rows} | ({"profiles": profiles} if options.profile else {})
            write_result(options.out / name, command, figures, at, ("torch", "transformers"))
            print(markdown(list(rows[0]), [list(row.values()) for row in rows]), flush=True)


if __name__ == "__main__":
    main()
