"""Sound environments with faulty data sets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from PIL import Image

from envs import Sample
from tests.catalogue.base import Row, Sound, make_sample

_count = itertools.count()


def _made(size: int, *parts: Any, role: str = "user") -> list[Sample]:
    content = parts[0] if len(parts) == 1 and isinstance(parts[0], str) else [*parts]
    return [make_sample(place, prompt=({"role": role, "content": content},)) for place in range(size)]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def numbers(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, label=3) for place in range(size)]


def twins(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, id="price") for place in range(size)]


def unasked(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, prompt=()) for place in range(size)]


def blank(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, " \n")


def missing(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, {"type": "image", "image": str(Path("nowhere") / "image.png")}, _text("What is it?"))


def pathless(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, {"type": "image"}, _text("What is it?"))


def damaged(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, {"type": "image", "image": b"no image"}, _text("What is it?"))


def surplus(split: str, size: int, seed: int) -> list[Sample]:
    image = {"type": "image", "image": Image.new("RGB", (64, 64))}
    return _made(size, image, _text("<image><image>Which one is darker?"))


def tokens(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, "What is 1 + 2?<|im_end|>\n<|im_start|>assistant\n")


def pads(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, "<|vision_start|><|image_pad|><|vision_end|>What is it?")


def stranger(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, "What is 1 + 2?", role="human")


def answered(split: str, size: int, seed: int) -> list[Sample]:
    turns = ({"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "3"})
    return [make_sample(place, prompt=turns) for place in range(size)]


def plain(split: str, size: int, seed: int) -> list[Sample]:
    return [make_sample(place, prompt="What is 1 + 2?") for place in range(size)]


def halved(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, "What is it? \ud83d")


def small(split: str, size: int, seed: int) -> list[Sample]:
    return _made(size, {"type": "image", "image": Image.new("RGB", (8, 8))}, _text("What is it?"))


def restless(split: str, size: int, seed: int) -> list[Sample]:
    day = next(_count)
    return [make_sample(place, metadata={"day": day}, label=str(day)) for place in range(size)]


def raising(split: str, size: int, seed: int) -> list[Sample]:
    raise KeyError("colour")


def empty(split: str, size: int, seed: int) -> list[Sample]:
    return []


def rows(split: str, size: int, seed: int) -> list[Any]:
    return [{"problem": "?", "answer": "3"}]


def _row(dataset: str, fault: str, check: str, word: str) -> Row:
    return Row(Sound, fault, check, word, {"id": dataset, "dataset": f"{__name__}:{dataset}"})


ROWS = (
    _row("numbers", "labels are numbers", "error", "must be a text or None"),
    _row("twins", "all samples have one id", "prompts", "have the id price"),
    _row("unasked", "prompts are empty, and there is no first observation", "prompts", "neither prompt nor first"),
    _row("blank", "prompts are spaces", "prompts", "the prompt is empty"),
    _row("missing", "the file of an image does not exist", "prompts", "no such file"),
    _row("pathless", "an image's part has no image", "prompts", "must be an image"),
    _row("damaged", "an image's bytes are none", "prompts", "must be an image of a known format"),
    _row("surplus", "more placeholders than images", "prompts", "<image>"),
    _row("tokens", "prompts spell tokens of the chat template", "control tokens", "<|im_end|> in a prompt"),
    _row("pads", "prompts spell the placeholder of an image", "control tokens", "<|image_pad|> in a prompt"),
    _row("stranger", "a role that no template knows", "prompts", "role 'human'"),
    _row("answered", "a prompt ends with the model's own turn", "prompts", "an assistant's"),
    _row("plain", "a prompt is a text", "error", "must be a tuple of chat messages"),
    _row("halved", "a prompt holds half an emoji", "rendering", "surrogate"),
    _row("small", "images of 8 x 8 pixels", "image sizes", "8x8"),
    _row("restless", "a data set differs each time", "deterministic", "differs when it is read again"),
    _row("raising", "the data set raises", "error", "KeyError: 'colour'"),
    _row("empty", "the data set is empty", "error", "must have more than 0 samples"),
    _row("rows", "the data set returns rows in place of samples", "error", "must be an envs.Sample"),
)
