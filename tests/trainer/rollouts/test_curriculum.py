"""Claims about the pools of a curriculum: what is drawn, what moves a problem, and that a state draws the same."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agents.rollout.groups import StepRollout
from agents.types import EndReason, Trajectory, TrajectoryGroup
from envs.success import Success
from trainer.config.rollout import RolloutConfig
from trainer.rollouts.curriculum import Curriculum

SIZE = 20
NOTHING = np.zeros(0, dtype=np.int64)


def curriculum(state: dict[str, Any] | None = None, size: int = SIZE, **settings: Any) -> Curriculum:
    config = RolloutConfig(curriculum=True, **settings)
    return Curriculum(config, seed=3, size=size, environment=lambda index: "", state=state or {})


def group(number: int, rewards: list[float], end: EndReason = EndReason.COMPLETED) -> TrajectoryGroup:
    trajectories = tuple(
        Trajectory(
            sample_id="x",
            sample_index=copy,
            seed=0,
            ids_T=NOTHING,
            mask_T=NOTHING.astype(bool),
            logprobs_T=NOTHING.astype(np.float32),
            images=(),
            turns=(),
            reward=reward,
            end_reason=end,
            prompt_length=0,
            messages=(),
            group=number,
        )
        for copy, reward in enumerate(rewards)
    )
    return TrajectoryGroup("x", trajectories)


def played(found: Curriculum, first: int, rewards: dict[int, list[float]], count: int) -> list[int]:
    """Draw and play `count` groups from a number on; `rewards` has those of a problem's group. Return the problems."""
    numbers = range(first, first + count)
    indices = [found.draw(number, number % SIZE) for number in numbers]
    groups = tuple(group(number, rewards[index]) for number, index in zip(numbers, indices, strict=True))
    found.update(StepRollout(groups), Success(1.0), in_flight=())
    return indices


REWARDS = {index: [1.0, 1.0] if index < 5 else [0.0, 0.0] if index < 12 else [1.0, 0.0] for index in range(SIZE)}


def test_every_problem_is_played_once_before_any_is_played_again() -> None:
    found = curriculum(curriculum_shares=(0.0, 1.0, 0.0))
    assert sorted(played(found, 0, REWARDS, SIZE)) == list(range(SIZE))
    assert found.sizes() == {"solved": 5, "learnable": 8, "unsolved": 7, "unseen": 0}


def test_shares_say_what_a_step_is_made_of_once_all_is_known() -> None:
    found = curriculum(curriculum_shares=(0.1, 0.7, 0.2))
    played(found, 0, REWARDS, SIZE)
    while found.sizes()["unseen"]:
        played(found, 1000, REWARDS, 1)
    counts: Counter[str] = Counter()
    for number in range(2000, 4000):
        (index,) = played(found, number, REWARDS, 1)
        counts["solved" if index < 5 else "unsolved" if index < 12 else "learnable"] += 1
    assert counts["learnable"] / 2000 == pytest.approx(0.7, abs=0.03)
    assert counts["solved"] / 2000 == pytest.approx(0.1, abs=0.02)


def test_a_problem_moves_with_its_last_group_and_by_the_bounds() -> None:
    found = curriculum(size=1, curriculum_bounds=(0.25, 0.75))
    for number, (rewards, pool) in enumerate(
        [([1, 0, 0, 0], "unsolved"), ([1, 1, 0, 0], "learnable"), ([1, 1, 1, 0], "solved"), ([0, 0], "unsolved")]
    ):
        assert found.draw(number, 0) == 0
        found.update(StepRollout((group(number, [float(r) for r in rewards]),)), Success(1.0), in_flight=())
        assert found.sizes()[pool] == 1, (number, found.sizes())


def test_a_group_without_a_valid_episode_or_that_was_aborted_moves_nothing() -> None:
    found = curriculum()
    found.draw(0, 4)
    found.draw(1, 5)
    broken = group(0, [0.0, 0.0], EndReason.ENV_ERROR)
    found.update(StepRollout((broken,), aborted=(TrajectoryGroup("x", ()),)), Success(1.0), in_flight=())
    assert found.sizes()["unseen"] == SIZE and not found.state()["drawn"]


def test_no_problem_is_in_two_groups_at_once_while_there_are_others() -> None:
    found = curriculum()
    assert len({found.draw(number, 0) for number in range(SIZE)}) == SIZE
    assert found.draw(SIZE, 7) == 7, "all are in flight, so the planned one is played twice"


def test_a_state_that_went_through_json_draws_the_same() -> None:
    one = curriculum()
    played(one, 0, REWARDS, 15)
    in_flight = [one.draw(number, number % SIZE) for number in range(100, 104)]
    two = curriculum(json.loads(json.dumps(one.state())))
    assert [two.draw(number, 0) for number in range(100, 104)] == in_flight
    groups = tuple(group(number, REWARDS[index]) for number, index in zip(range(100, 104), in_flight, strict=True))
    for each in (one, two):
        each.update(StepRollout(groups), Success(1.0), in_flight=())
    assert [one.draw(n, n % SIZE) for n in range(200, 212)] == [two.draw(n, n % SIZE) for n in range(200, 212)]
    assert one.sizes() == two.sizes()


def test_each_environment_of_a_mixture_has_pools_of_its_own() -> None:
    config = RolloutConfig(curriculum=True)
    found = Curriculum(config, 0, SIZE, environment=lambda index: "odd" if index % 2 else "even", state={})
    for number in range(60):
        index = found.draw(number, number % SIZE)
        assert index % 2 == number % 2
        found.update(StepRollout((group(number, REWARDS[index]),)), Success(1.0), in_flight=())


@pytest.mark.parametrize(
    "settings",
    [{"curriculum_shares": (0.5, 0.0, 0.5)}, {"curriculum_bounds": (0.5, 0.5)}, {"sampler": "a:b", "curriculum": True}],
)
def test_settings_that_make_no_pools_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RolloutConfig(**settings)
