"""Compares the memory that a configuration needs, computed before anything is loaded, with the free memory.

The verdict has both numbers and, if the run does not fit, the flags with which it would.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envs.checks import Verdict, combine, fault, ok, skipped, warning
from trainer.config.learner import IMAGE_SHARE
from trainer.config.run import RunConfig
from trainer.learner.compile_choice import is_compiled
from trainer.planning.memory import GIB, MetaNetworks, Parameters, Plan, estimate
from trainer.preflight.checks.free_memory import FreeMemory
from trainer.setup.servers import first_server_gpu, shared_gpus

#: Memory of a process for torch's libraries, a CUDA context and the allocator's gaps.
PROCESS_BYTES = GIB
#: A need above this share of the free memory may not fit, because it is only an estimate.
TIGHT = 0.9


@dataclass(frozen=True)
class Change:
    """Flags that lower the memory need, and the settings that they change.

    Example::

        Change("--recompute 1", {"recompute": 1.0})
    """

    flags: str
    learner: Mapping[str, Any]
    num_gpus: int = 0

    def applied(self, config: RunConfig) -> RunConfig:
        """Return the configuration with these flags."""
        learner = config.learner.model_copy(update=dict(self.learner))
        if self.num_gpus:
            cluster = config.cluster.model_copy(update={"num_gpus": self.num_gpus})
        else:
            cluster = config.cluster
        return config.model_copy(update={"learner": learner, "cluster": cluster})


_SHORT = {"recompute": 1.0, "max_tokens_per_microbatch": 1024}
#: In the order of how much time they cost, least first.
CHANGES: tuple[Change, ...] = (
    Change("--recompute 1", {"recompute": 1.0}),
    Change("--recompute 1 --max-tokens-per-microbatch 1024", _SHORT),
    Change("--recompute 1 --offload optimizer", {"recompute": 1.0, "offload": "optimizer"}),
    Change("--recompute 1 --max-tokens-per-microbatch 1024 --offload optimizer", {**_SHORT, "offload": "optimizer"}),
    Change("--lora-rank 32", {"lora_rank": 32}),
    Change("--lora-rank 32 --recompute 1 --max-tokens-per-microbatch 1024", {**_SHORT, "lora_rank": 32}),
    Change("--lora-rank 32 --recompute 1 --offload all", {"recompute": 1.0, "lora_rank": 32, "offload": "all"}),
)
MORE_GPUS: tuple[Change, ...] = tuple(
    Change(f"--num-gpus {count} --recompute 1", {"recompute": 1.0}, count) for count in (2, 4, 8, 16, 32, 64)
)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a configuration needs on one GPU with a learner, and in host memory.

    - `learner`: most that the learner needs on its device.
    - `least`: what it needs there for sure. On a CPU this leaves out what depends on the length of streams; on a GPU it
      counts only the activations that compiled blocks keep at least.
    - `engine`: the weights of an embedded engine, and `cache`: most that its key-value cache needs.
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
    if on_gpu(config):
        need = memory_need(config, networks)
        verdicts = (_check_gpus(config, networks, need, free), *_check_colocated(config, need, free))
        return combine([*verdicts, *_check_host(need, free)])
    ranks = max(1, config.cluster.num_learners)

    def total(config: RunConfig) -> tuple[int, int]:
        """Return the largest and the smallest need: host memory can be swapped, and streams may be shorter."""
        need = memory_need(config, networks)
        return ranks * need.learner + need.engine + need.cache, ranks * need.least + need.engine

    def fits(other: RunConfig) -> int | None:
        """Return the largest need of a configuration if it fits, else None."""
        if ranks * _least_weights(other, networks) <= free.host:
            most = total(other)[0]
        else:
            most = free.host
        if most <= TIGHT * free.host:
            return most
        return None

    most, least = total(config)
    if ranks > 1:
        what = f"{ranks} learners"
    else:
        what = "the learner"
    if _is_embedded(config):
        engine = " and the engine"
    else:
        engine = ""
    found = f"{what}{engine} may take {_gib(most)}, {_gib(free.host)} are free"
    changes = [change for change in CHANGES if "offload" not in change.learner]
    return _judge(most, least, free.host, found, lambda: _fix(config, changes, fits))


def memory_need(config: RunConfig, networks: MetaNetworks) -> MemoryNeed:
    """Return the memory that a configuration needs."""
    model = networks.trained(config.learner)
    size = _value_bytes(config)
    ranks = max(1, config.cluster.num_ranks)
    count = Parameters.of(model)
    tokens = max(config.learner.max_tokens_per_microbatch, config.data.max_prompt_tokens + config.env.max_new_tokens)
    if model.architecture.vision:
        num_image_tokens = int(IMAGE_SHARE * tokens)
    else:
        num_image_tokens = 0
    plan = Plan(
        num_gpus=ranks,
        tokens=tokens,
        patches=num_image_tokens * model.merge_size**2,
        recompute=config.learner.recompute,
        reshard=config.learner.reshard,
        offload=config.learner.offload,
        frozen_bytes=size if config.learner.lora_rank or config.learner.freeze_vision else 4,
        compute_bytes=size,
    )
    num_parameters = count.trained + count.frozen
    parts = estimate(model, plan)
    learner = parts.total + PROCESS_BYTES
    if config.algorithm.kl_coef and not config.learner.lora_rank:  # the reference network
        learner += size * num_parameters // ranks
    # After a step, rank 0 holds all weights for the servers to copy.
    if config.uses_servers and config.engine.sync != "disk":
        learner = max(learner, parts.between_steps + size * num_parameters + PROCESS_BYTES)
    engine, cache = _engine_bytes(config, networks, model.config, size)
    if not config.trains:  # only the weights, to score a stream with
        learner = (size * num_parameters // ranks) + PROCESS_BYTES
        return MemoryNeed(learner, learner - PROCESS_BYTES // 2, engine, cache, offloaded=0, resident=learner)
    offloaded = {"none": 0, "optimizer": 8 * count.trained, "all": 16 * count.trained + size * count.frozen}
    compiles = is_compiled(config.learner, on_gpu(config), num_parameters)
    unsure = parts.activations - estimate(model, replace(plan, is_compiled=compiles)).activations
    return MemoryNeed(
        learner=learner,
        least=learner - (unsure if on_gpu(config) else parts.activations + parts.logits + PROCESS_BYTES // 2),
        engine=engine,
        cache=cache,
        offloaded=offloaded[config.learner.offload],
        resident=parts.between_steps + PROCESS_BYTES - (0 if config.learner.offload == "none" else parts.optimizer),
    )


def _is_embedded(config: RunConfig) -> bool:
    """Return whether the engine runs in this process."""
    return config.plays and config.engine_choice[0] == "hf"


def _engine_bytes(config: RunConfig, networks: MetaNetworks, network: Any, size: int) -> tuple[int, int]:
    """Return the bytes of an embedded engine's weights, and of its cache at most; 0 without one."""
    if not _is_embedded(config):
        return 0, 0
    return size * networks.num_parameters, _cache_bytes(config, network, size)


def _value_bytes(config: RunConfig) -> int:
    if config.model.dtype == "bfloat16":
        return 2
    return 4


def _least_weights(config: RunConfig, networks: MetaNetworks) -> int:
    """Return the bytes of weights on a rank, however little of them is trained; 0 if they are offloaded."""
    ranks = max(1, config.cluster.num_ranks)
    if config.learner.offload == "all":
        return 0
    return _value_bytes(config) * networks.num_parameters // ranks


def _cache_bytes(config: RunConfig, network: Any, size: int) -> int:
    """Return the bytes of the embedded engine's keys and values for a batch: twice, because growing copies them."""
    text = network.get_text_config()
    rollout = config.rollout
    episodes = min(rollout.max_batch, rollout.problems_per_step * rollout.group_size)
    tokens = config.data.max_prompt_tokens + config.env.max_new_tokens
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * 2 * size * text.num_hidden_layers * text.num_key_value_heads * head * episodes * tokens


def on_gpu(config: RunConfig) -> bool:
    """Return whether the learner runs on a GPU."""
    if config.cluster.num_ranks:
        return config.cluster.num_gpus > 0
    return config.model.device.split(":")[0] == "cuda"


def _check_gpus(config: RunConfig, networks: MetaNetworks, need: MemoryNeed, free: FreeMemory) -> Verdict:
    num_gpus = max(1, config.cluster.num_gpus)
    if num_gpus > len(free.gpus):
        what = f"a learner takes about {_gib(need.learner)} of its GPU"
        return skipped(f"{what}; {len(free.gpus)} of {num_gpus} GPUs are on this host, others cannot be asked")
    shared = _shared_gpus(config, len(free.gpus))
    embedded = _embedded_gpu(config, len(free.gpus))

    def room_on(index: int) -> int:
        """Return the bytes that a server on the GPU leaves free."""
        free_bytes, total_bytes = free.gpus[index]
        taken = config.engine.memory_share(beside_learner=True) * total_bytes + shared[index] * PROCESS_BYTES
        return free_bytes - (int(taken) if shared[index] else 0)

    def tightest(need: MemoryNeed) -> tuple[int, int, int]:
        """Return the largest need, the smallest need and the room on the GPU where the room is tightest."""
        each = []
        for index in range(num_gpus):
            engine, cache = (need.engine, need.cache) if index == embedded else (0, 0)
            each.append((need.learner + engine + cache, need.least + engine, room_on(index)))
        return min(each, key=lambda gpu: gpu[2] - gpu[0])

    def fits(other: RunConfig) -> int | None:
        """Return the largest need of a configuration if it fits, else None."""
        if _least_weights(other, networks) > min(map(room_on, range(num_gpus))):
            return None
        most, _, room = tightest(memory_need(other, networks))
        if most <= TIGHT * room:
            return most
        return None

    most, least, room = tightest(need)
    if shared:
        also = f" beside servers that take {config.engine.memory_share(beside_learner=True):g} of it"
    else:
        also = ""
    found = f"a GPU with a learner may need {_gib(most)}, {_gib(room)} are free{also}"
    return _judge(most, least, room, found, lambda: _fix(config, (*CHANGES, *MORE_GPUS), fits))


def _check_host(need: MemoryNeed, free: FreeMemory) -> Sequence[Verdict]:
    if not need.offloaded:
        return []
    found = f"{_gib(need.offloaded)} are offloaded to this host's memory, {_gib(free.host)} are free"
    return [_judge(need.offloaded, need.offloaded, free.host, found, lambda: "give --offload none, or --lora-rank")]


def _check_colocated(config: RunConfig, need: MemoryNeed, free: FreeMemory) -> Sequence[Verdict]:
    """Judge what the learner keeps while servers on its GPUs write; while it trains, they have freed theirs."""
    num_gpus = max(1, config.cluster.num_gpus)
    fraction = config.engine.memory_share(beside_learner=True)
    if config.engine.placement != "colocate" or num_gpus > len(free.gpus):
        return []
    gpus = free.gpus[:num_gpus]
    room = max(0, min(free_bytes - int(fraction * total) for free_bytes, total in gpus) - PROCESS_BYTES)
    fitting = min((free_bytes - PROCESS_BYTES - need.resident / TIGHT) / total for free_bytes, total in gpus)
    if fitting >= 0.1:
        fix = f"give --mem-fraction {math.floor(100 * fitting) / 100:g}"
    else:
        fix = "give --offload all"
    found = f"the learner keeps {_gib(need.resident)} while servers write, which leave it {_gib(room)}"
    return [_judge(need.resident, need.resident, room, found, lambda: fix)]


def _shared_gpus(config: RunConfig, here: int) -> Counter[int]:
    """Return the number of started servers on each GPU with a learner; `here` is the number of GPUs of this host."""
    if not config.uses_servers or config.engine.engine_url:
        return Counter()
    return shared_gpus(config.engine, tuple(range(max(1, config.cluster.num_gpus))), here)


def _embedded_gpu(config: RunConfig, here: int) -> int:
    """Return the GPU of the embedded engine; -1 without one."""
    if not _is_embedded(config):
        return -1
    learners = tuple(range(config.cluster.num_gpus))
    if config.cluster.num_gpus:
        return first_server_gpu(config.engine.first_gpu, learners, here)
    return 0


def _judge(most: int, least: int, room: int, found: str, fix: Callable[[], str]) -> Verdict:
    """Return a fault if the least need exceeds the room, a warning if the largest need nearly does, else ok."""
    if least > room:
        return fault(found, fix())
    if most > TIGHT * room:
        return warning(found, fix())
    return ok(found)


def _fix(config: RunConfig, changes: Sequence[Change], fits: Callable[[RunConfig], int | None]) -> str:
    """Return advice to give the first flags of `changes` with which the run fits."""
    has_peft = importlib.util.find_spec("peft") is not None
    for change in changes:
        is_more = not change.num_gpus or change.num_gpus > config.cluster.num_gpus
        is_possible = has_peft or "lora_rank" not in change.learner
        if is_more and is_possible and (total := fits(change.applied(config))):
            return f"give {change.flags}: about {_gib(total)}"
    return "take a smaller model, or a GPU with more memory (python -m trainer.memory computes what fits)"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
