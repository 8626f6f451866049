"""The sizes of the dense Qwen3-VL networks, to compute with one whose checkpoint is not here."""

from __future__ import annotations

from typing import Any

#: Qwen3-VL: hidden size, layers, heads, MLP, tied embedding; tower's hidden size, layers, MLP, DeepStack layers.
#: From the config.json of the Instruct checkpoints.
QWEN3_VL: dict[str, tuple[int, int, int, int, bool, int, int, int, tuple[int, int, int]]] = {
    "2b": (2048, 28, 16, 6144, True, 1024, 24, 4096, (5, 11, 17)),
    "4b": (2560, 36, 32, 9728, True, 1024, 24, 4096, (5, 11, 17)),
    "8b": (4096, 36, 32, 12288, False, 1152, 27, 4304, (8, 16, 24)),
    "32b": (5120, 64, 64, 25600, False, 1152, 27, 4304, (8, 16, 24)),
}


def qwen3_vl_config(name: str) -> Any:
    """Return the Transformers configuration of a dense Qwen3-VL: "2b", "4b", "8b" or "32b"."""
    from transformers import AutoConfig

    hidden, layers, heads, mlp, tied, vision_hidden, vision_layers, vision_mlp, deepstack = QWEN3_VL[name]
    text = {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "tie_word_embeddings": tied,
    }
    vision = {
        "hidden_size": vision_hidden,
        "depth": vision_layers,
        "num_heads": 16,
        "intermediate_size": vision_mlp,
        "out_hidden_size": hidden,
        "deepstack_visual_indexes": list(deepstack),
    }
    return AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, tie_word_embeddings=tied)
