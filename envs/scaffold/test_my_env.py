"""Tests of my_env: the checks of envs.check, and claims about this environment."""

from __future__ import annotations

from pathlib import Path

from envs.check import check_env
from envs.execution.load import load_env
from envs.registry import get_spec

SPEC = get_spec("my_env", Path(__file__).with_name("registry.yaml"))
SAMPLE = SPEC.load_dataset("train", size=1, seed=0)[0]
CALL = '<tool_call>{"name": "price", "arguments": {"fruit": "%s"}}</tool_call>'


def test_every_check_of_envs_check_passes() -> None:
    assert [finding for finding in check_env(SPEC, num_samples=4) if finding.passed is False] == []


def test_a_price_is_looked_up_and_an_unknown_fruit_is_explained() -> None:
    env = load_env(SPEC)(SAMPLE, SPEC.args())
    env.reset()
    observation, done, info = env.step(CALL % "apple")
    assert (observation["obs_str"], done, info["tool_calls"][0]["outcome"]) == ("3", False, "ok")
    observation, done, info = env.step(CALL % "table")
    assert observation["obs_str"] == "There is no such fruit. Fruits: apple, pear, plum, melon."
    assert (done, info["tool_calls"][0]["outcome"]) == (False, "tool_error")


def test_the_right_sum_alone_is_rewarded() -> None:
    env = load_env(SPEC)(SAMPLE, SPEC.args())
    env.reset()
    assert env.reward(f"\\boxed{{{SAMPLE.label}}}") == 1.0
    assert env.reward(f"\\boxed{{{SAMPLE.label}0}}") == 0.0
    assert env.reward("That is all.") == 0.0
