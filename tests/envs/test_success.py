"""Claims about what makes an episode a success: the entry says it, and one rule decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.errors import UserError
from envs.registry import get_spec
from envs.spec import EnvSpec
from envs.success import Success


def spec_of(**keys: Any) -> EnvSpec:
    return EnvSpec.model_validate({"id": "x", "description": "x", "max_turns": 3, "entry_point": "x:y", **keys})


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({}, Success(1.0)),
        ({"reward_max_val": 2.0}, Success(2.0)),
        ({"success": 0.9}, Success(0.9)),
        ({"success": -3}, Success(-3.0)),
        ({"success": "0.9"}, Success(0.9)),  # as a command line gives it
        ({"success": ""}, Success(1.0)),
        ({"success": "is_success"}, Success(key="is_success")),
        ({"success": "none"}, None),
        ({"success": "None"}, None),
    ],
)
def test_an_entry_says_what_a_success_is(keys: dict[str, Any], rule: Success | None) -> None:
    assert spec_of(**keys).success_rule == rule


@pytest.mark.parametrize("value", [True, float("nan"), "inf", [0.9], 10**400])
def test_what_is_no_reward_key_or_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a reward such as 0\.9, a key of the episode's info, or none"):
        spec_of(success=value)


def test_a_mistaken_success_of_a_registry_file_names_the_file_and_the_rule(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine: {entry_point: a, description: b, max_turns: 1, success: yes}\n")
    with pytest.raises(UserError, match=r"mine\.yaml entry 'mine' success: .*must be a reward such as 0\.9.*got True"):
        get_spec("mine", file)


def test_a_gymnasium_entry_has_a_success_only_if_it_says_so_and_is_played_with_tools() -> None:
    def lake(**keys: Any) -> EnvSpec:
        entry = {"id": "x", "gymnasium": "FrozenLake-v1", "description": "x", "max_turns": 3, **keys}
        return EnvSpec.model_validate(entry)

    assert lake().success_rule is None and lake().tools == "required"
    assert lake(success=0.5).success_rule == Success(0.5)
    assert lake(reward_max_val=2.0).success_rule == Success(2.0)
    assert lake(tools="optional").tools == "optional"
    assert get_spec("frozen_lake").success_rule == Success(1.0)


def test_a_reward_that_float_sums_leave_just_below_the_threshold_is_a_success() -> None:
    assert Success(1.0).holds(0.1 + 0.2 + 0.3 + 0.3 + 0.1 - 1e-12, [])
    assert Success(0.1).holds(1 - 0.9, []) and not Success(0.9).holds(0.88, [])


@pytest.mark.parametrize(
    ("infos", "holds"),
    [
        ([], False),
        ([{}], False),
        ([{"won": True}, {}], True),
        ([{"won": True}, {"won": False}], False),
        ([{"won": 1}], True),
        ([{"won": np.True_}], True),
        ([{"won": np.array([0])}], False),
        ([{"won": np.array([1, 1])}], False),  # neither true nor false
        ([{"won": "False"}], False),
        ([{"won": None}], False),
    ],
)
def test_the_last_info_with_the_key_decides_and_no_value_raises(infos: list[dict[str, Any]], holds: bool) -> None:
    assert Success(key="won").holds(5.0, infos) is holds
