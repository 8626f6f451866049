"""Claims about group-relative advantages, held against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.types import EndReason, TrajectoryGroup
from envs.config.plugins import give
from envs.errors import UserError
from tests.builders import group, trajectory
from trainer.algorithms.advantages import ADVANTAGES, compute_advantages, group_advantages, step_advantages
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import training_samples
from trainer.types import TrainingSample


def test_advantages_are_rewards_less_their_mean_over_the_sample_deviation() -> None:
    # mean 1, deviations -1 0 2 -1, variance (1 + 0 + 4 + 1) / 3 = 2
    got = group_advantages([0.0, 1.0, 3.0, 0.0])
    assert got == pytest.approx(np.array([-1.0, 0.0, 2.0, -1.0]) / (2**0.5 + 1e-6), rel=1e-12)


def test_without_the_deviation_they_are_rewards_less_their_mean() -> None:
    assert group_advantages([0.0, 1.0, 3.0, 0.0], scale_by_std=False).tolist() == [-1.0, 0.0, 2.0, -1.0]


@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, 0.0, -1e30, 1e-300])
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, scale_by_std: bool) -> None:
    assert group_advantages([reward] * 8, scale_by_std).tolist() == [0.0] * 8


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_a_group_of_one_or_none_gives_zero(scale_by_std: bool) -> None:
    assert group_advantages([0.7], scale_by_std).tolist() == [0.0]
    assert group_advantages([], scale_by_std).tolist() == []


@given(rewards=st.lists(st.floats(-10, 10).map(lambda r: round(r, 3)), min_size=2, max_size=16), scale=st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float], scale: bool) -> None:
    advantages = group_advantages(rewards, scale)
    assert abs(advantages.sum()) < 1e-9
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()


def test_grpo_takes_each_group_alone_as_the_configuration_says() -> None:
    rewards = [[0.0, 1.0, 3.0, 0.0], [1.0, 1.0], [5.0, 7.0]]
    scaled, plain = (step_advantages(rewards, AlgorithmConfig(scale_by_std=scale)) for scale in (True, False))
    for got, expected in ((scaled, True), (plain, False)):
        assert [a.tolist() for a in got] == [group_advantages(r, expected).tolist() for r in rewards]
    assert plain[0].tolist() == [-1.0, 0.0, 2.0, -1.0]


def test_rloo_takes_off_the_mean_of_the_others() -> None:
    got = step_advantages([[0.0, 1.0, 3.0, 0.0], [2.0, 6.0]], AlgorithmConfig(advantage="rloo"))
    # 0 - 4/3, 1 - 3/3, 3 - 1/3, 0 - 4/3; 2 - 6, 6 - 2
    assert got[0] == pytest.approx([-4 / 3, 0.0, 8 / 3, -4 / 3], abs=1e-15)
    assert got[1] == pytest.approx([-4.0, 4.0])


def test_reinforce_plus_plus_divides_by_the_deviation_over_the_whole_step() -> None:
    rewards = [[0.0, 1.0, 3.0, 0.0], [2.0, 2.0], [1.0, 3.0], [9.0]]
    got = step_advantages(rewards, AlgorithmConfig(advantage="reinforce++"))
    # Less their means: -1 0 2 -1, 0 0, -1 1; a group of one has no say.
    # Variance (1 + 0 + 4 + 1 + 0 + 0 + 1 + 1) / 7 = 8 / 7.
    scale = (8 / 7) ** 0.5 + 1e-6
    assert got[0] == pytest.approx(np.array([-1, 0, 2, -1]) / scale, rel=1e-12)
    assert got[1].tolist() == [0.0, 0.0]
    assert got[2] == pytest.approx(np.array([-1, 1]) / scale, rel=1e-12)


def test_reinforce_plus_plus_of_a_single_pair_divides_by_that_pairs_deviation() -> None:
    (got,) = step_advantages([[0.0, 4.0]], AlgorithmConfig(advantage="reinforce++"))
    assert got == pytest.approx(np.array([-2.0, 2.0]) / (8**0.5 + 1e-6), rel=1e-12)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[[0.9] * 8], [[0.9] * 8, [0.1] * 3, [1 / 3] * 7], [[0.7]], [[]], []])
def test_groups_of_equal_rewards_have_advantages_of_exactly_zero(name: str, rewards: list[list[float]]) -> None:
    got = step_advantages(rewards, AlgorithmConfig(advantage=name))
    assert [a.tolist() for a in got] == [[0.0] * len(r) for r in rewards]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_a_group_of_equal_rewards_stays_at_zero_among_others(name: str) -> None:
    got = step_advantages([[0.9] * 8, [0.0, 1.0], [0.5]], AlgorithmConfig(advantage=name))
    assert got[0].tolist() == [0.0] * 8
    assert got[1][0] == -got[1][1] != 0
    assert got[2].tolist() == [0.0]


@given(
    name=st.sampled_from(sorted(ADVANTAGES)),
    rewards=st.lists(st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=6), max_size=5),
)
def test_every_groups_advantages_sum_to_zero_and_keep_the_order_of_rewards(
    name: str, rewards: list[list[float]]
) -> None:
    for group_rewards, advantages in zip(
        rewards, step_advantages(rewards, AlgorithmConfig(advantage=name)), strict=True
    ):
        assert abs(advantages.sum()) < 1e-9
        assert (np.diff(advantages[np.argsort(group_rewards, kind="stable")]) >= -1e-12).all()


def samples_of(*groups: TrajectoryGroup) -> list[TrainingSample]:
    config = AlgorithmConfig(scale_by_std=False)
    return training_samples(groups, compute_advantages(groups, config), 99, 2, config, max_new_tokens=64)


def test_broken_episodes_are_left_out_of_their_groups_statistics() -> None:
    broken = trajectory(reward=100.0, end_reason=EndReason.ENV_ERROR)
    streams = [trajectory(reward=1.0), broken, trajectory(reward=0.0), trajectory(reward=0.0)]
    samples = samples_of(group(*streams))
    assert [s.advantage for s in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("end_reason", list(EndReason))
def test_only_ends_that_say_something_about_the_policy_are_trained_on(end_reason: EndReason) -> None:
    limits = {EndReason.MAX_TURNS, EndReason.TOKEN_BUDGET, EndReason.CONTEXT_FULL}
    valid = {EndReason.COMPLETED, EndReason.TOOL_FAULT, *limits}
    streams = [trajectory(reward=1.0), trajectory(reward=0.0), trajectory(reward=0.5, end_reason=end_reason)]
    samples = samples_of(group(*streams))
    assert len(samples) == (3 if end_reason in valid else 2)


@pytest.mark.parametrize("value", [1e39, math.nan, -math.inf, "much"])
def test_an_advantage_of_a_users_that_float32_cannot_hold_is_refused(value: object) -> None:
    def own(groups: list[TrajectoryGroup], _: AlgorithmConfig) -> list[list[object]]:
        return [[value for _ in group.valid] for group in groups]

    with pytest.raises(UserError, match=r"over float32|not finite|could not convert"):
        compute_advantages(
            [group(trajectory(reward=1.0), trajectory(reward=0.0))], AlgorithmConfig(advantage=give(own))
        )
