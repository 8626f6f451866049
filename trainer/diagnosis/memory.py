"""Memory that a configuration takes, computed before anything is loaded, against what is free.

In: a configuration, the network's (its parameters on the meta device), and what is free where. Out: a verdict with both
numbers and, where they do not fit, the flags with which they would.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.model import PolicyModel
from trainer.config import LearnerConfig, RunConfig
from trainer.diagnosis.finding import Verdict, fault, ok, skipped, together, warning
from trainer.diagnosis.free import GIB, Free
from trainer.loading import meta_model
from trainer.lora import ALL_LINEAR, LoraOptions, add_lora
from trainer.memory import Parameters, Plan, estimate
from trainer.processes import first_server_gpu
from trainer.trainable import freeze_vision

#: What torch's libraries, a CUDA context and the allocator's gaps take of a process.
PROCESS_BYTES = GIB
#: The share of a micro-batch's tokens that are taken to be of pictures.
IMAGE_SHARE = 0.25
#: The share of the computed activations that compiled blocks keep at least: 0.47 was measured with Qwen3-VL-2B.
COMPILED_SHARE = 0.4
#: What uses more than this share of what is free may still not fit: the estimate is one.
TIGHT = 0.9


@dataclass(frozen=True)
class Change:
    """Flags that take less memory, and what they set.

    Example::

        Change("--recompute 1", {"recompute": 1.0})
    """

    flags: str
    learner: Mapping[str, Any]
    num_gpus: int = 0

    def applied(self, config: RunConfig) -> RunConfig:
        """Return the configuration with these flags."""
        learner = config.learner.model_copy(update=dict(self.learner))
        cluster = config.cluster.model_copy(update={"num_gpus": self.num_gpus}) if self.num_gpus else config.cluster
        return config.model_copy(update={"learner": learner, "cluster": cluster})


_SHORT = {"recompute": 1.0, "max_tokens_per_microbatch": 1024}
#: From what costs little time to what costs much.
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
class Need:
    """Bytes that a configuration takes of one GPU with a learner on it, and of the host's memory.

    `learner` is on the learner's device, `least` what it surely takes of that: on a CPU without what depends on how
    long streams are, on a GPU with what compiled blocks keep at least. `engine` are an embedded engine's weights,
    `cache` what it keeps of streams at most. `offloaded` is what the learner keeps in the host's memory. On a CPU all
    are the host's.
    """

    learner: int
    least: int
    engine: int
    cache: int
    offloaded: int


class Shapes:
    """The networks that a checkpoint is trained as, on the meta device, each made once; `network` is the plain one."""

    def __init__(self, network: PolicyModel) -> None:
        self.network = network
        self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
        self._made: dict[object, PolicyModel] = {(False, 0, ()): network}

    def trained(self, learner: LearnerConfig) -> PolicyModel:
        """Return the network with gradients where it is trained."""
        key = (learner.freeze_vision, learner.lora_rank, learner.lora_targets)
        if key not in self._made:
            model = self._made[key] = meta_model(self.network.config)
            if learner.freeze_vision and model.architecture.vision:
                freeze_vision(model)
            if learner.lora_rank:
                targets = learner.lora_targets or (ALL_LINEAR,)
                add_lora(model, LoraOptions(learner.lora_rank, learner.lora_alpha, targets))
        return self._made[key]


def check_memory(config: RunConfig, shapes: Shapes, free: Free) -> Verdict:
    """Return whether learner and engine fit: a fault where they surely do not, a warning where they may not."""
    if on_gpu(config):
        need = needs(config, shapes)
        return together([_check_gpus(config, shapes, need, free), *_check_host(need, free)])
    ranks = max(1, config.cluster.num_learners)

    def total(config: RunConfig) -> tuple[int, int]:
        """What is needed at most, and at least: a host's memory can be swapped, and streams are shorter."""
        need = needs(config, shapes)
        return ranks * need.learner + need.engine + need.cache, ranks * need.least + need.engine

    def fits(other: RunConfig) -> int | None:
        most = total(other)[0] if ranks * _least(other, shapes) <= free.host else free.host
        return most if most <= TIGHT * free.host else None

    most, least = total(config)
    what = f"{ranks} learners" if ranks > 1 else "the learner"
    engine = " and the engine" if _is_embedded(config) else ""
    found = f"{what}{engine} may take {_gib(most)}, {_gib(free.host)} are free"
    changes = [change for change in CHANGES if "offload" not in change.learner]
    return _judge(most, least, free.host, found, lambda: _fix(config, changes, fits))


def needs(config: RunConfig, shapes: Shapes) -> Need:
    """Count."""
    model, size = shapes.trained(config.learner), _value_bytes(config)
    ranks, count = max(1, config.cluster.num_ranks), Parameters.of(model)
    tokens = max(config.learner.max_tokens_per_microbatch, config.data.max_prompt_tokens + config.env.max_new_tokens)
    num_image_tokens = int(IMAGE_SHARE * tokens) if model.architecture.vision else 0
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
    if config.algorithm.kl_coef and not config.learner.lora_rank:  # a network to stay close to
        learner += size * num_parameters // ranks
    # Rank 0 holds what servers are to copy, after its step.
    if config.plays and not _is_embedded(config) and config.engine.sync != "disk":
        learner = max(learner, parts.weights + parts.optimizer + size * num_parameters + PROCESS_BYTES)
    if not config.trains:  # the weights alone, to score a stream with
        learner = size * num_parameters // ranks + PROCESS_BYTES
        return Need(learner, learner - PROCESS_BYTES // 2, *_engine_bytes(config, shapes, model.config, size), 0)
    offloaded = {"none": 0, "optimizer": 8 * count.trained, "all": 16 * count.trained + size * count.frozen}
    engine, cache = _engine_bytes(config, shapes, model.config, size)
    is_compiled = config.learner.compile == "on" or (config.learner.compile == "auto" and on_gpu(config))
    unsure = int((1 - COMPILED_SHARE) * parts.activations) if is_compiled else 0
    return Need(
        learner=learner,
        least=learner - (unsure if on_gpu(config) else parts.activations + parts.logits + PROCESS_BYTES // 2),
        engine=engine,
        cache=cache,
        offloaded=offloaded[config.learner.offload],
    )


def _is_embedded(config: RunConfig) -> bool:
    """Return whether an engine is part of this process."""
    return config.plays and config.engine.chosen(config.cluster.num_gpus) == "hf"


def _engine_bytes(config: RunConfig, shapes: Shapes, network: Any, size: int) -> tuple[int, int]:
    """Return what an embedded engine's weights take, and its cache at most."""
    if not _is_embedded(config):
        return 0, 0
    return size * shapes.num_parameters, _cache_bytes(config, network, size)


def _value_bytes(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def _least(config: RunConfig, shapes: Shapes) -> int:
    """Return what a rank keeps of the weights however little is trained; nothing where they are offloaded."""
    ranks = max(1, config.cluster.num_ranks)
    return 0 if config.learner.offload == "all" else _value_bytes(config) * shapes.num_parameters // ranks


def _cache_bytes(config: RunConfig, network: Any, size: int) -> int:
    """Return what the embedded engine keeps of the streams of a batch: keys and values, once more while they grow."""
    text, rollout = network.get_text_config(), config.rollout
    episodes = min(rollout.max_batch, rollout.problems_per_step * rollout.group_size)
    tokens = config.data.max_prompt_tokens + config.env.max_new_tokens
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * 2 * size * text.num_hidden_layers * text.num_key_value_heads * head * episodes * tokens


def on_gpu(config: RunConfig) -> bool:
    """Return whether the learner is to be on a GPU."""
    if config.cluster.num_ranks:
        return config.cluster.num_gpus > 0
    return config.model.device.split(":")[0] == "cuda"


def _check_gpus(config: RunConfig, shapes: Shapes, need: Need, free: Free) -> Verdict:
    num = max(1, config.cluster.num_gpus)
    if num > len(free.gpus):
        what = f"a learner takes about {_gib(need.learner)} of its GPU"
        return skipped(f"{what}; {len(free.gpus)} of {num} GPUs are on this host, others cannot be asked")
    shared = _shared_gpus(config, len(free.gpus))
    embedded = _embedded_gpu(config, len(free.gpus))

    def left(index: int) -> int:
        """What an engine on the GPU leaves of it."""
        there, whole = free.gpus[index]
        return there - (int(config.engine.mem_fraction * whole) if index in shared else 0)

    def tightest(need: Need) -> tuple[int, int, int]:
        """What is needed at most and at least, and what is left, on the GPU where that is tightest."""
        each = []
        for index in range(num):
            engine, cache = (need.engine, need.cache) if index == embedded else (0, 0)
            each.append((need.learner + engine + cache, need.least + engine, left(index)))
        return min(each, key=lambda of: of[2] - of[0])

    def fits(other: RunConfig) -> int | None:
        if _least(other, shapes) > min(map(left, range(num))):
            return None
        most, _, room = tightest(needs(other, shapes))
        return most if most <= TIGHT * room else None

    most, least, room = tightest(need)
    also = f" beside a server that takes {config.engine.mem_fraction:g} of it" if shared else ""
    found = f"a GPU with a learner may need {_gib(most)}, {_gib(room)} are free{also}"
    return _judge(most, least, room, found, lambda: _fix(config, (*CHANGES, *MORE_GPUS), fits))


def _check_host(need: Need, free: Free) -> Sequence[Verdict]:
    if not need.offloaded:
        return []
    found = f"{_gib(need.offloaded)} are offloaded to this host's memory, {_gib(free.host)} are free"
    return [_judge(need.offloaded, need.offloaded, free.host, found, lambda: "give --offload none, or --lora-rank")]


def _shared_gpus(config: RunConfig, here: int) -> set[int]:
    """Return the GPUs of learners on which a started server has its share too."""
    if not config.plays or config.engine.engine_url or _is_embedded(config):
        return set()
    learners, places = tuple(range(max(1, config.cluster.num_gpus))), config.engine.tensor_parallel
    first = first_server_gpu(config.engine.first_gpu, learners, here, places)
    servers = {(first + number) % here for number in range(config.engine.num_servers * places)}
    return servers & set(learners)


def _embedded_gpu(config: RunConfig, here: int) -> int:
    """Return the GPU of the embedded engine; -1 where it has none."""
    if not _is_embedded(config):
        return -1
    learners = tuple(range(config.cluster.num_gpus))
    return first_server_gpu(config.engine.first_gpu, learners, here) if config.cluster.num_gpus else 0


def _judge(most: int, least: int, room: int, found: str, fix: Callable[[], str]) -> Verdict:
    if least > room:
        return fault(found, fix())
    return warning(found, fix()) if most > TIGHT * room else ok(found)


def _fix(config: RunConfig, changes: Sequence[Change], fits: Callable[[RunConfig], int | None]) -> str:
    """Return the first flags with which it fits."""
    has_peft = importlib.util.find_spec("peft") is not None
    for change in changes:
        is_more = not change.num_gpus or change.num_gpus > config.cluster.num_gpus
        is_possible = has_peft or "lora_rank" not in change.learner
        if is_more and is_possible and (total := fits(change.applied(config))):
            return f"give {change.flags}: about {_gib(total)}"
    return "take a smaller model, or a GPU with more memory (python -m trainer.memory computes what fits)"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
