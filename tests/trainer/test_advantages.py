"""Claims about group-relative advantages, held against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.types import EndReason
from tests.builders import group, trajectory
from trainer.advantages import group_advantages
from trainer.batching import training_samples


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


def test_broken_episodes_are_left_out_of_their_groups_statistics() -> None:
    broken = trajectory(reward=100.0, end_reason=EndReason.ENV_ERROR)
    streams = [trajectory(reward=1.0), broken, trajectory(reward=0.0), trajectory(reward=0.0)]
    samples = training_samples([group(*streams)], image_token_id=99, merge_size=2, scale_by_std=False)
    assert [s.advantage for s in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("end_reason", list(EndReason))
def test_only_ends_that_say_something_about_the_policy_are_trained_on(end_reason: EndReason) -> None:
    valid = {EndReason.COMPLETED, EndReason.MAX_TURNS, EndReason.TOKEN_BUDGET, EndReason.CONTEXT_FULL}
    streams = [trajectory(reward=1.0), trajectory(reward=0.0), trajectory(reward=0.5, end_reason=end_reason)]
    samples = training_samples([group(*streams)], image_token_id=99, merge_size=2, scale_by_std=True)
    assert len(samples) == (3 if end_reason in valid else 2)
