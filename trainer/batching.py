"""Trajectory groups to training samples, those to rows, and rows to micro-batches: pure, deterministic, nothing is cut.

The G samples of a group begin with one prompt, often most of their tokens. They become one row that holds it once; an
attention mask lets each sample see the prompt and itself, and every token keeps its position in its own stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agents.model import PolicyModel, VisionBatch
from agents.positions import mrope_positions, num_images_within
from agents.types import ProcessedImage, Trajectory, TrajectoryGroup
from trainer.advantages import group_advantages
from trainer.types import MicroBatch, Row, TrainingSample


def training_samples(
    groups: Sequence[TrajectoryGroup], image_token_id: int, merge_size: int, scale_by_std: bool
) -> list[TrainingSample]:
    """Return the samples that an optimizer step trains on, weighted by one over the step's model tokens (token-mean).

    Broken episodes are left out of their group's statistics and of the loss; groups with fewer than two valid ones
    teach nothing and are left out whole. A group with equal rewards has advantage 0 and stays: as in GRPO its tokens
    count in the denominator, and in the step's statistics. A stream without model tokens counts in its group's
    statistics alone.
    """
    valid = [group for group in groups if not group.is_dropped]
    total = sum(t.num_model_tokens for group in valid for t in group.valid)
    samples = []
    for group in valid:
        advantages = group_advantages([t.reward for t in group.valid], scale_by_std)
        for trajectory, advantage in zip(group.valid, advantages, strict=True):
            if trajectory.num_model_tokens == 0:
                continue
            grids = [image.grid_thw for image in trajectory.images]
            samples.append(
                TrainingSample(
                    ids_T=trajectory.ids_T,
                    mask_T=trajectory.mask_T,
                    turns_T=_turn_numbers(trajectory),
                    logprobs_T=trajectory.logprobs_T,
                    positions_3T=mrope_positions(trajectory.ids_T, grids, image_token_id, merge_size),
                    images=trajectory.images,
                    prefix_length=trajectory.prompt_length,
                    num_prefix_images=num_images_within(
                        trajectory.ids_T[: trajectory.prompt_length], trajectory.images, image_token_id
                    ),
                    advantage=float(advantage),
                    weight=1.0 / total,
                )
            )
    return samples


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


def split_into_microbatches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Group rows of like length so that their number times the longest stays within `max_tokens`."""
    bins: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.num_tokens):
        if bins and (len(bins[-1]) + 1) * row.num_tokens <= max_tokens:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


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


def collate(rows: Sequence[Row], device: torch.device | str) -> MicroBatch:
    """Pad rows on the right into one micro-batch."""
    width = max(row.num_tokens for row in rows)
    ids_BT = np.zeros((len(rows), width), dtype=np.int64)
    positions_3BT = np.zeros((3, len(rows), width), dtype=np.int64)
    part_BT = np.full(
        (len(rows), width), -1, dtype=np.int64
    )  # 0 the prompt, k the k-th sample's own tokens, -1 padding
    select_row: list[np.ndarray] = []
    select_column: list[np.ndarray] = []
    for index, row in enumerate(rows):
        prefix, end = row.prefix_length, row.prefix_length
        ids_BT[index, :prefix] = row.samples[0].ids_T[:prefix]
        positions_3BT[:, index, :prefix] = row.samples[0].positions_3T[:, :prefix]
        part_BT[index, :prefix] = 0
        for number, sample in enumerate(row.samples, 1):
            assert prefix > 0 and not sample.mask_T[:prefix].any(), "a stream begins with a prompt"
            start, end = end, end + len(sample.ids_T) - prefix
            ids_BT[index, start:end] = sample.ids_T[prefix:]
            positions_3BT[:, index, start:end] = sample.positions_3T[:, prefix:]
            part_BT[index, start:end] = number
            # The logits that predict token t stand at t - 1.
            before = np.flatnonzero(sample.mask_T) - 1
            select_column.append(np.where(before < prefix, before, before - prefix + start))
            select_row.append(np.full(len(before), index))
    samples = [sample for row in rows for sample in row.samples]
    counts = [int(s.mask_T.sum()) for s in samples]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        ids_BT=tensor(ids_BT),
        positions_3BT=tensor(positions_3BT),
        attention_mask_B1TT=None if len(samples) == len(rows) else prefix_mask(tensor(part_BT)),
        select=(tensor(np.concatenate(select_row)), tensor(np.concatenate(select_column))),
        vision=VisionBatch.build([row.images for row in rows], device),
        targets_N=tensor(np.concatenate([s.ids_T[s.mask_T] for s in samples])),
        turns_N=tensor(np.concatenate([s.turns_T[s.mask_T] for s in samples])),
        rollout_logprobs_N=tensor(np.concatenate([s.logprobs_T[s.mask_T] for s in samples])),
        advantages_N=tensor(np.repeat([np.float32(s.advantage) for s in samples], counts)),
        weights_N=tensor(np.repeat([np.float32(s.weight) for s in samples], counts)),
    )


def prefix_mask(part_BT: torch.Tensor) -> torch.Tensor:
    """Return the boolean (B, 1, T, T) mask, True where a token sees another: earlier ones of its part, and of part 0.

    >>> prefix_mask(torch.tensor([[0, 1, 2]])).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]
    """
    seen_B1T, seeing_BT1 = part_BT[:, None, :], part_BT[:, :, None]
    return ((seen_B1T == 0) | (seen_B1T == seeing_BT1)).tril()[:, None]
