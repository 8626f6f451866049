"""Complete checkpoint folders of every architecture, with random weights and few layers: for benchmarks and tests.

In: a model type and the folder of a tokenizer. Out: a folder that `PolicyModel.load` and `Renderer.from_checkpoint`
read as they read a real one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agents.model import STARTER_PATH
from agents.model.architectures import ARCHITECTURES

MODEL_TYPES = tuple(ARCHITECTURES)
# The decoder is one layer deeper than DeepStack enters: what is added behind its last layer reaches no other token.
HIDDEN, SOURCES, MLP, HEADS, KV_HEADS, HEAD_DIM = 64, 3, 96, 4, 2, 16
VISION_HIDDEN, VISION_LAYERS, VISION_HEADS = 32, 3, 2
#: Larger weights of a state layer's gates would close them, and what is left is as small as the rounding.
SATURATING = ("conv1d.weight", "in_proj_a.weight", "in_proj_b.weight")
#: Those whose small real checkpoints share the embedding with the output layer.
TIED = ("qwen3_vl", "qwen3_5", "qwen3", "qwen2")


def write_tiny_model(
    folder: Path,
    model_type: str,
    tokenizer_path: Path = STARTER_PATH,
    tied: bool | None = None,
    template: str | None = None,
    weight_scale: float = 8.0,
) -> None:
    """Write tokenizer, chat template, image processor settings, configuration and seeded random weights.

    `tied` says whether output layer and embedding are one, by default as in the real checkpoints; `template` replaces
    the tokenizer's chat template; `weight_scale` multiplies the matrices of Transformers' initialisation, so that text
    and images move the logits by several nats.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    if template is not None:
        tokenizer.chat_template = template
    architecture = ARCHITECTURES[model_type]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    if architecture.vision:
        image_processor(model_type).save_pretrained(folder)
    config = tiny_config(model_type, tokenizer, model_type in TIED if tied is None else tied)
    torch.manual_seed(0)
    network: Any = architecture.build(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("A_log"):  # states that last for tens of tokens: a leak must show
                parameter.sub_(3)
            elif name.endswith(SATURATING):
                continue
            elif parameter.dim() > 1:
                parameter.mul_(weight_scale)
            elif parameter.std() == 0:  # norms of ones, biases of zeros: a mistake with them must show
                parameter.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(folder)


def tiny_config(model_type: str, tokenizer: Any, tied: bool) -> Any:
    """Return the Transformers configuration of a tiny network, its special ids taken from the tokenizer."""
    from transformers import AutoConfig

    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": SOURCES,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "rope_parameters": _rope(model_type),
        "tie_word_embeddings": tied,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "bos_token_id": None,
    }
    if model_type not in ("qwen2", "qwen2_5_vl"):
        text["head_dim"] = HEAD_DIM
    if model_type in ("qwen3_vl_moe", "qwen3_5_moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": MLP // 2}
    if ARCHITECTURES[model_type].states:
        text |= _states(model_type)
    if not ARCHITECTURES[model_type].vision:
        return AutoConfig.for_model(model_type, **text)
    vision: dict[str, Any] = {
        "depth": VISION_LAYERS,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": 2 * VISION_HIDDEN,
        "num_heads": VISION_HEADS,
        "out_hidden_size": HIDDEN,
    }
    if ARCHITECTURES[model_type].deepstack:
        vision |= {"deepstack_visual_indexes": [0, 1]}
    if model_type != "qwen2_5_vl":
        vision |= {"num_position_embeddings": 256}
    if ARCHITECTURES[model_type].windows:
        vision |= {"fullatt_block_indexes": [1]}
    return AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=tied,
    )


def _states(model_type: str) -> dict[str, Any]:
    """Return the sizes of a decoder of which only the fourth layer has attention, which turns a part of each head."""
    sizes = {
        "num_hidden_layers": 4,
        "head_dim": 2 * HEAD_DIM,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    }
    if model_type == "qwen3_5_moe":
        sizes["shared_expert_intermediate_size"] = MLP // 2
    return sizes


def _rope(model_type: str) -> dict[str, Any]:
    pairs = HEAD_DIM // 2
    if ARCHITECTURES[model_type].states:
        pairs = 4
    sections: dict[str, Any] = {"mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    if model_type.startswith("qwen3"):
        sections["mrope_interleaved"] = True
    if ARCHITECTURES[model_type].states:
        sections["partial_rotary_factor"] = 0.25
    if model_type == "glm4v":  # half of a head turns
        sections = {"mrope_section": [pairs // 2 - 2, 1, 1], "partial_rotary_factor": 0.5}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if ARCHITECTURES[model_type].vision:
        return rope | sections
    if model_type == "llama":  # as Llama 3.1 and later
        scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return rope | scaling | {"rope_type": "llama3", "original_max_position_embeddings": 512}
    return rope


def image_processor(model_type: str) -> Any:
    """Return the Pillow image processor with the settings of the real checkpoints, but 64 tokens an image at most."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    has_clips = model_type in ("qwen2_5_vl", "glm4v")
    side = 14 if has_clips else 16
    settings: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    if has_clips:
        settings = {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
    kind: Any = Qwen2VLImageProcessorPil
    pixels = (2 * side) ** 2
    if model_type == "glm4v":  # it counts the pixels of both frames of a patch
        kind = Glm4vImageProcessorPil
        pixels *= 2
    size = {"shortest_edge": 4 * pixels, "longest_edge": 64 * pixels}
    return kind(patch_size=side, merge_size=2, temporal_patch_size=2, size=size, **settings)
