"""The sizes of the Qwen3-VL networks, to compute with one whose checkpoint is not here."""

from __future__ import annotations

from typing import Any

#: Dense Qwen3-VL: hidden size, layers, heads, MLP, tied embedding; tower's hidden size, layers, MLP, DeepStack layers.
#: From the config.json of the Instruct checkpoints.
DENSE: dict[str, tuple[int, int, int, int, bool, int, int, int, tuple[int, int, int]]] = {
    "2b": (2048, 28, 16, 6144, True, 1024, 24, 4096, (5, 11, 17)),
    "4b": (2560, 36, 32, 9728, True, 1024, 24, 4096, (5, 11, 17)),
    "8b": (4096, 36, 32, 12288, False, 1152, 27, 4304, (8, 16, 24)),
    "32b": (5120, 64, 64, 25600, False, 1152, 27, 4304, (8, 16, 24)),
}
#: Mixtures of 128 experts, 8 of them a token: hidden size, layers, heads, MLP of an expert. The tower is that of 8b.
MIXTURES: dict[str, tuple[int, int, int, int]] = {
    "30b-a3b": (2048, 48, 32, 768),
    "235b-a22b": (4096, 94, 64, 1536),
}
QWEN3_VL = (*DENSE, *MIXTURES)


def hub_id(name: str) -> str:
    """Return the hub id of one of `QWEN3_VL`; another model is named as it is."""
    if name in QWEN3_VL:
        return f"Qwen/Qwen3-VL-{name.upper()}-Instruct"
    return name


def qwen3_vl_config(name: str) -> Any:
    """Return the Transformers configuration of a Qwen3-VL: one of `QWEN3_VL`."""
    from transformers import AutoConfig

    mixture = MIXTURES.get(name)
    hidden, layers, heads, mlp, tied, vision_hidden, vision_layers, vision_mlp, deepstack = DENSE[
        "8b" if mixture else name
    ]
    if mixture:
        hidden, layers, heads, mlp = mixture
    text = {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # The same for all sizes of a kind.
        "num_key_value_heads": 4 if mixture else 8,
        "head_dim": 128,
        "tie_word_embeddings": tied,
    }
    if mixture:
        text |= {"moe_intermediate_size": mlp, "num_experts": 128, "num_experts_per_tok": 8}
    else:
        text |= {"intermediate_size": mlp}
    vision = {
        "hidden_size": vision_hidden,
        "depth": vision_layers,
        "num_heads": 16,
        "intermediate_size": vision_mlp,
        "out_hidden_size": hidden,
        "deepstack_visual_indexes": list(deepstack),
    }
    model_type = "qwen3_vl_moe" if mixture else "qwen3_vl"
    return AutoConfig.for_model(model_type, text_config=text, vision_config=vision, tie_word_embeddings=tied)
