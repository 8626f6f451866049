"""Compares the memory that a configuration needs, computed before anything is loaded, with the free memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from agents.model.delta_net import States
from agents.model.policy import PolicyModel
from envs.checks import Verdict, combine, fault, ok, skipped, warning
from trainer.config.learner import IMAGE_SHARE
from trainer.config.run import RunConfig
from trainer.planning.memory import GIB, MetaNetworks, Parameters, Plan, estimate, head_size
from trainer.preflight.checks.free_memory import FreeMemory
from trainer.setup.servers import first_server_gpu, shared_gpus

#: Memory of a process for torch's libraries, a CUDA context and the allocator's gaps.
PROCESS_BYTES = GIB
#: A need above this share of the free memory may not fit, because it is only an estimate.
TIGHT = 0.9
_FIX = (
    "give --recompute 1, --lora-rank 32 or, on a GPU, --offload optimizer, or take a smaller model "
    "(python -m trainer.memory computes what fits)"
)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a configuration needs on one GPU with a learner, and in host memory.

    - `learner`: most that the learner needs on its device.
    - `least`: what it needs there for sure, which leaves out what depends on the length of streams.
    - `engine`: the weights of an embedded engine, and `cache`: most that its cache of what was read needs.
    - `offloaded`: what the learner keeps in host memory.
    - `resident`: what it keeps on its device between two steps.

    On a CPU, all of it is host memory.
    """

    learner: int
    least: int
    engine: int
    cache: int
    offloaded: int
    resident: int


def check_memory(config: RunConfig, networks: MetaNetworks, free: FreeMemory) -> Verdict:
    """Return whether learner and engine fit: a fault if they surely do not, a warning if they may not."""
    if config.cluster.backend == "megatron":
        return skipped("the memory of --backend megatron is not predicted: estimates missed it by 20 to 60 %")
    need = memory_need(config, networks)
    if on_gpu(config):
        return _check_gpus(config, need, free)
    ranks = max(1, config.cluster.num_learners)
    what = f"{ranks} learners" if ranks > 1 else "the learner"
    if need.engine:
        what += " and the engine"
    most = ranks * need.learner + need.engine + need.cache
    found = f"{what} may take {_gib(most)}, {_gib(free.host)} are free"
    return _judge(most, ranks * need.least + need.engine, free.host, found)


def memory_need(config: RunConfig, networks: MetaNetworks) -> MemoryNeed:
    """Return the memory that a configuration needs."""
    model = networks.trained(config.learner)
    size = _value_bytes(config)
    ranks = max(1, config.cluster.num_ranks)
    count = Parameters.of(model)
    weights = size * (count.trained + count.frozen)
    engine = 0
    cache = 0
    if config.plays and config.engine_choice[0] == "hf":  # it runs in this process
        engine = size * networks.num_parameters
        cache = _cache_bytes(config, model)
    if not config.trains:  # only the weights, to score a stream with
        learner = weights // ranks + PROCESS_BYTES
        return MemoryNeed(learner, weights // ranks, engine, cache, offloaded=0, resident=learner)
    tokens = max(config.learner.max_tokens_per_microbatch, _longest_stream(config))
    patches = 0
    if model.architecture.vision:
        patches = int(IMAGE_SHARE * tokens) * model.merge_size**2
    plan = Plan(
        num_gpus=ranks,
        tokens=tokens,
        patches=patches,
        recompute=config.learner.recompute,
        reshard=config.learner.reshard,
        offload=config.learner.offload,
        frozen_bytes=size if config.learner.lora_rank or config.learner.freeze_vision else 4,
        compute_bytes=size,
    )
    parts = estimate(model, plan)
    learner = parts.total + PROCESS_BYTES
    # The KL term needs a second network, unless it is the trained one without its adapters.
    if config.algorithm.kl_coef and not config.learner.lora_rank:
        learner += weights // ranks
    # After a step, rank 0 holds all weights for the servers to copy.
    if config.uses_servers and config.engine.sync != "disk":
        learner = max(learner, parts.between_steps + weights + PROCESS_BYTES)
    # Adam's two moments are float32; with "all", float32 weights and gradients are offloaded too.
    offloaded = {"none": 0, "optimizer": 8 * count.trained, "all": 16 * count.trained + size * count.frozen}
    resident = parts.weights + PROCESS_BYTES
    if config.learner.offload == "none":
        resident += parts.optimizer
    return MemoryNeed(
        learner=learner,
        # The process may take less than the allowance for it.
        least=learner - parts.activations - parts.logits - PROCESS_BYTES // 2,
        engine=engine,
        cache=cache,
        offloaded=offloaded[config.learner.offload],
        resident=resident,
    )


def on_gpu(config: RunConfig) -> bool:
    """Return whether the learner runs on a GPU."""
    if config.cluster.num_ranks:
        return config.cluster.num_gpus > 0
    return config.model.device.split(":")[0] == "cuda"


def _value_bytes(config: RunConfig) -> int:
    if config.model.dtype == "bfloat16":
        return 2
    return 4


def _longest_stream(config: RunConfig) -> int:
    return config.data.max_prompt_tokens + config.env.max_new_tokens


def _cache_bytes(config: RunConfig, model: PolicyModel) -> int:
    """Return the bytes that the layers of the embedded engine keep of a batch: keys and values, or states."""
    text = model.config.get_text_config()
    rollout = config.rollout
    rows = min(rollout.max_batch, rollout.problems_per_step * rollout.group_size)
    state_layers = [block.linear_attn for block in model.blocks if hasattr(block, "linear_attn")]
    num_attention = text.num_hidden_layers - len(state_layers)
    # Twice for keys and values.
    token_bytes = 2 * _value_bytes(config) * num_attention * text.num_key_value_heads * head_size(text)
    row_bytes = token_bytes * _longest_stream(config)
    for layer in state_layers:
        states = States.zeros(layer, 1, torch.empty(0, dtype=getattr(torch, config.model.dtype), device="meta"))
        row_bytes += states.conv_SCW.nbytes + states.recurrent_SHKV.nbytes
    # Twice, because a batch begins with copies of what its sessions keep.
    return 2 * rows * row_bytes


def _check_gpus(config: RunConfig, need: MemoryNeed, free: FreeMemory) -> Verdict:
    """Judge the fullest GPU with a learner, and the host memory for what is offloaded to it."""
    learners = tuple(range(max(1, config.cluster.num_gpus)))
    here = len(free.gpus)
    if len(learners) > here:
        what = f"a learner takes about {_gib(need.learner)} of its GPU"
        return skipped(f"{what}; {here} of {len(learners)} GPUs are on this host, others cannot be asked")
    share = config.engine.memory_share(beside_learner=True)
    num_servers = Counter[int]()
    if config.uses_servers and config.starts_servers:
        num_servers = shared_gpus(config.engine, learners, here)
    rooms = []
    beside_servers = []
    for gpu in learners:
        room, total = free.gpus[gpu]
        # Each server also has a CUDA context, which is not part of its share.
        left = room - int(share * total)
        beside_servers.append(left - PROCESS_BYTES)
        if num_servers[gpu]:
            room = left - num_servers[gpu] * PROCESS_BYTES
        rooms.append(room)
    most = need.learner
    least = need.least
    # An embedded engine has a GPU of its own where there is one more than learners.
    if not config.cluster.num_gpus or first_server_gpu(config.engine.first_gpu, learners, here) in learners:
        most += need.engine + need.cache
        least += need.engine
    found = f"a GPU with a learner may need {_gib(most)}, {_gib(min(rooms))} are free"
    if num_servers:
        found += f" beside servers that take {share:g} of it"
    verdicts = [_judge(most, least, min(rooms), found)]
    if config.engine.placement == "colocate":  # servers free their memory while the learner trains
        kept = need.resident
        room = min(beside_servers)
        found = f"the learner keeps {_gib(kept)} while servers write, which leave it {_gib(max(0, room))}"
        verdicts.append(_judge(kept, kept, room, found, "lower --mem-fraction, or give --offload all"))
    if need.offloaded:
        found = f"{_gib(need.offloaded)} are offloaded to this host's memory, {_gib(free.host)} are free"
        verdicts.append(_judge(need.offloaded, need.offloaded, free.host, found, "give --offload none, or --lora-rank"))
    return combine(verdicts)


def _judge(most: int, least: int, room: int, found: str, fix: str = _FIX) -> Verdict:
    """Return a fault if the least need exceeds the room, a warning if the largest need nearly does, else ok."""
    if least > room:
        return fault(found, fix)
    if most > TIGHT * room:
        return warning(found, fix)
    return ok(found)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
