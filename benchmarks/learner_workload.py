"""What the benchmark of a training step trains on: network shapes, and seeded samples like those of geo3k.

In: names and a seed. Out: Transformers configurations and `TrainingSample` objects; ids and pixels are random.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from agents.model.architectures import architecture_of
from agents.model.mrope import mrope_positions
from agents.types import ProcessedImage
from trainer.planning.qwen3_vl import QWEN3_VL, qwen3_vl_config
from trainer.types import TrainingSample

#: `NAME@LAYERS` is a network cut to its first layers.
MODELS = ("tiny", "starter", "qwen3.5-2b", *QWEN3_VL)
#: The rotary embedding of Qwen3-VL.
ROPE = {
    "rope_type": "default",
    "rope_theta": 5_000_000.0,
    "mrope_interleaved": True,
    "mrope_section": [24, 20, 20],
}


@dataclass(frozen=True)
class Recipe:
    """The optimizer and the loss of every path: GRPO's clipped ratio, token-mean, AdamW."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28


RECIPE = Recipe()


@dataclass(frozen=True)
class Sizes:
    """How many samples, and how long.

    Responses are log-normal within `shortest` and `longest`, their mean `mean`; a twentieth of each is tool output.
    A prompt has `text` words and so many `images` of a `grid` each.
    """

    problems: int
    group: int
    grid: tuple[int, int, int]
    text: int
    shortest: int
    mean: int
    longest: int
    images: int = 1


#: 110 tokens of image, as a diagram of 352 x 320 pixels has.
GEO3K = Sizes(8, 8, (1, 20, 22), text=150, shortest=150, mean=644, longest=2379)
#: 512 images of 160 x 128 pixels, 20 tokens each, all different.
SMALL_IMAGES = Sizes(512, 1, (1, 8, 10), text=60, shortest=20, mean=80, longest=160)
#: Two streams of 131,072 tokens; 64 images of 512 x 512 pixels are an eighth of each.
LONG = Sizes(2, 1, (1, 32, 32), text=16_384, shortest=98_304, mean=98_304, longest=98_304, images=64)
TINY = Sizes(2, 4, (1, 4, 8), text=8, shortest=8, mean=24, longest=60)
TINY_IMAGES = Sizes(12, 1, (1, 4, 6), text=6, shortest=6, mean=10, longest=20)


def known_model(name: str) -> str:
    """Return the name of a network of `MODELS`; it may be cut, as `30b-a3b@4`. Raises the error of argparse."""
    if name.partition("@")[0] not in MODELS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(MODELS)}, got {name}")
    return name


def shape_config(name: str) -> Any:
    """Return the configuration of a network, its special ids those of the starter's tokenizer."""
    name, _, layers = name.partition("@")
    config = _whole_config(name)
    text = config.get_text_config()
    if layers:
        text.num_hidden_layers = int(layers)
        if kinds := getattr(text, "layer_types", None):
            text.layer_types = kinds[: int(layers)]
    return config


def _whole_config(name: str) -> Any:
    from transformers import AutoTokenizer

    from agents.model import STARTER_PATH
    from starter.architecture import SHAPES, build_config
    from tests.tiny_models import tiny_config

    tokenizer = AutoTokenizer.from_pretrained(STARTER_PATH)
    if name == "tiny":
        return tiny_config("qwen3_vl", tokenizer, tied=True)
    config = build_config(SHAPES["starter"], tokenizer)
    if name == "starter":
        return config
    if name == "qwen3.5-2b":
        large = _qwen3_5_config()
    else:
        large = qwen3_vl_config(name)
        large.text_config.rope_parameters = dict(ROPE)
    for special in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(large, special, getattr(config, special))
    for kept in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"):
        setattr(large.text_config, kept, getattr(config.text_config, kept))
    return large


def _qwen3_5_config() -> Any:
    """Return a configuration of the shape of Qwen3.5-2B: 1.9 G parameters, and a tower of 0.3 G."""
    from transformers import AutoConfig

    rope = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    text = {
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 6144,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "rope_parameters": rope | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        "tie_word_embeddings": True,
    }
    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048}
    return AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=True)


def plain_network(config: Any, device: str, seed: int = 0) -> Any:
    """Return Transformers' own network with seeded fresh weights in float32, made on the device."""
    config = copy.deepcopy(config)  # a network of ours names another attention in its own
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    with torch.device(device):
        return architecture_of(config).build(config)


def to_bfloat16(network: nn.Module) -> None:
    """Make the weights bfloat16, and leave the buffers: rotary frequencies need their float32."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def response_lengths(sizes: Sizes, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the response length of every sample."""
    draw = np.exp(0.6 * rng.standard_normal(sizes.problems * sizes.group))

    def lengths(scale: float) -> NDArray[np.int64]:
        return np.clip(draw * scale, sizes.shortest, sizes.longest).round().astype(np.int64)

    low, high = 0.0, float(sizes.longest)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < sizes.mean else (low, middle)
    return lengths(high)


def make_samples(config: Any, sizes: Sizes, seed: int = 0, shared: bool = True) -> list[TrainingSample]:
    """Return the samples of a step; `shared`: those of a problem begin with one prompt and its image.

    Lengths, turns and advantages are the same in both cases. Log-probs of the rollout are 0 until `with_logprobs`.
    """
    rng = np.random.default_rng(seed)
    lengths = response_lengths(sizes, rng).reshape(sizes.problems, sizes.group)
    turns = rng.integers(2, 4, lengths.shape)
    advantages = rng.standard_normal(lengths.shape)
    if sizes.group > 1:
        advantages -= advantages.mean(1, keepdims=True)
    built = []
    for problem in range(sizes.problems):
        prompt = _prompt(config, sizes, rng, f"image-{problem}")
        for index in range(sizes.group):
            if not shared and index:
                prompt = _prompt(config, sizes, rng, f"image-{problem}-{index}")
            made = _sample(config, prompt, int(lengths[problem, index]), int(turns[problem, index]), rng)
            built.append((made, float(advantages[problem, index])))
    total = sum(int(mask_T.sum()) for (_, mask_T, _, _), _ in built)
    merge = config.vision_config.spatial_merge_size
    return [
        TrainingSample(
            ids_T=ids_T,
            mask_T=mask_T,
            turns_T=turns_T,
            logprobs_T=np.zeros(len(ids_T), dtype=np.float32),
            positions_3T=mrope_positions(ids_T, [image.grid_thw for image in images], config.image_token_id, merge),
            images=images,
            prefix_length=sizes.text + sum(image.num_tokens for image in images),
            num_prefix_images=len(images),
            advantage=advantage,
            weight=1.0 / total,
        )
        for (ids_T, mask_T, turns_T, images), advantage in built
    ]


def _words(config: Any, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return random ids, none of them special."""
    special = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    text = config.text_config
    special += [text.eos_token_id, text.pad_token_id]
    ordinary = np.setdiff1d(np.arange(text.vocab_size), special)
    return rng.choice(ordinary, count)


Prompt = tuple[NDArray[np.int64], tuple[ProcessedImage, ...]]


def _prompt(config: Any, sizes: Sizes, rng: np.random.Generator, name: str) -> Prompt:
    """Return text with the images' placeholders among it, about as much of it before each; and the images."""
    vision = config.vision_config
    time, height, width = sizes.grid
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = time * height * width
    images = tuple(
        ProcessedImage(
            f"{name}-{number}",
            rng.standard_normal((patches, values), dtype=np.float32),
            sizes.grid,
            patches // vision.spatial_merge_size**2,
        )
        for number in range(sizes.images)
    )
    words = _words(config, sizes.text, rng)
    cuts = [sizes.text * (number + 1) // (sizes.images + 2) for number in range(sizes.images)]
    before, *pieces = np.split(words, cuts)
    marks = [np.full(image.num_tokens, config.image_token_id) for image in images]
    return np.concatenate([before, *(part for pair in zip(marks, pieces, strict=True) for part in pair)]), images


def _sample(
    config: Any, prompt: Prompt, length: int, num_turns: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64], tuple[ProcessedImage, ...]]:
    """Return ids, mask and turn numbers of a stream: turns of about one length, tool output between them."""
    prompt_ids, images = prompt
    tool = max(1, round(0.05 * length / (num_turns - 1)))
    turns = np.repeat(np.arange(1, num_turns + 1), np.diff(np.linspace(0, length, num_turns + 1).astype(int)))
    for number in range(2, num_turns + 1):  # each later turn begins with what a tool said
        first = int(np.flatnonzero(turns == number)[0])
        turns[first : first + tool] = 0
    turns_T = np.concatenate([np.zeros(len(prompt_ids), dtype=np.int64), turns])
    ids_T = np.concatenate([prompt_ids, _words(config, length, rng)])
    return ids_T, turns_T > 0, turns_T, images


def real_tokens(samples: Sequence[TrainingSample]) -> int:
    """Return the tokens of all streams, each whole: what throughput is counted in, however a step is computed."""
    return sum(len(sample.ids_T) for sample in samples)
