"""Builds what training begins with: tokenizer, image processor settings, network configuration and random weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.model import STARTER_PATH

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Not special: decoding keeps these tokens, as in Qwen's own tokenizer.
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class Shape:
    """Sizes of a small network with a vision tower; `mlp` is that of one expert where there are `experts`."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    head_dim: int
    vision_hidden: int
    vision_layers: int
    vocabulary: int
    model_type: str = "qwen3_vl"
    experts: int = 0
    deepstack: tuple[int, ...] = ()


#: `smoke` only tests that the recipe runs. The last three have 30 to 50 M parameters, and the tower of `starter`.
SHAPES = {
    "starter": Shape(256, 4, 512, 4, 32, vision_hidden=192, vision_layers=6, vocabulary=768, deepstack=(3,)),
    "smoke": Shape(128, 2, 256, 4, 32, vision_hidden=64, vision_layers=2, vocabulary=768, deepstack=(1,)),
    # SGLang reads three DeepStack layers of a Qwen3-VL mixture, whatever its configuration says.
    "mixture": Shape(384, 6, 256, 6, 64, 192, 6, 768, "qwen3_vl_moe", experts=16, deepstack=(1, 3, 5)),
    "states": Shape(384, 8, 2304, 4, 128, 192, 6, 768, "qwen3_5"),
    "states-mixture": Shape(384, 8, 256, 4, 128, 192, 6, 768, "qwen3_5_moe", experts=16),
}
#: What Qwen3.5 has besides: the heads of layers with states, each as wide as in the real networks.
STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
#: The share of a head that Qwen3.5 rotates.
ROTATED = 0.25


def build_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer with single digits and ChatML, tool and vision tokens.

    The returned `PreTrainedTokenizerFast` can encode any text, because every byte is a token.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    split = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL_TOKENS) - len(TOOL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(STARTER_PATH / "chat_template.jinja").read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def build_config(shape: Shape, tokenizer: Any) -> Any:
    """Return the Transformers configuration of a shape, with the special ids of the tokenizer."""
    from transformers import AutoConfig

    def token_id(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    has_states = shape.model_type in ("qwen3_5", "qwen3_5_moe")
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 4096,
        "rope_parameters": _rope(shape, has_states),
        "tie_word_embeddings": True,
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
        "bos_token_id": None,
    }
    if shape.experts:
        text |= {"num_experts": shape.experts, "num_experts_per_tok": 4, "moe_intermediate_size": shape.mlp}
    else:
        text["intermediate_size"] = shape.mlp
    vision: dict[str, Any] = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": 4 * shape.vision_hidden,
        "num_heads": max(1, shape.vision_hidden // 32),
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": shape.hidden,
        "num_position_embeddings": 256,
    }
    if has_states:
        text |= STATES
        if shape.experts:
            text["shared_expert_intermediate_size"] = shape.mlp
    else:
        vision["deepstack_visual_indexes"] = list(shape.deepstack)
    return AutoConfig.for_model(
        shape.model_type,
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def _rope(shape: Shape, has_states: bool) -> dict[str, Any]:
    """Return the rotary embedding: a third of the rotated pairs each for time, height and width."""
    pairs = shape.head_dim // 2
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    if has_states:
        pairs = int(pairs * ROTATED)
        rope["partial_rotary_factor"] = ROTATED
    height_width = pairs // 3
    return rope | {"mrope_section": [pairs - 2 * height_width, height_width, height_width]}


def build_image_processor() -> Any:
    """Return the starter's image processor: 16-pixel patches, 20 tokens for a bundled 160 x 128 diagram, 64 at most."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        size={"shortest_edge": 64 * 64, "longest_edge": 64 * 32 * 32},
    )


def write_parts(folder: Path, tokenizer: Any, config: Any) -> None:
    """Write all files of a checkpoint but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    build_image_processor().save_pretrained(folder)


def write_untrained(folder: Path, shape: Shape, texts: Iterable[str], seed: int) -> None:
    """Write a checkpoint folder with random weights and a tokenizer of these texts."""
    import torch

    from agents.model.policy import PolicyModel

    tokenizer = build_tokenizer(texts, shape.vocabulary)
    torch.manual_seed(seed)
    model = PolicyModel.from_config(build_config(shape, tokenizer))
    write_parts(folder, tokenizer, model.config)
    model.save(folder)


def write_beginner(folder: Path, shape: Shape, seed: int) -> None:
    """Write a checkpoint with the bundled starter's tokenizer, and its vision tower where shapes agree.

    All other weights are random. A tower that reads saves most of the lessons.
    """
    import torch

    from agents.model.policy import PolicyModel
    from agents.rendering.renderer import Renderer

    renderer = Renderer.from_checkpoint(STARTER_PATH)
    torch.manual_seed(seed)
    model = PolicyModel.from_config(build_config(shape, renderer.tokenizer))
    taught = PolicyModel.load(STARTER_PATH).state_dict()
    for name, weight in model.state_dict().items():
        # The mergers of DeepStack belong to other layers there.
        fits = name in taught and taught[name].shape == weight.shape
        if fits and ".visual." in name and ".deepstack" not in name:
            weight.copy_(taught[name])
    model.save(folder, torch.float32)
    renderer.save(folder)
