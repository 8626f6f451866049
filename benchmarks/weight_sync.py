"""Seconds and GB/s of each way by which weights reach a server on another GPU. Needs 2 GPUs of one host, and no Ray.

`python -m benchmarks.weight_sync`: a learner of the shape of Qwen3-VL-2B with fresh weights on GPU 0, an SGLang server
on GPU 1. Each transport pushes `--rounds` times, with other weights each time; a probe follows every push.
The link between both GPUs is measured beside it: torch's broadcast over NCCL of 1 GiB, and a plain copy. Prints a table
and writes `benchmarks/results/weight_sync.json`. On a CPU, to try it:

    python -m benchmarks.weight_sync --model starter --device cpu --dtype float32 --transports disk nccl \\
      --server-command "python -m tests.agents.engines.sglang_server" --out /tmp
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.process import ReservedPorts
from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from benchmarks.learner_workload import shape_config
from benchmarks.report import RESULTS, commit, markdown, write_result
from envs.problems import with_system_prompt
from envs.registry import get_spec
from trainer.learner.cuda_ipc import share_weights
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.weight_group import SHARED_VARIABLES
from trainer.learner.weight_sender import RankSender
from trainer.setup.components import sampling_params
from trainer.weight_sync.group_transport import GroupTransport
from trainer.weight_sync.sync import WeightSync
from trainer.weight_sync.transports import IpcTransport, ServersTransport

TRANSPORTS = ("ipc", "nccl", "disk")
#: Bytes that measure the link.
LINK_BYTES = 2**30
COLUMNS = ("transport", "push", "s", "GB/s", "parts", "probe gap")


def write_checkpoint(name: str, folder: Path, device: str) -> Renderer:
    """Write a network of a shape with fresh weights, or the starter, with the starter's tokenizer."""
    renderer = Renderer.from_checkpoint(STARTER_PATH)
    torch.manual_seed(0)
    if name == "starter":
        model = PolicyModel.load(STARTER_PATH)
    else:
        with torch.device(device):
            model = PolicyModel.from_config(shape_config(name))
    model.save(folder)
    renderer.save(folder)
    return renderer


def measure_link(rank: int, port: int, result: Any) -> None:
    """Broadcast from GPU 0 to GPU 1, on both sides; rank 0 notes the GB/s of the fastest of ten."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    values, seconds = torch.zeros(LINK_BYTES, dtype=torch.uint8, device="cuda"), []
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        dist.broadcast(values, src=0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        result["broadcast"] = LINK_BYTES / 1e9 / min(seconds[2:])
        other, copies = torch.empty_like(values, device="cuda:1"), []
        for _ in range(12):
            began = time.perf_counter()
            other.copy_(values)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            copies.append(time.perf_counter() - began)
        result["copy"] = LINK_BYTES / 1e9 / min(copies[2:])
    dist.destroy_process_group()


def link_gb_per_s() -> dict[str, float]:
    """Return the GB/s between GPU 0 and GPU 1: of a broadcast over NCCL, and of a copy within one process."""
    ports = ReservedPorts(1)
    with multiprocessing.Manager() as manager:
        result = manager.dict()
        spawn(measure_link, (*ports.numbers, result), nprocs=2)
        ports.release()
        return {name: round(value, 1) for name, value in result.items()}


def change(learner: FSDPLearner) -> None:
    """Change every weight a little, as a step does."""
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.to_local().mul_(1.01)  # type: ignore[operator]
    learner.steps_done += 1


async def measure(options: argparse.Namespace, folder: Path, renderer: Renderer) -> list[dict[str, Any]]:
    """Return a row for every push."""
    on_gpu = options.device == "cuda"
    settings = SGLangSettings(
        model_path=str(folder),
        first_gpu=1,
        mem_fraction=options.mem_fraction,
        dtype=options.dtype,
        arguments=tuple(shlex.split(options.engine_args)),
        command=tuple(shlex.split(options.server_command)),
        log_folder=options.out / "servers",
        start_timeout_s=options.start_s,
        max_sessions=16,
        context_length=4096,
    )
    engine = SGLangEngine(settings, renderer.image_token_id)
    engine.launch()  # it starts while the learner loads
    rows: list[dict[str, Any]] = []
    try:
        dtype = getattr(torch, options.dtype)
        model = PolicyModel.load(folder)
        sampling = sampling_params(renderer, 1.0)
        learner = FSDPLearner(model, sampling, 100, device=options.device, dtype=dtype)
        spec = get_spec("geo3k")
        prompt = with_system_prompt(spec.load_dataset("train", 1, 0), spec.load_system_prompt())[0].prompt
        sender = RankSender(learner)
        probed, files = renderer.prompt(prompt), folder / "sync"
        transports: Mapping[str, ServersTransport] = {
            "disk": ServersTransport(learner, engine, files),
            "ipc": IpcTransport(learner, engine, files, partial(share_weights, learner)),
            "nccl": GroupTransport(learner, engine, files, sender),
        }
        sync = WeightSync(learner, transports["disk"], probed.ids, probed.images, model.image_token_id, 0.2)
        began = time.perf_counter()
        print(f"probe at the start: {await sync.start()}; server up after {time.perf_counter() - began:.0f} s more")
        for name in options.transports:
            sync.transport = transports[name]
            try:
                async with asyncio.timeout(options.limit_s):
                    for number in range(1, options.rounds + 1):
                        change(learner)
                        base = torch.cuda.memory_allocated() if on_gpu else 0
                        if on_gpu:
                            torch.cuda.reset_peak_memory_stats()
                        push = await sync.push(learner.steps_done)
                        row = {"transport": name, "push": number, "version": learner.steps_done, **push.metrics()}
                        row["probe_gap"] = await sync.probe()
                        if on_gpu:
                            row["peak_gib"] = (torch.cuda.max_memory_allocated() - base) / 2**30
                        rows.append(row)
                        print(row, flush=True)
            except Exception as error:  # the others are still worth having
                rows.append({"transport": name, "failed": f"{type(error).__name__}: {error}"})
                print(rows[-1], flush=True)
        print(*engine.servers.events, sep="\n")
    finally:
        await engine.close()
    return rows


def table(rows: list[dict[str, Any]], link: Mapping[str, float]) -> str:
    """Return a line for each push, and the link's below."""
    lines: list[tuple[object, ...]] = []
    for row in rows:
        if "failed" in row:
            lines.append((row["transport"], "-", "-", "-", row["failed"][:80], "-"))
            continue
        parts = {k.removeprefix("sync_").removesuffix("_s"): v for k, v in row.items() if k.startswith("sync_")}
        shown = ", ".join(f"{k} {v:.2f} s" for k, v in parts.items() if k not in ("", "s", "bytes", "gb_per", "sync"))
        seconds, speed = f"{row['sync_s']:.2f}", f"{row['sync_gb_per_s']:.1f}"
        lines.append((row["transport"], row["push"], seconds, speed, shown, f"{row['probe_gap']:.4f}"))
    return markdown(COLUMNS, [*lines, *((f"link: {name}", "-", "-", speed, "", "") for name, speed in link.items())])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="2b", help="a shape, such as 2b, or starter")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mem-fraction", type=float, default=0.3)
    parser.add_argument("--start-s", type=float, default=200.0, help="longest wait for the server")
    parser.add_argument("--limit-s", type=float, default=90.0, help="longest wait for all pushes of a transport")
    parser.add_argument("--engine-args", default="", help="more arguments of sglang.launch_server")
    parser.add_argument("--server-command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name, value in SHARED_VARIABLES.items():
        os.environ.setdefault(name, value)
    at, on_gpu = commit(), options.device == "cuda"
    if on_gpu and torch.cuda.device_count() < 2:
        raise SystemExit(f"needs 2 GPUs, {torch.cuda.device_count()} are here")
    link = link_gb_per_s() if on_gpu else {}
    print(f"link: {link}", flush=True)
    with tempfile.TemporaryDirectory(prefix="trueturn-") as work:
        folder = Path(work) / "checkpoint"
        renderer = write_checkpoint(options.model, folder, options.device)
        torch.cuda.empty_cache()
        rows = asyncio.run(measure(options, folder, renderer))
    figures = {"gpu": torch.cuda.get_device_name() if on_gpu else "", "link_gb_per_s": link, "rows": rows}
    command = f"python -m benchmarks.weight_sync {shlex.join(sys.argv[1:])}".strip()
    write_result(options.out / "weight_sync.json", command, figures, at, ("torch", "transformers"))
    print(table(rows, link))


if __name__ == "__main__":
    main()
