"""Trajectory groups to training samples, those to rows, and rows to micro-batches: pure, deterministic, nothing is cut.

The G samples of a group begin with one prompt, often most of their tokens. They become one row that holds it once: each
sample's attention sees the prompt and itself, and every token keeps its position in its own stream. Rows stand after
each other in one packed micro-batch, without padding.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from agents.attention import Span, needs_buckets
from agents.model import PolicyModel
from agents.packed import PackedStreams
from agents.positions import mrope_positions, num_images_within
from agents.types import ProcessedImage, Trajectory, TrajectoryGroup
from trainer.advantages import step_advantages
from trainer.aggregation import token_weights
from trainer.config import AlgorithmConfig
from trainer.types import MicroBatch, Row, TrainingSample

T = TypeVar("T")
#: The advantage of every trajectory of every group; None where the episode is broken.
Advantages = Sequence[Sequence[float | None]]


def trajectory_advantages(groups: Sequence[TrajectoryGroup], config: AlgorithmConfig) -> list[list[float | None]]:
    """Return the advantage of each trajectory of each group; None for broken episodes, left out of all statistics."""
    found = step_advantages([[t.reward for t in group.valid] for group in groups], config)
    result: list[list[float | None]] = []
    for group, advantages_G in zip(groups, found, strict=True):
        valid = iter(advantages_G.tolist())
        result.append([next(valid) if t.end_reason.is_valid else None for t in group.trajectories])
    return result


def training_samples(
    groups: Sequence[TrajectoryGroup],
    advantages: Advantages,
    image_token_id: int,
    merge_size: int,
    config: AlgorithmConfig,
    max_new_tokens: int,
) -> list[TrainingSample]:
    """Return the samples of one update, with the weights of its loss.

    Broken episodes are left out; groups with fewer than two valid ones teach nothing and are left out whole. A group
    with equal rewards has advantage 0 and stays: as in GRPO its tokens count in the denominator, and in the step's
    statistics. A stream without model tokens counts in its group's statistics alone, and so, where
    `config.mask_truncated` says so, does one that a limit cut off.
    """
    chosen: list[tuple[Trajectory, float]] = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        if group.is_dropped:
            continue
        for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
            masked = config.mask_truncated and trajectory.end_reason.is_truncated
            if advantage is not None and trajectory.num_model_tokens and not masked:
                chosen.append((trajectory, advantage))
    lengths = [trajectory.num_model_tokens for trajectory, _ in chosen]
    weights_S = token_weights(lengths, config.aggregation, config.loss_constant or max_new_tokens)
    samples = []
    for (trajectory, advantage), weight in zip(chosen, weights_S.tolist(), strict=True):
        grids = [image.grid_thw for image in trajectory.images]
        prompt = trajectory.ids_T[: trajectory.prompt_length]
        samples.append(
            TrainingSample(
                ids_T=trajectory.ids_T,
                mask_T=trajectory.mask_T,
                turns_T=_turn_numbers(trajectory),
                logprobs_T=trajectory.logprobs_T,
                positions_3T=mrope_positions(trajectory.ids_T, grids, image_token_id, merge_size),
                images=trajectory.images,
                prefix_length=trajectory.prompt_length,
                num_prefix_images=num_images_within(prompt, trajectory.images, image_token_id),
                advantage=advantage,
                weight=weight,
                key=trajectory.key,
            )
        )
    return samples


def split_evenly(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return consecutive parts whose sizes differ by one at most; fewer where there are fewer items, one at least.

    >>> split_evenly([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    parts = max(1, min(parts, len(items)))
    bounds = [-(-len(items) * number // parts) for number in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


def _turn_numbers(trajectory: Trajectory) -> np.ndarray:
    """Return the number of the turn of every token, from 1; 0 where the model did not write."""
    turns_T = np.zeros(len(trajectory.ids_T), dtype=np.int64)
    for number, turn in enumerate(trajectory.turns, 1):
        turns_T[turn.start : turn.end] = number
    return turns_T


def pack_rows(samples: Sequence[TrainingSample], max_tokens: int) -> list[Row]:
    """Put samples with one prompt into one row as long as it stays within `max_tokens`; a longer one stands alone."""
    rows: list[list[TrainingSample]] = []
    open_row: dict[object, list[TrainingSample]] = {}
    for sample in samples:
        prefix = sample.ids_T[: sample.prefix_length].tobytes()
        key = (prefix, tuple(image.digest for image in sample.images[: sample.num_prefix_images]))
        row = open_row.get(key)
        if row is None or Row((*row, sample)).num_tokens > max_tokens:
            row = open_row[key] = []
            rows.append(row)
        row.append(sample)
    return [Row(tuple(row)) for row in rows]


def balanced_bins(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Put rows into the fewest bins of at most `max_tokens` that are found, as even as they come.

    Longest first, each into the emptiest of the bins. A row that is longer than `max_tokens` has a bin of its own.
    """
    alone = [[row] for row in rows if row.num_tokens >= max_tokens]
    rest = sorted((row for row in rows if row.num_tokens < max_tokens), key=lambda row: -row.num_tokens)
    sizes = [row.num_tokens for row in rest]
    # No two rows over half the bound share a bin.
    count = max(-(-sum(sizes) // max_tokens), sum(2 * size > max_tokens for size in sizes))
    while rest:
        bins: list[list[Row]] = [[] for _ in range(count)]
        emptiest_first = [(0, index) for index in range(count)]
        for row, size in zip(rest, sizes, strict=True):
            filled, index = emptiest_first[0]
            if filled + size > max_tokens:
                break
            bins[index].append(row)
            heapq.heapreplace(emptiest_first, (filled + size, index))
        else:
            return alone + bins
        count += 1
    return alone


def filler_row(model: PolicyModel, with_image: bool) -> Row:
    """Return a row of two tokens, none of them the model's: it runs the network and adds no gradient.

    `with_image` makes the second token the placeholder of the smallest image there is.
    """
    images = (_smallest_image(model),) if with_image else ()
    ids_T = np.array([0, model.image_token_id if with_image else 0])
    grids = [image.grid_thw for image in images]
    filler = TrainingSample(
        ids_T=ids_T,
        mask_T=np.zeros(2, dtype=np.bool_),
        turns_T=np.zeros(2, dtype=np.int64),
        logprobs_T=np.zeros(2, dtype=np.float32),
        positions_3T=mrope_positions(ids_T, grids, model.image_token_id, model.merge_size),
        images=images,
        prefix_length=2,
        num_prefix_images=len(images),
        advantage=0.0,
        weight=0.0,
    )
    return Row((filler,))


def _smallest_image(model: PolicyModel) -> ProcessedImage:
    """Return a black image of one token."""
    vision, merge = model.config.vision_config, model.merge_size
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels_PD = np.zeros((merge * merge, patch_values), dtype=np.float32)
    return ProcessedImage("filler", pixels_PD, (1, merge, merge), num_tokens=1)


def collate(
    rows: Sequence[Row], image_token_id: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> MicroBatch:
    """Pack rows into one micro-batch, for a network that computes in `dtype`."""
    ids: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    spans: list[Span] = []
    before: list[NDArray[np.int64]] = []
    end = 0
    for row in rows:
        start, prefix, first = end, row.prefix_length, row.samples[0]
        ids.append(first.ids_T[:prefix])
        positions.append(first.positions_3T[:, :prefix])
        end += prefix
        shares = len(row.samples) > 1
        if shares:
            spans.append(Span(start, prefix))
        for sample in row.samples:
            assert prefix > 0 and not sample.mask_T[:prefix].any(), "a stream begins with a prompt"
            own = len(sample.ids_T) - prefix
            spans.append(Span(end, own, start, prefix) if shares else Span(start, prefix + own))
            ids.append(sample.ids_T[prefix:])
            positions.append(sample.positions_3T[:, prefix:])
            # The logits that predict token t stand at t - 1; those of the first own token at the prompt's last.
            before_T = np.flatnonzero(sample.mask_T) - 1
            before.append(np.where(before_T < prefix, before_T + start, before_T - prefix + end))
            end += own
    samples = tuple(sample for row in rows for sample in row.samples)
    counts = [int(s.mask_T.sum()) for s in samples]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatch(
        samples=samples,
        packed=PackedStreams.build(
            ids_T=np.concatenate(ids),
            positions_3T=np.concatenate(positions, axis=1),
            spans=[span for span in spans if span.length],
            images=[row.images for row in rows],
            before_N=np.concatenate(before),
            targets_N=np.concatenate([s.ids_T[s.mask_T] for s in samples]),
            image_token_id=image_token_id,
            device=device,
            with_buckets=needs_buckets(torch.device(device), dtype),
        ),
        sample_N=tensor(np.repeat(np.arange(len(samples)), counts)),
        turns_N=tensor(np.concatenate([s.turns_T[s.mask_T] for s in samples])),
        rollout_logprobs_N=tensor(np.concatenate([s.logprobs_T[s.mask_T] for s in samples])),
        advantages_N=tensor(np.repeat([np.float32(s.advantage) for s in samples], counts)),
        weights_N=tensor(np.repeat([np.float32(s.weight) for s in samples], counts)),
    )
