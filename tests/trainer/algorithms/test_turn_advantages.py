"""Claims about advantages by turn, held against values worked out by hand and against sums over all outcomes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agents.types import Trajectory
from tests.builders import group, trajectory
from trainer.algorithms.advantages import by_turn, compute_advantages, gigpo, returns_to_go, rloo, state_before
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import training_samples

TURN = AlgorithmConfig(advantage="turn")
PLAIN_GIGPO = AlgorithmConfig(advantage="gigpo", scale_by_std=False, discount=0.5)


def played(*rewards: float, of_text: float = 0.0, states: Sequence[Any] = ()) -> Trajectory:
    """Return an episode with a turn of one token for each reward; `states` are those after its turns."""
    found = trajectory(range(2 * len(rewards) + 1), [0, *([1, 0] * len(rewards))])
    turns = [replace(turn, reward=reward) for turn, reward in zip(found.turns, rewards, strict=True)]
    for number, state in enumerate(states):
        turns[number] = replace(turns[number], info={"state": state})
    return replace(found, turns=tuple(turns), reward=math.fsum([*rewards, of_text]))


def test_rewards_of_the_turns_add_up_to_that_of_the_episode() -> None:
    assert played(0.5, 0.25, of_text=1.0).turn_rewards == (0.5, 1.25)
    assert played().turn_rewards == ()


def test_the_return_of_a_turn_is_its_reward_and_the_discounted_ones_after_it() -> None:
    assert returns_to_go([1.0, 2.0, 4.0], 0.5).tolist() == [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4.0]


def test_the_advantage_of_a_turn_is_its_return_less_the_mean_of_the_other_episodes() -> None:
    # Returns: 3, 2 | 1 | 0, -1, 4. The second has one turn, which stands for its later ones.
    episodes = [played(1.0, 2.0), played(1.0), played(1.0, -5.0, 4.0)]
    returns = [[3.0, 2.0], [1.0], [0.0, -1.0, 4.0]]
    assert [list(returns_to_go(e.turn_rewards, 1.0)) for e in episodes] == returns
    assert by_turn(episodes, TURN) == [
        (3 - (1 + 0) / 2, 2 - (1 + -1) / 2),
        (1 - (3 + 0) / 2,),
        (0 - (3 + 1) / 2, -1 - (2 + 1) / 2, 4 - (2 + 1) / 2),
    ]


@given(
    rewards=st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=5),
    turns=st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
def test_without_rewards_on_the_way_every_turn_has_the_advantage_of_rloo(
    rewards: list[float], turns: list[int]
) -> None:
    episodes = [played(*([0.0] * n), of_text=r) for r, n in zip(rewards, turns, strict=False)]
    expected = rloo([rewards], TURN)[0].tolist()
    for found, advantage, n in zip(by_turn(episodes, TURN), expected, turns, strict=False):
        assert found == pytest.approx((advantage,) * n, abs=1e-12)


def test_equal_returns_have_an_advantage_of_exactly_zero() -> None:
    assert by_turn([played(0.1, 0.9)] * 7, TURN) == [(0.0, 0.0)] * 7
    assert gigpo([played(0.1, 0.9, states=["a"])] * 7, AlgorithmConfig(advantage="gigpo")) == [(0.0, 0.0)] * 7


def test_an_episode_without_a_turn_or_without_a_group_has_no_advantage() -> None:
    assert by_turn([played(1.0, 1.0)], TURN) == [(0.0, 0.0)]
    assert by_turn([played(), played(1.0), played(2.0)], TURN) == [0.0, (-1.0,), (1.0,)]


def test_gigpo_adds_the_advantage_among_turns_from_the_same_state() -> None:
    episodes = [played(0.0, 2.0, states=["door"]), played(1.0, 0.0, 4.0, states=["wall", "door"])]
    # Rewards 2 and 5: -1.5 and 1.5. Returns with discount 1/2: 1, 2 and 2, 2, 4.
    # States before the turns: start, door and start, wall, door. Start: 1 and 2; door: 2 and 4; wall is met once.
    assert gigpo(episodes, PLAIN_GIGPO) == [(-1.5 - 0.5, -1.5 - 1.0), (1.5 + 0.5, 1.5, 1.5 + 1.0)]
    std = 3 / math.sqrt(2) + 1e-6
    scaled = gigpo(episodes, AlgorithmConfig(advantage="gigpo", discount=0.5))
    assert scaled[1][1] == pytest.approx(1.5 / std, rel=1e-12)  # type: ignore[index]
    assert scaled[0][0] == pytest.approx(-1.5 / std - 0.5 / (math.sqrt(0.5) + 1e-6), rel=1e-12)  # type: ignore[index]


def test_states_are_told_apart_by_their_key_or_else_by_text_role_and_pixels() -> None:
    red, other = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")

    def shows(content: Any, role: str = "user", **info: Any) -> str:
        episode = played(0.0, 0.0)
        first = replace(episode.turns[0], observations=({"role": role, "content": content},), info=info)
        return state_before(replace(episode, turns=(first, episode.turns[1])), 1)

    image: list[Any] = [{"type": "image", "image": red}, {"type": "text", "text": "a"}]
    again: list[Any] = [{"type": "image", "image": red.copy()}, {"type": "text", "text": "a"}]
    moved: list[Any] = [{"type": "image", "image": other}, {"type": "text", "text": "a"}]
    assert shows(image) == shows(again)
    keys = [shows(image), shows(moved), shows("a"), shows("b"), shows("a", "tool"), shows("a", state=1)]
    assert len({*keys, shows("a", state="1")}) == 7
    assert shows("a", state=[1, 2]) == shows("b", state=[1, 2])


def test_each_turn_is_trained_with_its_own_advantage() -> None:
    episodes = group(played(1.0, 2.0), played(0.0, 0.0))
    advantages = compute_advantages([episodes], TURN)
    assert advantages == [[(3.0, 2.0), (-3.0, -2.0)]]
    samples = training_samples([episodes], advantages, 99, 2, TURN, max_new_tokens=64)
    assert [s.advantages_N.tolist() for s in samples] == [[3.0, 2.0], [-3.0, -2.0]]


# The gradient in sums over all outcomes -----------------------------------------------------------------------------

#: In its first turn, which earns 1, the policy stops with probability 1 - p. Else its second turn earns 2 with
#: probability q and 0 otherwise. Each outcome: rewards, probability, and d log p of each turn by (logit p, logit q).
P, Q = 0.3, 0.6
OUTCOMES = (
    ((1.0,), 1 - P, ((-P, 0.0),)),
    ((1.0, 2.0), P * Q, ((1 - P, 0.0), (0.0, 1 - Q))),
    ((1.0, 0.0), P * (1 - Q), ((1 - P, 0.0), (0.0, -Q))),
)
#: d E[reward] = d (1 + 2 p q) by the logits.
TRUE = np.array([2 * Q * P * (1 - P), 2 * P * Q * (1 - Q)])


def index_normalised(episodes: Sequence[Trajectory], config: AlgorithmConfig) -> list[Any]:
    """Return the sum of the rewards from a turn on, each less the mean of all rewards of a turn of its number."""
    means = [
        np.mean([episode.turns[k].reward for episode in episodes if len(episode.turns) > k])
        for k in range(max(len(episode.turns) for episode in episodes))
    ]
    centred = [[turn.reward - means[k] for k, turn in enumerate(episode.turns)] for episode in episodes]
    return [tuple(returns_to_go(rewards, 1.0).tolist()) for rewards in centred]


def expected_gradient(advantages_of: Callable[..., list[Any]], group_size: int) -> np.ndarray:
    """Return the mean over all groups of 1/G sum_ik A_ik d log p(turn k), which should be the gradient."""
    total = np.zeros(2)
    for outcomes in itertools.product(OUTCOMES, repeat=group_size):
        probability = math.prod(outcome[1] for outcome in outcomes)
        advantages = advantages_of([played(*outcome[0]) for outcome in outcomes], TURN)
        for (_, _, scores), values in zip(outcomes, advantages, strict=True):
            for score, advantage in zip(scores, values, strict=True):
                total += probability * advantage * np.array(score) / group_size
    return total


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_the_gradient_by_turn_is_the_policys_also_where_the_policy_chooses_when_to_stop(group_size: int) -> None:
    assert expected_gradient(by_turn, group_size) == pytest.approx(TRUE, abs=1e-12)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_a_baseline_for_each_number_of_turn_teaches_nothing_about_stopping(group_size: int) -> None:
    found = expected_gradient(index_normalised, group_size)
    assert found[0] == pytest.approx(0.0, abs=1e-12) and TRUE[0] > 0.25
    assert 0 < found[1] < TRUE[1]
