"""Trajectory groups to training samples, and those to micro-batches: pure, deterministic, nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agents.model import PolicyModel, VisionBatch
from agents.positions import mrope_positions
from agents.types import ProcessedImage, TrajectoryGroup
from trainer.advantages import group_advantages
from trainer.types import MicroBatch, TrainingSample


def training_samples(
    groups: Sequence[TrajectoryGroup], image_token_id: int, merge_size: int, scale_by_std: bool
) -> list[TrainingSample]:
    """Return the samples that an optimizer step trains on, weighted by one over the step's model tokens (token-mean).

    Broken episodes are left out of their group's statistics and of the loss; groups with fewer than two valid ones
    teach nothing and are left out whole. A group with equal rewards has advantage 0 and stays: as in GRPO its tokens
    count in the denominator, and in the step's statistics. A stream without model tokens counts in its group's
    statistics alone.
    """
    valid = [group for group in groups if len(group.valid) >= 2]
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
                    logprobs_T=trajectory.logprobs_T,
                    positions_3T=mrope_positions(trajectory.ids_T, grids, image_token_id, merge_size),
                    images=trajectory.images,
                    advantage=float(advantage),
                    weight=1.0 / total,
                )
            )
    return samples


def split_into_microbatches(samples: Sequence[TrainingSample], max_tokens: int) -> list[list[TrainingSample]]:
    """Group samples of like length so that rows times longest stays within `max_tokens`; a longer one goes alone."""
    bins: list[list[TrainingSample]] = []
    for sample in sorted(samples, key=lambda s: len(s.ids_T)):
        if bins and (len(bins[-1]) + 1) * len(sample.ids_T) <= max_tokens:
            bins[-1].append(sample)
        else:
            bins.append([sample])
    return bins


def filler_sample(model: PolicyModel, with_image: bool) -> TrainingSample:
    """Return a stream of two tokens, none of them the model's: a row that runs the network and adds no gradient.

    `with_image` makes the second token the placeholder of the smallest image there is.
    """
    vision, merge = model.config.vision_config, model.merge_size
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels_PD = np.zeros((merge * merge, patch_values), dtype=np.float32)
    images = (ProcessedImage("filler", pixels_PD, (1, merge, merge), num_tokens=1),) if with_image else ()
    ids_T = np.array([0, model.image_token_id if with_image else 0])
    return TrainingSample(
        ids_T=ids_T,
        mask_T=np.zeros(2, dtype=np.bool_),
        logprobs_T=np.zeros(2, dtype=np.float32),
        positions_3T=mrope_positions(ids_T, [image.grid_thw for image in images], model.image_token_id, merge),
        images=images,
        advantage=0.0,
        weight=0.0,
    )


def collate(samples: Sequence[TrainingSample], device: torch.device | str) -> MicroBatch:
    """Pad samples on the right into one micro-batch.

    The logits that predict token t stand at t - 1, so `select_BT` is each mask moved one place to the left.
    """
    width = max(len(s.ids_T) for s in samples)
    ids_BT = np.zeros((len(samples), width), dtype=np.int64)
    positions_3BT = np.zeros((3, len(samples), width), dtype=np.int64)
    select_BT = np.zeros((len(samples), width), dtype=bool)
    for row, s in enumerate(samples):
        assert not s.mask_T[0], "a stream begins with a prompt"
        ids_BT[row, : len(s.ids_T)] = s.ids_T
        positions_3BT[:, row, : len(s.ids_T)] = s.positions_3T
        select_BT[row, : len(s.ids_T) - 1] = s.mask_T[1:]
    counts = [int(s.mask_T.sum()) for s in samples]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        ids_BT=tensor(ids_BT),
        positions_3BT=tensor(positions_3BT),
        select_BT=tensor(select_BT),
        vision=VisionBatch.build([s.images for s in samples], device),
        targets_N=tensor(np.concatenate([s.ids_T[s.mask_T] for s in samples])),
        rollout_logprobs_N=tensor(np.concatenate([s.logprobs_T[s.mask_T] for s in samples])),
        advantages_N=tensor(np.repeat([np.float32(s.advantage) for s in samples], counts)),
        weights_N=tensor(np.repeat([np.float32(s.weight) for s in samples], counts)),
    )
