"""Which layouts a network and a number of ranks allow, found from its configuration alone, before anything is loaded.

The rules are those of Megatron-Core 0.19 and Megatron-Bridge 0.6: parallel groups divide the ranks
(`core/parallel_state.py`), heads, matrices and layers divide (`core/transformer/transformer_config.py`,
`core/tensor_parallel`), a mixture shares tokens where it shares matrices (`core/transformer/moe/moe_layer.py`), and
DeepStack's features enter the first pipeline stage (`bridge/models/qwen_vl/modelling_qwen3_vl/model.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from envs.errors import UserError
from trainer.learner.layout import Layout

#: By `model_type`: the networks whose packed streams, and positions that we compute, the bridge takes. It also knows
#: Qwen2.5-VL, but computes positions of its own there and keeps the whole tower and the whole stream on every rank.
#: Whether its state layers (Qwen3.5) keep packed streams apart is untried.
MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3", "qwen2", "llama")


def check_layout(layout: Layout, num_ranks: int, config: Any, ranks_flag: str = "--num-gpus") -> None:
    """Raise `UserError` if `num_ranks` ranks cannot share the network of a Transformers configuration in this way.

    `ranks_flag` is the command's flag for the number of ranks.

    Example: Qwen3-VL-2B has 28 layers, so `Layout(pipeline=3)` raises "--pp: must divide the 28 layers, got 3; give one
    of 1, 2, 4, 7".
    """
    for broken in _broken(layout, num_ranks, config, ranks_flag):
        raise broken


def _broken(layout: Layout, num_ranks: int, config: Any, ranks_flag: str) -> Iterator[UserError]:
    """Yield an error for each rule that the layout breaks."""
    if config.model_type not in MODEL_TYPES:
        rule = f"must be one of {', '.join(MODEL_TYPES)} with --backend megatron"
        yield UserError("--model", rule, config.model_type, "leave --backend out: FSDP2 trains it")
        return
    yield from _broken_groups(layout, num_ranks, bool(num_experts(config)), ranks_flag)
    yield from _broken_sizes(layout, config)
    yield from _broken_stages(layout, config)


def _broken_groups(layout: Layout, num_ranks: int, has_experts: bool, ranks_flag: str) -> Iterator[UserError]:
    sizes = {"--tp": layout.tensor, "--pp": layout.pipeline, "--cp": layout.context}
    if num_ranks % layout.model_parallel:
        yield _not_whole(ranks_flag, num_ranks, sizes)
    for flag, size in (("--ep", layout.expert), ("--etp", layout.expert_tensor)):
        if size > 1 and not has_experts:
            yield UserError(flag, "needs a mixture of experts", size, "leave it out")
    if num_ranks % layout.expert_parallel:
        sizes = {"--ep": layout.expert, "--etp": layout.expert_tensor, "--pp": layout.pipeline}
        yield _not_whole(ranks_flag, num_ranks, sizes)
    if has_experts and layout.tensor > 1 and not layout.sequence:
        rule = "must be given where a mixture of experts shares matrices (--tp)"
        yield UserError("--sp", rule, "false", "give --sp, or --tp 1 with more --ep")


def _not_whole(flag: str, num_ranks: int, sizes: dict[str, int]) -> UserError:
    used = {name: size for name, size in sizes.items() if size > 1}
    whole = math.prod(used.values())
    product = " x ".join(f"{name} {size}" for name, size in used.items())
    # The next multiple is the least that a user has to add.
    more = -(-num_ranks // whole) * whole
    return UserError(flag, f"must be a multiple of {whole} = {product}", num_ranks, f"give {flag} {more}")


def _broken_sizes(layout: Layout, config: Any) -> Iterator[UserError]:
    text = config.get_text_config()
    vision = getattr(config, "vision_config", None)
    tensor = layout.tensor
    shared = {"attention heads": text.num_attention_heads}  # a vocabulary is padded
    if not num_experts(config):
        shared["columns of an MLP"] = text.intermediate_size
    if vision is not None:
        shared["heads of the vision tower"] = vision.num_heads
        shared["columns of the tower's MLP"] = vision.intermediate_size
    for what, size in shared.items():
        if size % tensor:
            yield _not_divided("--tp", tensor, what, size)
    heads = text.num_key_value_heads
    # With more ranks than key-value heads, several ranks hold the same head.
    if heads % tensor and tensor % heads:
        rule = f"must divide the {heads} key-value heads, or be a multiple of them"
        yield UserError("--tp", rule, tensor, _choices(heads))
    if experts := num_experts(config):
        if experts % layout.expert:
            yield _not_divided("--ep", layout.expert, "experts", experts)
        if text.moe_intermediate_size % layout.expert_tensor:
            yield _not_divided("--etp", layout.expert_tensor, "columns of an expert", text.moe_intermediate_size)


def _broken_stages(layout: Layout, config: Any) -> Iterator[UserError]:
    layers = config.get_text_config().num_hidden_layers
    stages = layout.pipeline
    if layers % stages:
        yield _not_divided("--pp", stages, "layers", layers)
    deepstack = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", ()))
    if layers // stages < deepstack:
        rule = f"must leave the first stage {deepstack} layers, into which DeepStack's features go"
        yield UserError("--pp", rule, stages, f"give at most {layers // deepstack} for {layers} layers")


def num_experts(config: Any) -> int:
    """Return the number of experts of a Transformers configuration; 0: it is no mixture."""
    return getattr(config.get_text_config(), "num_experts", 0) or 0


def _not_divided(flag: str, size: int, what: str, number: int) -> UserError:
    return UserError(flag, f"must divide the {number} {what}", size, _choices(number))


def _choices(number: int) -> str:
    """Return advice to give a divisor, the smallest ones."""
    divisors = [size for size in range(1, min(number, 64) + 1) if number % size == 0]
    return f"give one of {', '.join(map(str, divisors[:6]))}"
