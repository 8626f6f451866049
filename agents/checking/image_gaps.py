"""Measures whether a network sees: a changed image must move the log-probs of the text after it.

The original stream is scored twice, which gives the noise. A network that moves no more than the noise is blind.

Legend: T tokens of a stream, N text tokens after the first image.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from agents.rendering.renderer import Rendered, Renderer
from agents.types import ProcessedImage
from envs.checks import Verdict, fault, ok, warning

#: A changed image must move the text by more than this many nats, and more than this many times the noise.
LEAST_MOVE = 1e-6
NOISE_TIMES = 5.0
#: An image that moves the text by less than this, in nats, hardly matters to the network.
WEAK_MOVE = 1e-3
#: Returns the log-prob, at temperature 1, of each id of a stream but the first: of an engine, a learner, a network.
Score = Callable[[Sequence[int], Sequence[ProcessedImage]], Awaitable[NDArray[np.float32]]]


@dataclass(frozen=True)
class ImageGaps:
    """Mean |d| in nats over the text after the first image: scored again, with changed images, and without images.

    Example: a blind engine has `ImageGaps(noise=0.0, changed=0.0, removed=2.9)`.
    """

    noise: float
    changed: float
    removed: float


async def measure_image_gaps(score: Score, stream: Rendered, renderer: Renderer) -> ImageGaps:
    """Score a stream with its images, again, with changed images and without images."""
    ids_T = np.asarray(stream.ids)
    is_image_T = ids_T == renderer.image_token_id
    places_N = np.flatnonzero(~is_image_T)
    places_N = places_N[places_N > np.argmax(is_image_T)]
    num_images_before_N = np.cumsum(is_image_T)[places_N]
    original_N = (await score(stream.ids, stream.images))[places_N - 1]
    again_N = (await score(stream.ids, stream.images))[places_N - 1]
    changed_N = (await score(stream.ids, changed_images(stream, renderer)))[places_N - 1]
    text_only_T = await score(tuple(ids_T[~is_image_T].tolist()), ())
    removed_N = text_only_T[places_N - num_images_before_N - 1]
    noise, changed, removed = (float(np.abs(original_N - x).mean()) for x in (again_N, changed_N, removed_N))
    return ImageGaps(noise, changed, removed)


def changed_images(stream: Rendered, renderer: Renderer) -> tuple[ProcessedImage, ...]:
    """Return the images of a stream upside down, with inverted colours."""
    assert renderer.images is not None and stream.images, "there must be an image"
    changed = []
    for image in stream.images:
        assert image.resized is not None, "the image is needed to make a changed one"
        turned = ImageOps.invert(image.resized.transpose(Image.Transpose.ROTATE_180))
        changed.append(renderer.images.process(turned))
    return tuple(changed)


def check_image_gaps(gaps: ImageGaps) -> Verdict:
    """Return whether images change the log-probs of the text after them.

    >>> check_image_gaps(ImageGaps(noise=0.0, changed=0.0, removed=0.5)).status
    'fault'
    """
    if not np.isfinite([gaps.noise, gaps.changed, gaps.removed]).all():
        return fault("log-probs after an image are not finite", "look at weights and image preprocessing")
    moved = f"another image moves the text after it by {gaps.changed:.2g} nats, none by {gaps.removed:.2g}"
    found = f"{moved}; noise {gaps.noise:.1g}"
    if gaps.changed <= max(LEAST_MOVE, NOISE_TIMES * gaps.noise):
        return fault(f"blind: {found}", "images do not reach the network: look at the engine's version and arguments")
    if gaps.changed < WEAK_MOVE:
        return warning(found, "images hardly matter to this network: is its vision tower trained?")
    return ok(found)
