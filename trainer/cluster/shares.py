"""A minibatch to the shares of several learner ranks: pure, deterministic, nothing is lost or cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agents.types import ProcessedImage
from trainer.types import Row, TrainingSample

#: Of one rank: its samples of every minibatch of a step.
Share = list[list[TrainingSample]]


def split_samples(samples: Sequence[TrainingSample], num_ranks: int) -> list[list[TrainingSample]]:
    """Return each rank's samples, in their order; a rank gets none where there are fewer prompts than ranks.

    Samples with one prompt stay together, for they share its tokens. The largest prompts are dealt first, each to the
    rank with the fewest tokens, so two ranks differ by no more than the tokens of one prompt with its samples.

    Example: prompts whose samples hold 50, 40, 30 and 20 tokens are for two ranks 50 + 20 and 40 + 30.
    """
    groups: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        shown = tuple(image.digest for image in sample.images[: sample.num_prefix_images])
        groups.setdefault((sample.ids_T[: sample.prefix_length].tobytes(), shown), []).append(index)
    loads, dealt = [0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    sizes = [(Row(tuple(samples[index] for index in group)).num_tokens, group) for group in groups.values()]
    for size, group in sorted(sizes, key=lambda entry: -entry[0]):
        rank = loads.index(min(loads))
        loads[rank] += size
        dealt[rank] += group
    return [[samples[index] for index in sorted(indices)] for indices in dealt]


def shares(minibatches: Sequence[Sequence[TrainingSample]], num_ranks: int) -> list[Share]:
    """Return what each rank is sent of a step: its part of every minibatch, without what only people look at."""
    by_minibatch = [split_samples(minibatch, num_ranks) for minibatch in minibatches]
    return [light([parts[rank] for parts in by_minibatch]) for rank in range(num_ranks)]


def light(share: Share) -> Share:
    """Return the same samples with `light_images`; an image that several show is one object, and travels once."""
    images = {image.digest: image for samples in share for s in samples for image in s.images}
    bare = dict(zip(images, light_images(tuple(images.values())), strict=True))
    return [[replace(s, images=tuple(bare[i.digest] for i in s.images)) for s in samples] for samples in share]


def light_images(images: Sequence[ProcessedImage]) -> tuple[ProcessedImage, ...]:
    """Return images without pictures and PNG files: a learner needs their patches alone."""
    return tuple(replace(image, picture=None) for image in images)
