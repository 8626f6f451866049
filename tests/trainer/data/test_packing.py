"""Claims about batching: weights add up to one, nothing is cut, and every logit stands where its target is."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents.model.architectures import ModelFacts
from agents.model.attention import Segments
from agents.model.mrope import mrope_positions
from agents.model.policy import PolicyModel
from agents.types import EndReason, ProcessedImage, SamplingDistribution, Trajectory, TrajectoryGroup
from tests.budget import examples
from tests.builders import group, trajectory
from tests.trainer import steps
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import balanced_bins, build_minibatches, collate, filler_row, pack_rows, split_evenly
from trainer.types import Row, TrainingSample

IMAGE, MERGE = 9, 2


def samples_of(*groups: TrajectoryGroup, algorithm: AlgorithmConfig = AlgorithmConfig()) -> list[TrainingSample]:
    return steps.samples_of(groups, IMAGE, MERGE, algorithm)


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
    bins = balanced_bins(rows, max_tokens)
    assert sorted(id(s) for chosen in bins for row in chosen for s in row.samples) == sorted(id(s) for s in samples)
    for chosen in bins:
        assert len(chosen) == 1 or sum(row.num_tokens for row in chosen) <= max_tokens
        assert all(len(row.samples) == 1 or row.num_tokens <= max_tokens for row in chosen)
    assert [[id(row) for row in chosen] for chosen in balanced_bins(rows, max_tokens)] == [
        [id(row) for row in chosen] for chosen in bins
    ]


def seen_by(segments: Segments) -> list[list[int]]:
    """Return the packed places that each query sees, by the bounds that varlen attention reads."""
    q_bounds, k_bounds = segments.q_bounds_S.tolist(), segments.k_bounds_S.tolist()
    keys = range(k_bounds[-1]) if segments.keys_K is None else segments.keys_K.tolist()
    seen = []
    for start, end, first, last in zip(q_bounds, q_bounds[1:], k_bounds, k_bounds[1:], strict=False):
        seen += [list(keys[first : last - (end - 1 - query)]) for query in range(start, end)]
    return seen


def test_a_thousand_long_streams_are_packed_at_once() -> None:
    """Rows over half the bound, each of which needs a bin: trying one bin more at a time would take minutes."""
    streams = [trajectory(range(10, 610 + k % 300), [0] + [1] * (599 + k % 300), reward=k % 2) for k in range(1000)]
    rows = [Row((sample,)) for sample in samples_of(group(*streams))]
    started = time.process_time()
    assert len(balanced_bins(rows, 1000)) == 1000
    assert time.process_time() - started < 5


@examples(50)
@given(groups=random_groups(), max_tokens=st.integers(1, 60))
def test_every_sample_can_be_read_back_from_its_row(groups: list[TrajectoryGroup], max_tokens: int) -> None:
    """Walk from each chosen logit to what it sees: exactly its sample's stream up to there, in its positions."""
    rows = pack_rows(samples_of(*groups), max_tokens)
    if not rows:
        return
    batch = collate(rows, IMAGE, "cpu")
    packed, seen = batch.packed, seen_by(batch.packed.segments)
    places = iter(zip(packed.before_N.tolist(), packed.targets_N.tolist(), batch.sample_N.tolist(), strict=True))
    for number, sample in enumerate(batch.samples):
        for at in np.flatnonzero(sample.mask_T):
            before, target, owner = next(places)
            assert (target, owner) == (sample.ids_T[at], number)
            assert packed.ids_T[seen[before]].tolist() == sample.ids_T[:at].tolist()
            assert packed.positions_3T[:, seen[before]].tolist() == sample.positions_3T[:, :at].tolist()
    assert next(places, None) is None


def routed(t: Trajectory, first: int = 0) -> Trajectory:
    """Return a trajectory whose tokens before the last one went to the experts of their ids, in each of two layers."""
    num_read = t.turns[-1].end - 1 if t.turns else 0
    ids_R = (t.ids_T[:num_read] + first).astype(np.uint8)
    return replace(t, routes_RLK=ids_R[:, None, None].repeat(2, 1).repeat(3, 2))


@examples(50)
@given(groups=random_groups(), max_tokens=st.integers(1, 60), data=st.data())
def test_every_packed_token_has_its_own_experts_or_none(
    groups: list[TrajectoryGroup], max_tokens: int, data: st.DataObject
) -> None:
    groups = [
        replace(each, trajectories=tuple(routed(t) if data.draw(st.booleans()) else t for t in each.trajectories))
        for each in groups
    ]
    rows = pack_rows(samples_of(*groups), max_tokens)
    if not rows:
        return
    packed = collate(rows, IMAGE, "cpu").packed
    samples = [sample for row in rows for sample in row.samples]
    if all(sample.routes_RLK is None for sample in samples):
        assert packed.routes_TLK is None
        return
    assert packed.routes_TLK is not None and packed.routes_TLK.shape == (len(packed.ids_T), 2, 3)
    expected = []
    for row in rows:
        for number, sample in enumerate(row.samples):
            own = np.full(len(sample.ids_T), -1)
            if sample.routes_RLK is not None:
                own[: len(sample.routes_RLK)] = sample.ids_T[: len(sample.routes_RLK)]
            expected += own[row.prefix_length if number else 0 :].tolist()
    assert (packed.routes_TLK == packed.routes_TLK[:, :1, :1]).all()
    assert packed.routes_TLK[:, 0, 0].tolist() == expected


def test_a_prompt_is_shared_by_the_samples_whose_prompt_went_to_the_same_experts() -> None:
    streams = [trajectory([1, 2, 3, 4], [0, 0, 1, 1], reward=float(reward)) for reward in range(5)]
    played = [routed(streams[0]), routed(streams[1]), routed(streams[2], first=1), streams[3], streams[4]]
    rows = pack_rows(samples_of(group(*played)), 100)
    assert [[sample.key for sample in row.samples] for row in rows] == [
        [played[0].key, played[1].key],
        [played[2].key],
        [played[3].key, played[4].key],
    ]
    packed = collate(rows[:2], IMAGE, "cpu").packed
    assert packed.ids_T.tolist() == [1, 2, 3, 4, 3, 4, 1, 2, 3, 4]
    assert packed.routes_TLK is not None and packed.routes_TLK.dtype == torch.int16
    assert packed.routes_TLK[:, 1, 2].tolist() == [1, 2, 3, -1, 3, -1, 2, 3, 4, -1]


def test_a_batch_is_laid_out_as_by_hand() -> None:
    short = trajectory([1, 2, 3], [0, 1, 1], [0, -0.1, -0.2], reward=1.0)
    long = trajectory(
        [4, IMAGE, IMAGE, 5, 6, 7], [0, 0, 0, 1, 0, 1], [0, 0, 0, -0.3, 0, -0.4], [image("a")], reward=0.0
    )
    batch = collate(pack_rows(samples_of(group(short, long)), 100), IMAGE, "cpu")
    packed = batch.packed
    assert packed.ids_T.tolist() == [1, 2, 3, 4, IMAGE, IMAGE, 5, 6, 7]
    assert packed.segments.q_bounds_S.tolist() == packed.segments.k_bounds_S.tolist() == [0, 3, 9]
    assert packed.segments.keys_K is None
    assert packed.before_N.tolist() == [0, 1, 5, 7]
    assert packed.targets_N.tolist() == [2, 3, 5, 7]
    assert packed.placeholders_M.tolist() == [4, 5]
    assert batch.sample_N.tolist() == [0, 0, 1, 1]
    assert batch.rollout_logprobs_N.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    half = 0.5 / (0.5**0.5 + 1e-6)  # rewards 1 and 0: deviation sqrt(1/2)
    assert batch.advantages_N.tolist() == pytest.approx([half, half, -half, -half])
    assert batch.weights_N.tolist() == [0.25] * 4
    assert packed.positions_3T[:, :3].tolist() == [[0, 1, 2]] * 3
    assert packed.positions_3T[:, 3:].tolist() == mrope_positions(long.ids_T, [(1, 2, 4)], IMAGE, MERGE).tolist()
    assert packed.vision is not None
    assert packed.vision.feature_index_M.tolist() == [0, 1]


def test_samples_of_one_group_share_the_patches_of_their_image() -> None:
    shown = image("a")
    streams = [trajectory([1, IMAGE, IMAGE, 2], [0, 0, 0, 1], images=[shown], reward=r) for r in (0.0, 1.0)]
    alone = [Row((sample,)) for sample in samples_of(group(*streams))]
    batch = collate(alone, IMAGE, "cpu").packed
    assert batch.vision is not None
    assert batch.vision.pixels_PD.shape == (8, 3)
    assert batch.vision.feature_index_M.tolist() == [0, 1, 0, 1]


def test_samples_of_one_group_become_one_row_with_the_prompt_once() -> None:
    early, late = image("a"), image("b", 2, 2)
    one = trajectory([1, IMAGE, IMAGE, 2, 3], [0, 0, 0, 1, 1], images=[early], reward=0.0)
    two = trajectory([1, IMAGE, IMAGE, 4, IMAGE, 5], [0, 0, 0, 1, 0, 1], images=[early, late], reward=1.0)
    other = trajectory([1, IMAGE, IMAGE, 2], [0, 0, 0, 1], images=[image("c")], reward=1.0)
    rows = pack_rows(samples_of(group(one, two, other)), 100)
    assert [len(row.samples) for row in rows] == [2, 1]  # the same ids before another image are another prompt
    assert [row.num_tokens for row in rows] == [3 + 2 + 3, 4]
    assert [raw_image.digest for raw_image in rows[0].images] == ["a", "b"]
    batch = collate(rows[:1], IMAGE, "cpu").packed
    assert batch.ids_T.tolist() == [1, IMAGE, IMAGE, 2, 3, 4, IMAGE, 5]
    assert batch.segments.q_bounds_S.tolist() == [0, 3, 5, 8]
    assert batch.segments.k_bounds_S.tolist() == [0, 3, 8, 14]
    assert batch.segments.keys_K is not None
    assert batch.segments.keys_K.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert batch.before_N.tolist() == [2, 3, 2, 6]
    assert batch.targets_N.tolist() == [2, 3, 4, 5]
    assert batch.vision is not None
    assert batch.vision.feature_index_M.tolist() == [0, 1, 2]


def test_a_row_has_an_advantage_when_any_of_its_samples_has() -> None:
    assert not any(row.has_advantage for row in pack_rows(samples_of(group(trajectory(), trajectory())), 100))
    assert all(row.has_advantage for row in pack_rows(samples_of(group(trajectory(), trajectory(reward=0.0))), 100))


def test_a_group_with_equal_rewards_stays_with_no_advantage() -> None:
    samples = samples_of(group(trajectory(), trajectory()), group(trajectory(reward=0.0), trajectory()))
    assert [s.advantage == 0 for s in samples] == [True, True, False, False]
    assert [s.weight for s in samples] == [1 / 8] * 4


def test_a_group_with_one_valid_episode_is_left_out() -> None:
    broken = trajectory(end_reason=EndReason.ENV_TIMEOUT)
    assert samples_of(group(trajectory(), broken)) == []
    assert len(samples_of(group(trajectory(), broken), group(trajectory(), trajectory(reward=0.0)))) == 2


def test_a_stream_without_model_tokens_counts_in_its_groups_statistics_alone() -> None:
    empty = trajectory([1, 2], [0, 0], reward=0.0, end_reason=EndReason.CONTEXT_FULL)
    algorithm = AlgorithmConfig(scale_by_std=False)
    samples = samples_of(group(trajectory(reward=1.0), empty), algorithm=algorithm)
    assert [(s.advantage, s.weight) for s in samples] == [(0.5, 0.5)]
    assert samples_of(group(empty, empty)) == []


@pytest.mark.parametrize("with_image", [True, False])
def test_a_filler_has_no_token_to_train_on(model: PolicyModel, with_image: bool) -> None:
    batch = collate([filler_row(model, with_image)], model.image_token_id, "cpu")
    assert (batch.packed.vision is not None) is with_image
    logprobs, entropy = model.token_scores(batch.packed, SamplingDistribution())
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    assert any(".visual.blocks." in name for name in with_gradient) is with_image


def test_truncated_episodes_leave_the_loss_but_not_the_statistics() -> None:
    whole, cut = trajectory(reward=1.0), trajectory(reward=0.0, end_reason=EndReason.TOKEN_BUDGET)
    algorithm = AlgorithmConfig(mask_truncated=True, scale_by_std=False)
    assert [(s.advantage, s.weight) for s in samples_of(group(whole, cut), algorithm=algorithm)] == [(0.5, 0.5)]
    kept = AlgorithmConfig(scale_by_std=False)
    assert [s.advantage for s in samples_of(group(whole, cut), algorithm=kept)] == [0.5, -0.5]


def test_every_sample_of_an_update_weighs_the_same_in_seq_mean() -> None:
    short, long = trajectory([1, 2], [0, 1], reward=1.0), trajectory([1, 2, 3, 4], [0, 1, 1, 1], reward=0.0)
    algorithm = AlgorithmConfig(aggregation="seq-mean-token-mean")
    assert [s.weight for s in samples_of(group(short, long), algorithm=algorithm)] == pytest.approx([1 / 2, 1 / 6])


@given(st.lists(st.integers()), st.integers(1, 9))
def test_minibatches_are_even_and_lose_nothing(items: list[int], parts: int) -> None:
    split = split_evenly(items, parts)
    assert [item for part in split for item in part] == items
    assert len(split) == max(1, min(parts, len(items)))
    assert max(map(len, split)) - min(map(len, split)) <= 1


def test_a_sample_is_its_trajectory_with_turns_positions_and_what_its_prompt_shows() -> None:
    shown, later = image("a"), image("b", 2, 2)
    ids = [1, IMAGE, IMAGE, 2, 3, 4, IMAGE, 5, 6, 7]
    mask = [0, 0, 0, 0, 1, 1, 0, 0, 1, 0]
    t = replace(trajectory(ids, mask, images=[shown, later], reward=1.0), group=3, sample_index=2, attempt=1)
    sample, _ = samples_of(group(t, trajectory(reward=0.0)), algorithm=AlgorithmConfig(scale_by_std=False))
    assert sample.ids_T is t.ids_T and sample.mask_T is t.mask_T and sample.logprobs_T is t.logprobs_T
    assert sample.turns_T.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 2, 0]
    assert sample.positions_3T.tolist() == mrope_positions(t.ids_T, [(1, 2, 4), (1, 2, 2)], IMAGE, MERGE).tolist()
    assert (sample.images, sample.prefix_length, sample.num_prefix_images) == ((shown, later), 4, 1)
    assert (sample.advantage, sample.weight, sample.key) == (0.5, 1 / 5, (3, 2, 1))


@pytest.mark.parametrize(("given_constant", "constant"), [(None, 100), (8, 8)])
def test_the_constant_of_the_loss_is_the_budget_of_tokens_unless_it_is_given(
    given_constant: int | None, constant: int
) -> None:
    algorithm = AlgorithmConfig.model_validate({"aggregation": "constant", "loss_constant": given_constant or 0})
    (sample, _) = samples_of(group(trajectory(), trajectory(reward=0.0)), algorithm=algorithm)
    assert sample.weight == 1 / (2 * constant)


def test_what_is_known_of_a_token_stands_beside_it_in_the_batch() -> None:
    one = trajectory([1, 2, 3, 4, 5], [0, 1, 0, 1, 1], [0, -0.1, 0, -0.2, -0.3], reward=1.0)
    other = trajectory([1, 6], [0, 1], [0, -0.4], reward=0.0)
    far = trajectory([7, 8, 9], [0, 0, 1], [0, 0, -0.5], reward=2.0)
    algorithm = AlgorithmConfig(scale_by_std=False, aggregation="seq-mean-token-mean")
    samples = steps.samples_of([group(one, other), group(far, replace(other, reward=0.0))], 99, MERGE, algorithm)
    batch = collate(pack_rows(samples, 100), 99, "cpu")
    assert [sample.ids_T.tolist() for sample in batch.samples] == [[1, 2, 3, 4, 5], [1, 6], [1, 6], [7, 8, 9]]
    assert batch.turns_N.tolist() == [1, 2, 2, 1, 1, 1]
    assert batch.sample_N.tolist() == [0, 0, 0, 1, 2, 3]
    assert batch.rollout_logprobs_N.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.4, -0.5])
    assert batch.advantages_N.tolist() == [0.5, 0.5, 0.5, -0.5, -1.0, 1.0]
    assert batch.weights_N.tolist() == pytest.approx([1 / 12] * 3 + [1 / 4] * 3)
    # The prompt once, then what each sample adds; a token is predicted where its own stream stood before it.
    assert batch.packed.ids_T.tolist() == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9]
    assert batch.packed.before_N.tolist() == [0, 2, 3, 0, 0, 8]
    assert batch.packed.targets_N.tolist() == [2, 4, 5, 6, 6, 9]


def row_of(num_tokens: int, name: int) -> Row:
    (sample, _) = samples_of(
        group(trajectory([name] * num_tokens, [0] + [1] * (num_tokens - 1)), trajectory(reward=0.0))
    )
    return Row((sample,))


@pytest.mark.parametrize(
    ("sizes", "bins"),
    [
        ([5, 5], [[5, 5]]),  # exactly full
        ([6, 5], [[6], [5]]),
        ([10, 2], [[10], [2]]),  # as long as the bound: alone
        ([11, 2], [[11], [2]]),  # longer: alone all the same
        ([6, 6, 4, 4], [[6, 4], [6, 4]]),
        ([3, 3, 2, 2], [[3, 3, 2, 2]]),
        ([4, 4, 4], [[4, 4], [4]]),
        ([2, 3, 4, 5], [[5, 2], [4, 3]]),  # the longest first, each into the emptiest
        ([], []),
    ],
)
def test_rows_are_put_into_the_fewest_bins_the_longest_first(sizes: list[int], bins: list[list[int]]) -> None:
    found = balanced_bins([row_of(size, 10 + number) for number, size in enumerate(sizes)], 10)
    assert [[row.num_tokens for row in chosen] for chosen in found] == bins


@pytest.mark.parametrize(("most", "rows"), [(100, [3]), (5, [3]), (4, [2, 1]), (3, [1, 1, 1]), (1, [1, 1, 1])])
def test_a_row_takes_samples_up_to_the_bound_and_one_at_least(most: int, rows: list[int]) -> None:
    """A prompt of two tokens, and one token more for each sample."""
    streams = [trajectory([1, 2, token], [0, 0, 1], reward=float(token)) for token in (5, 6, 7)]
    assert [len(row.samples) for row in pack_rows(samples_of(group(*streams)), most)] == rows


def test_samples_that_go_on_after_a_full_row_open_another_with_the_same_prompt() -> None:
    streams = [trajectory([1, 2, token], [0, 0, 1], reward=float(token)) for token in (5, 6, 7, 8)]
    assert [[s.ids_T[-1] for s in row.samples] for row in pack_rows(samples_of(group(*streams)), 4)] == [[5, 6], [7, 8]]


@pytest.mark.parametrize("with_image", [True, False])
def test_a_filler_weighs_nothing_and_shows_one_small_black_image(model: PolicyModel, with_image: bool) -> None:
    (sample,) = filler_row(model, with_image).samples
    assert sample.ids_T.tolist() == [0, model.image_token_id if with_image else 0]
    assert not sample.mask_T.any() and not sample.turns_T.any() and not sample.logprobs_T.any()
    assert (sample.mask_T.dtype, sample.turns_T.dtype, sample.logprobs_T.dtype) == (np.bool_, np.int64, np.float32)
    assert (sample.advantage, sample.weight) == (0.0, 0.0)
    assert (sample.prefix_length, sample.num_prefix_images, len(sample.images)) == (2, with_image, with_image)
    for shown in sample.images:
        assert (shown.grid_thw, shown.num_tokens) == ((1, model.merge_size, model.merge_size), 1)
        assert shown.pixels_PD.dtype == np.float32 and len(shown.pixels_PD) == model.merge_size**2
        assert not shown.pixels_PD.any()


def test_minibatches_are_consecutive_groups_with_their_own_advantages_and_denominators() -> None:
    groups = [group(trajectory(reward=float(n)), trajectory(reward=0.0)) for n in range(1, 4)]
    advantages = [[float(n), -float(n)] for n in range(1, 4)]
    facts = ModelFacts("qwen3_vl", (), IMAGE, MERGE, max_positions=4096)
    parts = build_minibatches(groups, advantages, 2, facts, AlgorithmConfig(), max_new_tokens=64)
    assert [[s.advantage for s in part] for part in parts] == [[1, -1, 2, -2], [3, -3]]
    assert [[s.weight for s in part] for part in parts] == [[1 / 8] * 4, [1 / 4] * 2]
    # Other weights of the loss: the budget of tokens reaches them.
    constant = AlgorithmConfig(aggregation="constant")
    (whole,) = build_minibatches(groups, advantages, 1, facts, constant, max_new_tokens=64)
    assert [s.weight for s in whole] == [1 / (6 * 64)] * 6
