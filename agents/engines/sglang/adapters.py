"""Low-rank adapters as SGLang servers take them: over HTTP, apart from the checkpoint that they adapt."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: The linear layers of a decoder that a server adapts. Vision towers, experts and the output layer are no such layers.
_LAYER = re.compile(r"(.*\blayers\.\d+\.(?:self_attn|mlp))\.((?:q|k|v|o|gate|up|down)_proj)")


@dataclass(frozen=True)
class Adapter:
    """The low-rank updates of some linear layers, W + (alpha / rank) B A, in the format of peft.

    `config` is the content of peft's `adapter_config.json`. `tensors` is a base64 pickle of A and B by peft's names, as
    tensors on the CPU: the pickle holds their values. `num_bytes` counts these values alone. `layers` are the adapted
    layers' names.

    Example: rank 8 on all decoder layers of a 2B Qwen3-VL is 17,432,576 bytes in bfloat16; its weights are 4.3 GB.
    """

    config: Mapping[str, Any]
    tensors: str
    num_bytes: int
    layers: tuple[str, ...]

    @property
    def rank(self) -> int:
        """The number of rows of A and of columns of B."""
        return int(self.config["r"])

    @property
    def targets(self) -> tuple[str, ...]:
        """The last parts of the layers' names, such as `q_proj`."""
        return tuple(self.config["target_modules"])


def kinds_of(layers: Sequence[str]) -> tuple[str, ...]:
    """Return the last parts of layers' names, each once: what servers call the targets of an adapter.

    >>> kinds_of(["model.layers.0.self_attn.v_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"])
    ('up_proj', 'v_proj')
    """
    return tuple(sorted({layer.rpartition(".")[2] for layer in layers}))


def why_unsupported(layers: Sequence[str]) -> str:
    """Return why SGLang cannot serve an adapter of these layers; "" if it can.

    Servers fuse the queries, keys and values of a layer, and its gate and up projections. Version 0.5.15 fills in a
    missing key or up projection, but no other part.

    >>> why_unsupported(["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"])
    ''
    >>> why_unsupported(["model.layers.0.mlp.up_proj"])
    'servers adapt up_proj only together with gate_proj'
    >>> why_unsupported(["model.visual.blocks.0.attn.qkv"])
    'servers cannot adapt model.visual.blocks.0.attn.qkv'
    """
    parts_of: dict[str, set[str]] = defaultdict(set)
    for layer in layers:
        match = _LAYER.fullmatch(layer)
        if match is None:
            return f"servers cannot adapt {layer}"
        parts_of[match[1]].add(match[2])
    for fused, needed in ((("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")), (("up_proj",), ("gate_proj",))):
        for parts in parts_of.values():
            given = [part for part in fused if part in parts]
            if given and (missing := [part for part in needed if part not in parts]):
                return f"servers adapt {given[0]} only together with {missing[0]}"
    return ""
