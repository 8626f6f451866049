"""Images, prompts and samples that tests of all packages share. Needs no torch."""

from __future__ import annotations

import numpy as np
from PIL import Image

from envs.types import Sample


def make_image(width: int = 64, height: int = 64, seed: int = 0) -> Image.Image:
    """Return an image of random pixels; its sides are multiples of 32, so each 32 x 32 square is one token."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def question(text: str, *images: Image.Image) -> tuple[dict, ...]:
    """Return a one-message prompt that shows images, then text."""
    parts = [{"type": "image", "image": image} for image in images]
    return ({"role": "user", "content": [*parts, {"type": "text", "text": text}]},)


def sample(text: str = "Find x.", *images: Image.Image, id: str = "sample") -> Sample:
    return Sample(id=id, prompt=question(text, *images), label="5")
