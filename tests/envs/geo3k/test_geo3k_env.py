"""The geometry environment: its observations word by word, its reward, and that no model text can break it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.env import EnvArgs
from envs.errors import UserError
from envs.geo3k.env import SYSTEM_PROMPT, Geo3kEnv, build_env
from envs.types import Sample
from tests.budget import examples

HOW_TO = 'Call {"name": "calc_score", "arguments": {"answer": "..."}}.'
LAST = "Last turn: no more calls, write the final answer as \\boxed{...}."


def geo3k(label: str = "68", max_turns: int = 9) -> Geo3kEnv:
    return Geo3kEnv(Sample(id="a", prompt=(), label=label), EnvArgs(max_turns, tool_calls="last"))


def call(answer: Any, name: str = "calc_score") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'answer': answer}})}</tool_call>"


def shown(env: Geo3kEnv, text: str) -> str:
    observation, done, _ = env.step(text)
    assert not done
    assert env.format_observation(observation) == [{"role": "tool", "content": observation["obs_str"]}]
    return observation["obs_str"]


def test_a_right_answer_scores_1_and_asks_for_the_final_answer() -> None:
    observation, done, info = geo3k().step(call("68"))
    text = "Score 1.0: 68 is right. Write the final answer as \\boxed{68}."
    assert (observation["obs_str"], done) == (text, False)
    made = {"name": "calc_score", "arguments": {"answer": "68"}, "outcome": "ok"}
    assert info == {"tool_calls": [made], "tool_score": 1.0}


def test_the_warning_comes_when_exactly_one_model_turn_is_left() -> None:
    env = geo3k(max_turns=3)
    assert shown(env, call("70")) == "Score 0.0: 70 is wrong. Try another way."
    assert shown(env, call("71")) == f"Score 0.0: 71 is wrong. {LAST}"
    assert shown(env, call("72")) == "Score 0.0: 72 is wrong. Try another way."
    env.reset()
    assert shown(env, call("70")) == "Score 0.0: 70 is wrong. Try another way."
    assert shown(env, "<tool_call>") == f"The call is empty. {LAST}"


def test_a_turn_without_a_call_ends_the_episode_without_an_observation() -> None:
    assert geo3k().step("It is \\boxed{68}.") == ({}, True, {"tool_calls": []})


@pytest.mark.parametrize(
    ("text", "outcome", "finding"),
    [
        ("<tool_call>{</tool_call>", "malformed", "The JSON ends too early."),
        ("<tool_call>calc_score(68)</tool_call>", "malformed", "Bad JSON: Expecting value."),
        ('<tool_call>{"function":"calc_score"}</tool_call>', "malformed", '"name" is missing.'),
        ('<tool_call>{"name":5}</tool_call>', "malformed", '"name" must be a string.'),
        (call("68", name="multiply"), "unknown_tool", "Unknown tool."),
        (call("68", name="calc_scores"), "unknown_tool", "Unknown tool. Did you mean 'calc_score'?"),
        ('{"name": "calc_score", "arguments": {}}', "bad_arguments", '"answer" is missing.'),
        (call(""), "bad_arguments", '"answer" must not be empty.'),
        (call(" \n"), "bad_arguments", '"answer" must not be empty.'),
        (call(None), "bad_arguments", '"answer" must be a valid string.'),
        (call(True), "bad_arguments", '"answer" must be a valid string.'),
        (call(["68"]), "bad_arguments", '"answer" must be a valid string.'),
        (call({"value": "68"}), "bad_arguments", '"answer" must be a valid string.'),
    ],
)
def test_a_call_that_cannot_be_made_is_told_how_to_call(text: str, outcome: str, finding: str) -> None:
    observation, done, info = geo3k().step(text)
    assert observation["obs_str"] == f"{finding} {HOW_TO}"
    assert (done, info["tool_calls"][-1]["outcome"], "tool_score" in info) == (False, outcome, False)


@pytest.mark.parametrize(
    "text",
    [
        call("68", name="calc_geo3k_reward"),
        call(68),
        call(68.0),
        call("\\boxed{68}"),
        call("x = 68^\\circ"),
        '<tool_call>{"name": "calc_score", "arguments": {"answer": "\\frac{136}{2}"}}</tool_call>',
        '<tool_call>{"name": "calc_score", "arguments": {"answer": "\\sqrt{4624}"}}</tool_call>',
    ],
)
def test_the_same_answer_in_another_spelling_scores_1(text: str) -> None:
    assert geo3k().step(text)[2]["tool_score"] == 1.0


def test_the_echo_is_short_one_line_and_spells_no_special_token() -> None:
    env = geo3k()
    assert shown(env, call("9" * 500)) == f"Score 0.0: {'9' * 64}... is wrong. Try another way."
    assert shown(env, call("a\n\x00b")) == "Score 0.0: a b is wrong. Try another way."
    assert shown(env, call("<|image_pad|></tool_call>\ud800")) == (
        "Score 0.0: < |image_pad|>< /tool_call>\ufffd is wrong. Try another way."
    )


def test_no_observation_holds_the_label_unless_the_model_wrote_it() -> None:
    for text in (call("70"), call([]), call("x", name="f"), "<tool_call>", "<tool_call>{}"):
        assert "8191" not in shown(geo3k("8191", max_turns=2), text)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("\\boxed{68}", 1.0),
        ("Answer: 68", 1.0),
        ("68", 0.0),
        ("", 0.0),
        ("\\boxed{68} no, \\boxed{70}", 0.0),
        (call("68"), 0.0),
        (call("\\boxed{68}"), 0.0),
        ('{"name": "calc_score", "arguments": {"answer": "\\\\boxed{68}"}}', 0.0),
        ("<tool_call>\\boxed{68}", 0.0),
        (f"Answer: 68 {call('68')}", 0.0),
        (f"\\boxed{{68}} {call('70')}", 1.0),
        (f"{call('70')} \\boxed{{68}}", 1.0),
        (f"\\boxed{{68}} {call('68')} \\boxed{{70}}", 0.0),
    ],
)
def test_the_reward_is_the_grade_of_what_the_last_text_states_outside_a_call(text: str, reward: float) -> None:
    assert geo3k().reward(text) == reward


def test_build_env_takes_the_turn_limit_from_args() -> None:
    sample = Sample(id="a", prompt=(), label="68")
    env = build_env(sample, EnvArgs(max_turns=2), unused=1)
    assert env.reset() == ({}, {})
    assert env.step(call("70"))[0]["obs_str"] == f"Score 0.0: 70 is wrong. {LAST}"
    assert build_env(sample).step(call("70"))[0]["obs_str"] == "Score 0.0: 70 is wrong. Try another way."


def test_a_sample_without_an_answer_is_a_user_error() -> None:
    for label in (None, " "):
        with pytest.raises(UserError, match="answer: sample 'row-7' needs a gold answer"):
            build_env(Sample(id="row-7", prompt=(), label=label))
    with pytest.raises(UserError, match="sample: is required"):
        build_env()


def test_the_text_the_model_always_sees_is_short() -> None:
    assert len(SYSTEM_PROMPT) < 100
    assert len(json.dumps(geo3k().tools)) < 250


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        '"name"',
        '"arguments"',
        '"answer"',
        "\\boxed{",
        "Answer:",
        call("68"),
        call("9^{9^{9}}"),
        call([1]),
        '{"name":"calc_score","arguments":{"answer":',
        "\ud800",
        "<|im_end|>",
    ]
)


@examples(500)
@given(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=20).map("".join))
def test_no_text_makes_the_environment_raise(text: str) -> None:
    env = geo3k("8 \\sqrt { 2 }", max_turns=2)
    observation, done, info = env.step(text)
    assert done == (info["tool_calls"] == []) == (observation == {})
    assert len(observation.get("obs_str", "")) < 500
    observation.get("obs_str", "").encode()
    assert env.reward(text) in (0.0, 1.0)


@examples(300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_json_value_as_the_answer_is_answered(answer: object) -> None:
    observation, done, info = geo3k().step(call(answer))
    assert not done
    assert observation["obs_str"]
    assert info["tool_calls"][-1]["outcome"] in ("ok", "bad_arguments", "malformed")


@pytest.mark.alone
@pytest.mark.parametrize(
    "unit", ["9", "\\boxed{", "<tool_call>", '<tool_call>{"name":"calc_score","arguments":{"answer":"', "{", "Answer:"]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_megabyte_is_answered_quickly(unit: str, wrapped: bool) -> None:
    text = unit * (1_000_000 // len(unit))
    text = call(text) if wrapped else text
    env = geo3k()
    start = time.perf_counter()
    env.step(text)
    env.reward(text)
    assert time.perf_counter() - start < 3.0
