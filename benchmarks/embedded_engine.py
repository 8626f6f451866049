"""Tokens a second of the embedded engine on one GPU, beside an SGLang server and Transformers' continuous batching.

`python -m benchmarks.embedded_engine --model starter --ways embedded sglang transformers`: streams of a prompt with a
image of 20 tokens, eight streams the same, each of which gets up to 256 new tokens. Continuous batching takes
text alone, so it gets a decoder of the same shape and prompts of the same length. `mean_diff` and `max_diff` are
differences of the embedded engine's log-probs from those of one forward over the stream, in nats. Prints a table and
writes `embedded_engine_MODEL.json`; needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.engines.base import Engine
from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.types import Completion, GenerateRequest
from benchmarks.images import GROUP_SIZE, Workload, make_checkpoint
from benchmarks.report import RESULTS, commit, markdown, write_result
from trainer.setup.components import sampling_params

IMAGE_TOKENS = 20
WARM_UP_TOKENS = 8


def make_requests(workload: Workload, rows: int, new_tokens: int) -> list[GenerateRequest]:
    """Return one request a row; each group of eight has a prompt and an image of its own."""
    requests = []
    for first in range(0, rows, GROUP_SIZE):
        ids, images = workload.stream(workload.random, IMAGE_TOKENS, 1)
        for seed in range(first, min(rows, first + GROUP_SIZE)):
            requests.append(GenerateRequest(ids, images, new_tokens, workload.sampling, seed))
    return requests


async def play(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Write all turns at once, each in a session of its own."""

    async def one(request: GenerateRequest) -> Completion:
        async with engine.session() as session:
            return await session.generate(request)

    return await asyncio.gather(*(one(request) for request in requests))


async def measure(engine: Engine, workload: Workload, options: argparse.Namespace, way: str) -> list[dict[str, Any]]:
    """Return the median tokens a second by the number of rows, and the distance of log-probs."""
    await engine.start()
    found = []
    try:
        for rows in options.rows:
            await play(engine, make_requests(workload, rows, WARM_UP_TOKENS))
            rates = []
            requests: list[GenerateRequest] = []
            completions: list[Completion] = []
            for _ in range(options.repeats):
                requests = make_requests(workload, rows, options.new_tokens)
                started = time.perf_counter()
                completions = await play(engine, requests)
                seconds = time.perf_counter() - started
                # A server also ends a turn at the checkpoint's own end of text.
                rates.append(sum(len(each.ids) for each in completions) / seconds)
            row = {"way": way, "rows": rows, "tokens_per_s": round(statistics.median(rates)), "all": rates}
            if isinstance(engine, HFEngine):
                row |= logprob_diff(engine, requests[0], completions[0])
            print(row, flush=True)
            found.append(row)
    finally:
        await engine.close()
    return found


def logprob_diff(engine: HFEngine, request: GenerateRequest, written: Completion) -> dict[str, float]:
    """Return how far a turn's log-probs are from those of one forward over its stream: the mean, and the most."""
    ids = request.ids + written.ids
    dtype = next(engine.model.parameters()).dtype
    scored = stream_logprobs(engine.model, ids, request.images, "cuda", dtype, request.sampling.distribution)
    difference_T = np.abs(scored[len(request.ids) - 1 :] - np.asarray(written.logprobs))
    return {"mean_diff": float(difference_T.mean()), "max_diff": float(difference_T.max())}


def continuous_batching(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the tokens a second of Transformers' continuous batching."""
    from transformers import AutoConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    text = AutoConfig.from_pretrained(folder).text_config.to_dict()
    rope = {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]}
    kept = {key: value for key, value in text.items() if key not in ("rope_parameters", "model_type", "dtype")}
    config = Qwen3Config(**kept, rope_parameters=rope)
    config._attn_implementation = options.transformers_attention
    with torch.device("cuda"):
        network = Qwen3ForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    random = np.random.default_rng(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it takes a tenth of a second for each new length
    found = []
    for rows in options.rows:
        rates = []
        for _ in range(1 + options.repeats):  # the first captures graphs
            prompts = random.integers(10, 600, (rows, 62)).tolist()
            sampled = GenerationConfig(
                max_new_tokens=options.new_tokens, do_sample=True, eos_token_id=-1, pad_token_id=0
            )
            started = time.perf_counter()
            written = network.generate_batch(prompts, generation_config=sampled)
            seconds = time.perf_counter() - started
            rates.append(sum(len(each.generated_tokens) for each in written.values()) / seconds)
        row = {"way": "transformers", "rows": rows, "tokens_per_s": round(statistics.median(rates[1:])), "all": rates}
        print(row, flush=True)
        found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("starter", "2b"), default="starter")
    parser.add_argument("--ways", nargs="+", choices=("embedded", "sglang", "transformers"), default=["embedded"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--server-command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--transformers-attention", default="sdpa")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args(argv)
    at = commit()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / options.model
        renderer = make_checkpoint(options.model, folder, "cuda")
        workload = Workload(renderer, sampling_params(renderer, 1.0))
        for way in options.ways:
            torch.cuda.empty_cache()
            if way == "transformers":
                found += continuous_batching(folder, options)
                continue
            engine: Engine
            if way == "embedded":
                network = PolicyModel.load(folder, getattr(torch, options.dtype))
                engine = HFEngine(network, max_batch=max(options.rows), device="cuda")
            else:
                settings = SGLangSettings(
                    str(folder),
                    mem_fraction=0.6,
                    dtype=options.dtype,
                    command=tuple(shlex.split(options.server_command)),
                    log_folder=options.out / "servers",
                    max_sessions=max(options.rows),
                    max_restarts=0,
                    context_length=4096,
                )
                engine = SGLangEngine(settings, renderer.image_token_id, 4096)
            found += asyncio.run(partial(measure, engine, workload, options, way)())
            del engine
    columns = ("way", "rows", "tokens_per_s", "mean_diff", "max_diff")
    print(markdown(columns, [[row.get(column, "") for column in columns] for row in found]))
    figures = {"gpu": torch.cuda.get_device_name(), "new_tokens": options.new_tokens, "rows": found}
    path = options.out / f"embedded_engine_{options.model}.json"
    write_result(
        path,
        shlex.join(["python", "-m", "benchmarks.embedded_engine", *sys.argv[1:]]),
        figures,
        at,
        ["torch", "transformers"],
    )


if __name__ == "__main__":
    main()
