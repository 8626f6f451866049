"""Renderers for tests, one for each chat template: the starter's, our own, and Qwen's as they are published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer, Qwen2Tokenizer

from agents.model import STARTER_PATH
from agents.rendering.images import ImageStore
from agents.rendering.renderer import Renderer
from envs.types import Message, message_images
from starter.architecture import build_image_processor
from tests.paths import published_template

OWN = Path(__file__).parent / "templates"
#: Special tokens that a template of ours needs beside the starter's; the first is the one that begins a text.
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
OWN_TEMPLATES = ("starter", "chatml", "chatml_thinking", "llama_style", "qwen_xml")
#: Qwen's tokens for control, and the words that are tokens of their own but can be written in any text.
QWEN_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
QWEN_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
#: Merges across the borders of a template's own text and a message's, of which Qwen's vocabulary has many.
BORDER_MERGES = (("Ċ", "Ċ"), (">", "Ċ"), (".", "Ċ"), ("}", "Ċ"), ('"', ":"), ("<", "/"), ("{", '"'))
QWEN_TEMPLATES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_training", "qwen2_5", "qwen3", "qwen3_5_think")
#: Templates that write an earlier turn otherwise than the model wrote it: without its thought, or with an empty one.
REWRITING = ("chatml_thinking", "qwen3_5_think")
#: Templates of language models, which show no images.
TEXT_ONLY = ("chatml", "llama_style", "qwen2_5", "qwen3")


def starter_tokenizer(name: str = "") -> Any:
    """Return the starter's tokenizer with the tokens and the text of one of our templates."""
    tokenizer = AutoTokenizer.from_pretrained(STARTER_PATH)
    if name == "llama_style":
        tokenizer.add_special_tokens({"additional_special_tokens": list(LLAMA_TOKENS)})
        tokenizer.bos_token, tokenizer.eos_token = LLAMA_TOKENS[0], LLAMA_TOKENS[-1]
    if name == "chatml_thinking":
        tokenizer.add_tokens(["<think>", "</think>"])
    if name:
        tokenizer.chat_template = (OWN / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer that cuts texts as Qwen's does, with its tokens for control and few of its words."""
    bpe = json.loads((STARTER_PATH / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    merges = [tuple(pair) for pair in bpe["merges"]]
    merges += [pair for pair in BORDER_MERGES if pair not in merges]
    words = dict.fromkeys([*bpe["vocab"], *("".join(pair) for pair in merges)])
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Qwen2Tokenizer(vocab, merges, eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken(token, special=True) for token in QWEN_TOKENS])
    tokenizer.add_tokens([AddedToken(word, special=False) for word in QWEN_WORDS])
    return tokenizer


@cache
def renderer_for(name: str, **template_kwargs: Any) -> Renderer:
    """Return the renderer of a template by name."""
    store = ImageStore(build_image_processor(), merge_size=2)
    if name in OWN_TEMPLATES:
        tokenizer = starter_tokenizer("" if name == "starter" else name)
        return Renderer(tokenizer, None if name in TEXT_ONLY else store, template_kwargs=template_kwargs)
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = published_template(name)
    return Renderer(tokenizer, store, template_kwargs=template_kwargs)


def whole_ids(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    num_prompt: int | None = None,
) -> tuple[int, ...]:
    """Return the ids of a whole conversation: the text of `Renderer.text` tokenised at once, images expanded."""
    images = [renderer.images.process(image) for image in message_images(messages)] if renderer.images else []
    return tuple(renderer.expand(renderer.encoder.encode(renderer.text(messages, tools, num_prompt)), images))
