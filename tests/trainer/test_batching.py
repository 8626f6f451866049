"""Claims about batching: weights add up to one, nothing is cut, and every logit stands where its target is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.model import PolicyModel
from agents.positions import mrope_positions
from agents.types import EndReason, ProcessedImage, TrajectoryGroup
from tests.builders import group, trajectory
from trainer.batching import collate, filler_sample, split_into_microbatches, training_samples
from trainer.types import TrainingSample

IMAGE, MERGE = 9, 2


def samples_of(*groups: TrajectoryGroup) -> list[TrainingSample]:
    return training_samples(groups, IMAGE, MERGE, scale_by_std=True)


def image(digest: str, height: int = 2, width: int = 4) -> ProcessedImage:
    return ProcessedImage(digest, np.zeros((height * width, 3), np.float32), (1, height, width), height * width // 4)


masks = st.lists(st.booleans(), min_size=1, max_size=12).map(lambda tail: [0, *map(int, tail)])
endings = st.sampled_from([EndReason.COMPLETED, EndReason.MAX_TURNS, EndReason.ENV_ERROR])


@st.composite
def random_groups(draw: st.DrawFn) -> list[TrajectoryGroup]:
    return [
        group(
            *(
                trajectory(
                    ids=range(10, 10 + len(mask)), mask=mask, reward=draw(st.integers(0, 3)), end_reason=draw(endings)
                )
                for mask in draw(st.lists(masks, min_size=1, max_size=5))
            )
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


@given(groups=random_groups())
def test_the_weights_of_all_model_tokens_sum_to_one(groups: list[TrajectoryGroup]) -> None:
    samples = samples_of(*groups)
    total = sum(s.weight * int(s.mask_T.sum()) for s in samples)
    assert total == pytest.approx(1.0 if samples else 0.0)


@given(groups=random_groups(), max_tokens=st.integers(1, 60))
def test_microbatches_hold_every_sample_once_within_their_bound(groups: list[TrajectoryGroup], max_tokens: int) -> None:
    samples = samples_of(*groups)
    bins = split_into_microbatches(samples, max_tokens)
    assert sorted(id(s) for chosen in bins for s in chosen) == sorted(id(s) for s in samples)
    for chosen in bins:
        assert len(chosen) == 1 or len(chosen) * max(len(s.ids_T) for s in chosen) <= max_tokens
    assert [[id(s) for s in chosen] for chosen in split_into_microbatches(samples, max_tokens)] == [
        [id(s) for s in chosen] for chosen in bins
    ]


@settings(max_examples=50)
@given(groups=random_groups())
def test_the_chosen_logits_predict_the_targets_in_order(groups: list[TrajectoryGroup]) -> None:
    samples = samples_of(*groups)
    if not samples:
        return
    batch = collate(samples, "cpu")
    # A network that predicts for every place the id that follows it there.
    following_BT = torch.roll(batch.ids_BT, -1, dims=1)
    assert following_BT[batch.select_BT].tolist() == batch.targets_N.tolist()
    assert batch.targets_N.tolist() == [int(i) for s in samples for i in s.ids_T[s.mask_T]]


def test_a_batch_is_laid_out_as_by_hand() -> None:
    short = trajectory([1, 2, 3], [0, 1, 1], [0, -0.1, -0.2], reward=1.0)
    long = trajectory(
        [4, IMAGE, IMAGE, 5, 6, 7], [0, 0, 0, 1, 0, 1], [0, 0, 0, -0.3, 0, -0.4], [image("a")], reward=0.0
    )
    samples = samples_of(group(short, long))
    batch = collate(samples, "cpu")
    assert batch.ids_BT.tolist() == [[1, 2, 3, 0, 0, 0], [4, IMAGE, IMAGE, 5, 6, 7]]
    assert batch.select_BT.int().tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0]]
    assert batch.targets_N.tolist() == [2, 3, 5, 7]
    assert batch.rollout_logprobs_N.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    half = 0.5 / (0.5**0.5 + 1e-6)  # rewards 1 and 0: deviation sqrt(1/2)
    assert batch.advantages_N.tolist() == pytest.approx([half, half, -half, -half])
    assert batch.weights_N.tolist() == [0.25] * 4
    assert batch.positions_3BT[:, 0].tolist() == [[0, 1, 2, 0, 0, 0]] * 3
    assert batch.positions_3BT[:, 1].tolist() == mrope_positions(long.ids_T, [(1, 2, 4)], IMAGE, MERGE).tolist()
    assert batch.vision is not None
    assert batch.vision.feature_index_N.tolist() == [0, 1]


def test_samples_of_one_group_share_the_patches_of_their_image() -> None:
    shown = image("a")
    streams = [trajectory([1, IMAGE, IMAGE, 2], [0, 0, 0, 1], images=[shown], reward=r) for r in (0.0, 1.0)]
    batch = collate(samples_of(group(*streams)), "cpu")
    assert batch.vision is not None
    assert batch.vision.pixels_PD.shape == (8, 3)
    assert batch.vision.feature_index_N.tolist() == [0, 1, 0, 1]


def test_a_group_with_equal_rewards_stays_with_no_advantage() -> None:
    samples = samples_of(group(trajectory(), trajectory()), group(trajectory(reward=0.0), trajectory()))
    assert [s.advantage == 0 for s in samples] == [True, True, False, False]
    assert [s.weight for s in samples] == [1 / 8] * 4


def test_a_group_with_one_valid_episode_is_left_out() -> None:
    broken = trajectory(end_reason=EndReason.ENV_TIMEOUT)
    assert samples_of(group(trajectory(), broken)) == []


def test_a_stream_without_model_tokens_counts_in_its_groups_statistics_alone() -> None:
    empty = trajectory([1, 2], [0, 0], reward=0.0, end_reason=EndReason.CONTEXT_FULL)
    samples = training_samples([group(trajectory(reward=1.0), empty)], IMAGE, MERGE, scale_by_std=False)
    assert [(s.advantage, s.weight) for s in samples] == [(0.5, 0.5)]
    assert samples_of(group(empty, empty)) == []


@pytest.mark.parametrize("with_image", [True, False])
def test_a_filler_has_no_token_to_train_on(model: PolicyModel, with_image: bool) -> None:
    batch = collate([filler_sample(model, with_image)], "cpu")
    assert (batch.vision is not None) is with_image
    assert len(batch.targets_N) == 0
    logits = model(batch.ids_BT, batch.positions_3BT, None, batch.select_BT, batch.vision)
    assert logits.shape == (0, model.config.text_config.vocab_size)
    logits.sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    assert any(".visual.blocks." in name for name in with_gradient) is with_image
