"""Sixty-four concurrent episodes of which half go wrong in every way there is: the others do not notice."""

from __future__ import annotations

from collections import Counter

import pytest

from agents.rendering.renderer import Renderer
from agents.types import TrajectoryGroup
from tests.agents.rollout.fault_drill import STEP_TIMEOUT_S, WALL_LIMIT_S, by_fault, drill, said
from tests.trainer.steps import samples_of

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def played(renderer: Renderer) -> tuple[list[TrajectoryGroup], float]:
    return drill(renderer)


Played = tuple[list[TrajectoryGroup], float]


def test_the_step_takes_two_time_limits_and_a_little_not_the_minute_that_seven_sleep(played: Played) -> None:
    assert 2 * STEP_TIMEOUT_S <= played[1] < WALL_LIMIT_S


def test_every_episode_is_counted_with_the_end_that_it_had(played: Played) -> None:
    groups, _ = played
    assert {name: dict(ends) for name, ends in by_fault(groups).items()} == {
        "good": {"completed": 8 + 5 + 6 + 4 + 4 + 4 + 2 * 1},
        "raise": {"env_error": 3},
        "raise in reset": {"env_error": 2 * 8},
        "hang": {"env_timeout": 2},
        "sleep": {"env_timeout": 2 * 7},
        "exit": {"env_error": 2},
        "crash": {"env_error": 2},
        "allocate": {"env_error": 2},
        "header": {"env_error": 2},
        "garbage step": {"env_error": 2},
        "garbage reward": {"env_error": 2},
    }


def test_groups_of_fewer_than_two_valid_episodes_are_played_again_then_dropped(played: Played) -> None:
    groups, _ = played
    assert [len(group.valid) for group in groups] == [8, 5, 6, 4, 4, 4, 1, 0]
    assert [len(group.discarded) for group in groups] == [0, 0, 0, 0, 0, 0, 8, 8]
    assert [group.is_dropped for group in groups] == [False] * 6 + [True] * 2


def test_what_is_trained_on_are_the_valid_episodes_of_the_other_groups(played: Played, renderer: Renderer) -> None:
    samples = samples_of(played[0], renderer.image_token_id, renderer.images.merge_size)
    assert len(samples) == 8 + 5 + 6 + 4 + 4 + 4
    assert {sample.advantage for sample in samples} == {0.0}  # every valid episode earned the same


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "ValueError: boom"),
        ("raise in reset", "OSError: no such machine"),
        ("hang", "step took longer than 2 s"),
        ("exit", "the environment's process ended: exit code 3"),
        ("crash", "the environment's process ended: signal SIGSEGV"),
        ("allocate", "MemoryError"),
        ("header", "must have at most 16000000 pixels"),
        ("garbage step", "step must return (dict, bool, dict), got ('not', 'a', 'step', 1)"),
        ("garbage reward", "reward must be a finite number, got 'much'"),
    ],
)
def test_the_record_says_what_went_wrong(played: Played, fault: str, words: str) -> None:
    assert words in said(played[0], fault)


def test_the_record_has_the_environments_traceback_and_the_turn_that_broke_it(played: Played) -> None:
    broken = played[0][1].trajectories[0]
    assert 'faulty_env.py", line' in (broken.error or "")
    assert [turn.text for turn in broken.turns] == ["raise"]
    assert Counter(broken.mask_T.tolist())[True] == broken.num_model_tokens > 0
