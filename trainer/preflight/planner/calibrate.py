"""Measures the constants of the machine that it runs on: copies and matrix products, decoding of the embedded engine or
of a running server, a training step, weight pushes, and collectives of two processes.

What it cannot measure here, such as the network between hosts, keeps the figure of a bundled machine or says that it
was not measured.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from agents.engines.hf import HFEngine
from agents.engines.hf_batch import CachedPrefix, PendingTurn
from agents.engines.sglang.client import ask
from agents.model.mrope import mrope_positions
from agents.model.policy import PolicyModel
from agents.types import GenerateRequest, SamplingParams
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.config.rollout import API_KEY_VARIABLE
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.preflight.memory_terms import GIB, count_values
from trainer.preflight.planner.costs import Costs
from trainer.preflight.planner.hardware import CONSTANTS, NOT_MEASURED, RATES, Hardware
from trainer.preflight.planner.shape import ModelShape
from trainer.preflight.planner.workload import EpisodeShape, GroupShape, TurnShape
from trainer.preflight.qwen3_vl import QWEN3_VL, qwen3_vl_config
from trainer.setup.model_source import resolve_model
from trainer.types import TrainingSample

#: Streams of a decode step to try.
BATCHES = (1, 4, 16, 64)
SHORT, LONG = 8, 40


@dataclass(frozen=True)
class _Sizes:
    """What is measured: side of a matrix, bytes of a copy, tokens of a prompt and of a response, groups of a step."""

    side: int
    copied: int
    prompt: int
    response: int
    groups: tuple[int, ...]


ON_GPU = _Sizes(8192, 2**30, 260, 640, (2, 8))
ON_CPU = _Sizes(1024, 2**27, 150, 40, (2, 8))


def calibrate(model: str, engine_url: str = "") -> Hardware:
    """Return the constants of this machine; decode, prefill and training rates are those of the model given.

    Raises:
        UserError: the model is not here.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, dtype = (ON_GPU, torch.bfloat16) if device == "cuda" else (ON_CPU, torch.float32)
    machine = _base(device)
    network = _network(model, device)
    shape = ModelShape.of(network.config, count_values(network.parameters()))
    machine = _copies(machine, device, sizes, dtype)
    costs = Costs(shape, machine, dtype.itemsize)
    writer = _Server(engine_url) if engine_url else _Embedded(network, device, dtype)
    costs = _decoding(costs, writer, "the server" if engine_url else "the embedded engine", model)
    costs = _pushes(costs, network, writer)
    del writer
    gc.collect()
    costs = _training(costs, network, device, dtype, sizes, model)
    del network
    gc.collect()
    return _collectives(costs.hardware, device, sizes)


def _base(device: str) -> Hardware:
    """Return what holds before anything is measured: the bundled constants of this GPU, or none."""
    if device == "cuda":
        name, properties = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0)
        bundled = Hardware.read("h200" if "H200" in name else "h100")
        measured = {"memory_gib": properties.total_memory / GIB, "gpus_per_host": float(torch.cuda.device_count())}
        return _measured(replace(bundled, name=name), "the driver", **measured)
    values = {name: 1.0 if name in RATES else 0.0 for name in CONSTANTS}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    values |= {"memory_gib": memory, "gpus_per_host": 1.0, "turn_s": 0.00014}
    sources = dict.fromkeys(CONSTANTS, f"{NOT_MEASURED}: not counted")
    sources |= {"memory_gib": "the system", "gpus_per_host": "one", "turn_s": "benchmarks/results/agent_loop.json"}
    return Hardware(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores", sources, **values)


def _measured(machine: Hardware, source: str, **values: float) -> Hardware:
    """Return the machine with measured constants."""
    return replace(machine, sources={**machine.sources, **dict.fromkeys(values, f"measured: {source}")}, **values)


def _network(model: str, device: str) -> PolicyModel:
    """Return a checkpoint's network, or one of a name's shape with fresh weights, in float32."""
    if model not in QWEN3_VL or Path(model).exists():
        return PolicyModel.load(resolve_model(model)).to(device)
    torch.manual_seed(0)
    with torch.device(device):
        return PolicyModel.from_config(qwen3_vl_config(model))


def _time(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the least seconds of some work, after one that is not counted: other processes only add to it."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _copies(machine: Hardware, device: str, sizes: _Sizes, dtype: torch.dtype) -> Hardware:
    """Measure a copy, which reads and writes, and a product of matrices."""
    source = torch.ones(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * sizes.copied / _time(lambda: target.copy_(source)) / 1e9
    one = torch.randn(sizes.side, sizes.side, dtype=dtype, device=device)
    flops = 2 * sizes.side**3 / _time(lambda: one @ one) / 1e12
    machine = _measured(machine, f"a copy of {sizes.copied / 2**20:.0f} MiB", memory_gb_s=copied)
    return _measured(machine, f"{sizes.side}^3 product", prefill_tflops=flops, train_tflops=flops)


class _Embedded:
    """The embedded engine, asked directly."""

    def __init__(self, network: PolicyModel, device: str, dtype: torch.dtype) -> None:
        self.engine = HFEngine(copy.deepcopy(network).to(dtype), device=device)
        self._loop = asyncio.new_event_loop()

    def write(self, rows: int, prompt: int, tokens: int) -> None:
        """Write so many tokens in each of some streams."""
        rng = np.random.default_rng(rows)
        turns = []
        for _ in range(rows):
            ids = tuple(int(i) for i in rng.integers(0, 200, prompt))
            request = GenerateRequest(ids, (), tokens, SamplingParams(), 0)
            turns.append(PendingTurn(request, CachedPrefix(), self._loop.create_future()))
        self.engine.write(turns)


class _Server:
    """A running SGLang server, asked over HTTP."""

    def __init__(self, url: str) -> None:
        self.url, self._api_key = url, os.environ.get(API_KEY_VARIABLE, "").strip()

    def write(self, rows: int, prompt: int, tokens: int) -> None:
        """Write so many tokens in each of some streams, sent as one request."""
        rng = np.random.default_rng(time.time_ns())
        body = {
            "input_ids": rng.integers(0, 200, (rows, prompt)).tolist(),
            "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0},
        }
        ask(self.url, "generate", self._api_key, json.dumps(body).encode(), timeout_s=600.0)


def _decoding(costs: Costs, writer: _Embedded | _Server, engine: str, model: str) -> Costs:
    """Measure prefill as operations a second, and what decode steps take beyond the roofline: in all and for a row."""
    prompt, rows = 512, 4
    reading = _time(lambda: writer.write(rows, prompt, 1))
    flops = 1e12 * costs.hardware.prefill_tflops * rows * costs.prefill_s(prompt, 0, 0)
    source = f"{engine} with {model}"
    costs = replace(costs, hardware=_measured(costs.hardware, source, prefill_tflops=flops / reading / 1e12))
    prompt, left = 64, []
    for batch in BATCHES:
        short, long = (
            _time(lambda tokens=tokens, batch=batch: writer.write(batch, prompt, tokens)) for tokens in (SHORT, LONG)
        )
        cached = batch * (prompt + (SHORT + LONG) / 2)
        left.append((long - short) / (LONG - SHORT) - costs.decode_step_s(batch, cached))
    step_s, row_s = fit_line(BATCHES, left)
    return replace(costs, hardware=_measured(costs.hardware, source, decode_step_s=step_s, decode_row_s=row_s))


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return the line through points as (value at 0, slope), with both at least 0; least squares of relative errors.

    Example: `fit_line((1, 2, 4), (3.0, 5.0, 9.0))` is about (1.0, 2.0).
    """
    best = (float("inf"), 0.0, 0.0)
    weights = 1 / np.maximum(np.abs(ys), 1e-12)
    columns = np.stack([np.ones(len(xs)), np.asarray(xs, dtype=float)], axis=1)
    for used in ((0, 1), (0,), (1,)):
        solved = np.linalg.lstsq(columns[:, used] * weights[:, None], np.asarray(ys) * weights, rcond=None)[0]
        line = np.zeros(2)
        line[list(used)] = np.maximum(0.0, solved)
        error = float((((columns @ line - ys) * weights) ** 2).sum())
        best = min(best, (error, float(line[0]), float(line[1])))
    return best[1:]


def _pushes(costs: Costs, network: PolicyModel, writer: _Embedded | _Server) -> Costs:
    """Measure a push through a folder, and one in memory."""
    machine, size = costs.hardware, costs.value_bytes * costs.shape.parameters / 1e9
    dtype = torch.bfloat16 if costs.value_bytes == 2 else torch.float32
    with tempfile.TemporaryDirectory(prefix="trueturn-") as folder:

        def through_folder() -> None:
            network.save(Path(folder), dtype)
            PolicyModel.load(folder, dtype)

        machine = _measured(machine, "weights written and read", disk_gb_s=size / _time(through_folder, 1))
    if isinstance(writer, _Embedded):
        weights = {name: value.detach() for name, value in network.named_parameters()}
        seconds = _time(lambda: writer.engine.load_weights(weights, 1))
        machine = _measured(machine, "the embedded engine", memory_push_gb_s=size / seconds)
    return replace(costs, hardware=machine)


def _training(costs: Costs, network: PolicyModel, device: str, dtype: torch.dtype, sizes: _Sizes, model: str) -> Costs:
    """Measure training steps of some sizes: operations a second, and what a step takes besides."""
    learner = FSDPLearner(
        network,
        SamplingParams(),
        num_steps=100,
        optim=OptimConfig(lr=1e-9, warmup_steps=0),
        config=LearnerConfig(
            max_tokens_per_microbatch=16384 if device == "cuda" else 4096,
            compile="on" if device == "cuda" else "off",
        ),
        device=device,
        dtype=dtype,
    )
    episode = EpisodeShape(sizes.prompt, (TurnShape(sizes.response),))
    flops = costs.group_flops(GroupShape((episode,) * 8))
    counts = [groups * flops for groups in sizes.groups]
    seconds = [_time(lambda n=n: learner.step([_samples(n, sizes, network)]), 4) for n in sizes.groups]
    update_s, each = fit_line(counts, seconds)
    each = each or seconds[-1] / counts[-1]
    source = f"steps of {' and '.join(map(str, sizes.groups))} groups of 8 with {model}"
    return replace(costs, hardware=_measured(costs.hardware, source, update_s=update_s, train_tflops=1e-12 / each))


def _samples(groups: int, sizes: _Sizes, network: PolicyModel) -> list[TrainingSample]:
    """Return the samples of some groups of 8, of text alone."""
    rng, made = np.random.default_rng(0), []
    for _ in range(groups):
        prompt = rng.integers(0, 200, sizes.prompt)
        for index in range(8):
            ids_T = np.concatenate([prompt, rng.integers(0, 200, sizes.response)])
            mask_T = np.arange(len(ids_T)) >= sizes.prompt
            made.append(
                TrainingSample(
                    ids_T=ids_T,
                    mask_T=mask_T,
                    turns_T=mask_T.astype(np.int64),
                    logprobs_T=np.zeros(len(ids_T), dtype=np.float32),
                    positions_3T=mrope_positions(ids_T, [], network.image_token_id, network.merge_size),
                    images=(),
                    prefix_length=sizes.prompt,
                    num_prefix_images=0,
                    advantage=float(index % 2) - 0.5,
                    weight=1.0 / (groups * 8 * sizes.response),
                )
            )
    return made


def _collectives(machine: Hardware, device: str, sizes: _Sizes) -> Hardware:
    """Measure collectives of two processes, on two GPUs if there are two, else on the CPU."""
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda" and torch.cuda.device_count() < 2:
        return machine
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="trueturn-") as folder:
        file = Path(folder) / "seconds.json"
        mp.spawn(_measure_collectives, (backend, port, sizes.copied, str(file)), nprocs=2)  # type: ignore[attr-defined]
        gathered, broadcast, small = json.loads(file.read_text())
    source = f"2 processes over {backend}"
    rates = {"link_gb_s": sizes.copied / 2 / gathered / 1e9, "nccl_gb_s": sizes.copied / broadcast / 1e9}
    machine = _measured(machine, source, collective_s=small, **rates)
    if device == "cpu":
        machine = replace(
            machine,
            network_gb_s=machine.link_gb_s,
            sources={**machine.sources, "network_gb_s": f"{NOT_MEASURED}: that of link_gb_s"},
        )
    return machine


def _measure_collectives(rank: int, backend: str, port: int, size: int, file: str) -> None:
    """Write the seconds of a gather, a broadcast and a small sum."""
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    whole = torch.empty(size, dtype=torch.uint8, device=device)
    part, number = torch.ones(size // 2, dtype=torch.uint8, device=device), torch.ones(1024, device=device)
    seconds = (
        _time(lambda: dist.all_gather_into_tensor(whole, part)),
        _time(lambda: dist.broadcast(whole, 0)),
        _time(lambda: dist.all_reduce(number), 20),
    )
    if rank == 0:
        Path(file).write_text(json.dumps(seconds))
    dist.destroy_process_group()
