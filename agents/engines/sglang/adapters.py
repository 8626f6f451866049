"""Which low-rank adapters SGLang servers take."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

#: The linear layers of a decoder that a server adapts. Vision towers, experts and the output layer are no such layers.
_LAYER = re.compile(r"(.*\blayers\.\d+\.(?:self_attn|mlp))\.((?:q|k|v|o|gate|up|down)_proj)")


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
