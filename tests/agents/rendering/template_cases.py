"""Renderers for tests, one for each chat template: the starter's, our own, and Qwen's where they are at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agents.model import STARTER_PATH
from agents.rendering.images import ImageStore
from agents.rendering.renderer import Renderer
from envs.types import Message, message_images
from starter.architecture import build_image_processor
from tests.paths import SHARED

QWEN = SHARED / "qwen_tokenizer"
OWN = Path(__file__).parent / "templates"
#: Special tokens that a template of ours needs beside the starter's; the first is the one that begins a text.
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
OWN_TEMPLATES = ("starter", "chatml", "chatml_thinking", "llama_style", "qwen_xml")
QWEN_TEMPLATES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_training", "qwen2_5", "qwen3")
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


@cache
def renderer_for(name: str, **template_kwargs: Any) -> Renderer:
    """Return the renderer of a template by name; skips the test where the template is not here."""
    store = ImageStore(build_image_processor(), merge_size=2)
    if name in OWN_TEMPLATES:
        tokenizer = starter_tokenizer("" if name == "starter" else name)
        return Renderer(tokenizer, None if name in TEXT_ONLY else store, template_kwargs=template_kwargs)
    template = QWEN / "templates" / f"{name}.jinja"
    if not template.exists():
        pytest.skip("Qwen's tokenizer is not here")
    tokenizer = AutoTokenizer.from_pretrained(QWEN)
    tokenizer.chat_template = template.read_text(encoding="utf-8")
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
