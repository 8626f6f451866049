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
from trainer.batching import collate, filler_row, pack_rows, split_into_microbatches, training_samples
from trainer.types import Row, TrainingSample

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
    rows = pack_rows(samples, max_tokens)
    bins = split_into_microbatches(rows, max_tokens)
    assert sorted(id(s) for chosen in bins for row in chosen for s in row.samples) == sorted(id(s) for s in samples)
    for chosen in bins:
        assert len(chosen) == 1 or len(chosen) * max(row.num_tokens for row in chosen) <= max_tokens
        assert all(len(row.samples) == 1 or row.num_tokens <= max_tokens for row in chosen)
    assert [[id(row) for row in chosen] for chosen in split_into_microbatches(rows, max_tokens)] == [
        [id(row) for row in chosen] for chosen in bins
    ]


@settings(max_examples=50)
@given(groups=random_groups(), max_tokens=st.integers(1, 60))
def test_every_sample_can_be_read_back_from_its_row(groups: list[TrajectoryGroup], max_tokens: int) -> None:
    """Walk from each chosen logit to what it sees: exactly its sample's stream up to there, in its positions."""
    rows = pack_rows(samples_of(*groups), max_tokens)
    if not rows:
        return
    batch = collate(rows, "cpu")
    width = batch.ids_BT.shape[1]
    causal = torch.ones(len(rows), 1, width, width, dtype=torch.bool).tril()
    mask = causal if batch.attention_mask_B1TT is None else batch.attention_mask_B1TT
    places = iter(zip(*(index.tolist() for index in batch.select), batch.targets_N.tolist(), strict=True))
    for index, row in enumerate(rows):
        for sample in row.samples:
            for at in np.flatnonzero(sample.mask_T):
                line, column, target = next(places)
                seen = mask[line, 0, column]
                assert line == index and target == sample.ids_T[at]
                assert batch.ids_BT[line][seen].tolist() == sample.ids_T[:at].tolist()
                assert batch.positions_3BT[:, line][:, seen].tolist() == sample.positions_3T[:, :at].tolist()
    assert next(places, None) is None


def test_a_batch_is_laid_out_as_by_hand() -> None:
    short = trajectory([1, 2, 3], [0, 1, 1], [0, -0.1, -0.2], reward=1.0)
    long = trajectory(
        [4, IMAGE, IMAGE, 5, 6, 7], [0, 0, 0, 1, 0, 1], [0, 0, 0, -0.3, 0, -0.4], [image("a")], reward=0.0
    )
    batch = collate(pack_rows(samples_of(group(short, long)), 100), "cpu")
    assert batch.ids_BT.tolist() == [[1, 2, 3, 0, 0, 0], [4, IMAGE, IMAGE, 5, 6, 7]]
    assert [index.tolist() for index in batch.select] == [[0, 0, 1, 1], [0, 1, 2, 4]]
    assert batch.attention_mask_B1TT is None
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
    alone = [Row((sample,)) for sample in samples_of(group(*streams))]
    batch = collate(alone, "cpu")
    assert batch.vision is not None
    assert batch.vision.pixels_PD.shape == (8, 3)
    assert batch.vision.feature_index_N.tolist() == [0, 1, 0, 1]


def test_samples_of_one_group_become_one_row_with_the_prompt_once() -> None:
    early, late = image("a"), image("b", 2, 2)
    one = trajectory([1, IMAGE, IMAGE, 2, 3], [0, 0, 0, 1, 1], images=[early], reward=0.0)
    two = trajectory([1, IMAGE, IMAGE, 4, IMAGE, 5], [0, 0, 0, 1, 0, 1], images=[early, late], reward=1.0)
    other = trajectory([1, IMAGE, IMAGE, 2], [0, 0, 0, 1], images=[image("c")], reward=1.0)
    rows = pack_rows(samples_of(group(one, two, other)), 100)
    assert [len(row.samples) for row in rows] == [2, 1]  # the same ids before another picture are another prompt
    assert [row.num_tokens for row in rows] == [3 + 2 + 3, 4]
    assert [picture.digest for picture in rows[0].images] == ["a", "b"]
    batch = collate(rows[:1], "cpu")
    assert batch.ids_BT.tolist() == [[1, IMAGE, IMAGE, 2, 3, 4, IMAGE, 5]]
    assert [index.tolist() for index in batch.select] == [[0, 0, 0, 0], [2, 3, 2, 6]]
    assert batch.targets_N.tolist() == [2, 3, 4, 5]
    assert batch.attention_mask_B1TT is not None
    assert batch.attention_mask_B1TT[0, 0, 7].int().tolist() == [1, 1, 1, 0, 0, 1, 1, 1]
    assert batch.vision is not None
    assert batch.vision.feature_index_N.tolist() == [0, 1, 2]


def test_a_row_teaches_when_any_of_its_samples_has_an_advantage() -> None:
    assert not any(row.teaches for row in pack_rows(samples_of(group(trajectory(), trajectory())), 100))
    assert all(row.teaches for row in pack_rows(samples_of(group(trajectory(), trajectory(reward=0.0))), 100))


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
    batch = collate([filler_row(model, with_image)], "cpu")
    assert (batch.vision is not None) is with_image
    assert len(batch.targets_N) == 0
    logits = model(batch.ids_BT, batch.positions_3BT, None, batch.select, batch.vision)
    assert logits.shape == (0, model.config.text_config.vocab_size)
    logits.sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    assert any(".visual.blocks." in name for name in with_gradient) is with_image
