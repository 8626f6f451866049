"""Splits the samples of a step over the learner ranks. Pure and deterministic; no sample is lost or cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agents.types import ProcessedImage
from trainer.types import Row, TrainingSample

#: The samples of one rank, for every minibatch of a step.
Share = list[list[TrainingSample]]


def split_samples(samples: Sequence[TrainingSample], num_ranks: int) -> list[list[TrainingSample]]:
    """Return each rank's samples, in their order. With fewer prompts than ranks, some ranks get none.

    Samples with the same prompt stay together, because they share its tokens. The largest prompts are dealt first, each
    to the rank with the fewest tokens, so two ranks differ at most by the tokens of one prompt with its samples.

    Example: two ranks share prompts whose samples hold 50, 40, 30 and 20 tokens as 50 + 20 and 40 + 30.
    """
    groups: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt_key, []).append(index)
    loads = [0] * num_ranks
    dealt = [list[int]() for _ in range(num_ranks)]
    sizes = [(Row(tuple(samples[index] for index in group)).num_tokens, group) for group in groups.values()]
    # The largest first, or one of them may come last onto a full rank.
    for size, group in sorted(sizes, key=lambda entry: -entry[0]):
        rank = loads.index(min(loads))
        loads[rank] += size
        dealt[rank] += group
    return [[samples[index] for index in sorted(indices)] for indices in dealt]


def shares(minibatches: Sequence[Sequence[TrainingSample]], num_ranks: int) -> list[Share]:
    """Return what to send to each rank in a step: its part of every minibatch, without the images for people."""
    by_minibatch = [split_samples(minibatch, num_ranks) for minibatch in minibatches]
    return [light([parts[rank] for parts in by_minibatch]) for rank in range(num_ranks)]


def light(share: Share) -> Share:
    """Return the same samples with `light_images`; an image that several samples show is sent once."""
    images = {image.digest: image for samples in share for s in samples for image in s.images}
    bare = dict(zip(images, light_images(tuple(images.values())), strict=True))
    return [[replace(s, images=tuple(bare[i.digest] for i in s.images)) for s in samples] for samples in share]


def light_images(images: Sequence[ProcessedImage]) -> tuple[ProcessedImage, ...]:
    """Return images without their images: a learner needs only the patches."""
    return tuple(replace(image, resized=None) for image in images)
