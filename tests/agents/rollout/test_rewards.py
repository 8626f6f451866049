"""Claims about reward functions: coroutines are awaited within a limit, and None leaves a function out of the sum."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from agents.rollout.rewards import NONE_APPLIES, RewardFunction, RewardSum, WeightedReward
from agents.types import EndReason, Trajectory
from envs.spec import EnvLimits
from tests.builders import trajectory


def scored(*functions: RewardFunction, limit_s: float = 20.0) -> Trajectory:
    """Return an episode with the sum of the functions, each with weight 2, as its reward."""
    rewards = RewardSum(tuple(WeightedReward(function.__name__, 2.0, function) for function in functions))
    return asyncio.run(rewards.score(trajectory(), EnvLimits(step_timeout_s=limit_s)))


def half(t: Trajectory) -> float:
    return 0.5


def nothing(t: Trajectory) -> None:
    return None


async def later(t: Trajectory) -> float:
    await asyncio.sleep(0.01)
    return 0.25


async def later_nothing(t: Trajectory) -> None:
    await asyncio.sleep(0.01)


async def hangs(t: Trajectory) -> float:
    await asyncio.sleep(60)
    return 1.0


async def raises(t: Trajectory) -> float:
    raise KeyError("beta")


def test_an_async_reward_is_awaited_and_summed() -> None:
    found = scored(half, later)
    assert found.reward == 1.5 and found.rewards["later"] == 0.25
    assert found.end_reason.is_valid


def test_a_function_that_returns_none_is_left_out_of_the_sum_and_of_the_record() -> None:
    found = scored(half, nothing, later_nothing)
    assert found.reward == 1.0
    assert not {"nothing", "later_nothing"} & found.rewards.keys()


def test_an_episode_to_which_no_function_applies_is_left_out() -> None:
    found = scored(nothing, later_nothing)
    assert found.end_reason is EndReason.REWARD_ERROR
    assert (found.error or "").startswith(NONE_APPLIES)


def test_a_coroutine_that_hangs_ends_the_episode_at_the_limit_of_a_step() -> None:
    began = time.monotonic()
    found = scored(half, hangs, limit_s=0.5)
    assert time.monotonic() - began < 10
    assert found.end_reason is EndReason.REWARD_ERROR
    assert "the reward function hangs took longer than 0.5 s (test_rewards.py:" in (found.error or "")
    assert scored(later).reward == 0.5  # the next call does not wait for it


def test_a_coroutine_that_raises_names_its_line() -> None:
    found = scored(raises)
    assert found.end_reason is EndReason.REWARD_ERROR
    assert "KeyError: 'beta' (test_rewards.py:" in (found.error or "")


def test_rewards_of_turns_that_a_weight_makes_endless_are_a_reward_error_also_where_they_cancel_out() -> None:
    played = trajectory(range(4), (0, 1, 0, 1), reward=0.0)
    turns = tuple(replace(turn, reward=worth) for turn, worth in zip(played.turns, (3e38, -3e38), strict=True))
    rewards = RewardSum((WeightedReward("answer", 1e300),))
    found = asyncio.run(rewards.score(replace(played, turns=turns), EnvLimits()))
    assert found.end_reason is EndReason.REWARD_ERROR and "must be a finite number" in str(found.error)
    assert [turn.reward for turn in found.turns] == [3e38, -3e38]
