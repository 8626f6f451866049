"""Claims about faults that the model's own action causes: what they are worth; breaking things is no way out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agents.engines.scripted import ScriptedEngine
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.types import EndReason, Trajectory, TrajectoryGroup
from envs.execution.load import load_env
from envs.spec import EnvLimits, EnvSpec
from tests.builders import sampling
from tests.faulty_tools import Plain, Tools
from tests.prompts import sample


def call(deed: str) -> str:
    return f'<tool_call>{{"name": "do", "arguments": {{"deed": "{deed}"}}}}</tool_call>'


def play(renderer: Renderer, env: type, *texts: str, **keys: Any) -> Trajectory:
    """Play an episode in which the model writes `texts`, then "done"."""
    limit_s = 0.5 if "hang" in texts[0] else 30.0
    entry = {"max_turns": 3, "reward_min_val": -1.0, "step_timeout_s": limit_s, **keys}
    spec = EnvSpec(id="x", entry_point=f"tests.faulty_tools:{env.__name__}", description="", **entry)
    engine = ScriptedEngine(renderer.tokenizer, lambda turn, _: (*texts, "done")[turn])
    loop = Episode(engine, renderer, Limits(3, 999, EnvLimits.of(spec), 1), sampling(renderer))
    asked = sample()
    return asyncio.run(loop.run(asked, lambda: load_env(spec)(asked, spec.args()), seed=0))


def outcomes(trajectory: Trajectory) -> list[tuple[str, str]]:
    calls = [each for turn in trajectory.turns for each in turn.info.get("tool_calls", ())]
    return [(each["name"], each["outcome"]) for each in calls]


FAULT, LOWEST = [("do", "tool_fault")], (EndReason.TOOL_FAULT, -1.0)


@pytest.mark.parametrize(
    ("deed", "isolation", "dropped_as"),
    [
        ("raise", "inline", EndReason.ENV_ERROR),
        ("raise", "thread", EndReason.ENV_ERROR),
        ("raise", "process", EndReason.ENV_ERROR),
        ("quit", "thread", EndReason.ENV_ERROR),
        ("quit", "process", EndReason.ENV_ERROR),
        ("hang", "thread", EndReason.ENV_TIMEOUT),
        ("hang", "process", EndReason.ENV_TIMEOUT),
        ("exit", "process", EndReason.ENV_ERROR),
    ],
)
def test_a_tool_that_fails_is_shown_dropped_or_worth_the_lowest_reward_as_the_entry_says(
    renderer: Renderer, deed: str, isolation: str, dropped_as: EndReason
) -> None:
    played = {
        policy: play(renderer, Tools, call(deed), isolation=isolation, on_tool_fault=policy)
        for policy in ("observe", "drop", "reward_min")
    }
    ends = {policy: (t.end_reason, t.reward) for policy, t in played.items()}
    goes_on = deed in ("raise", "quit")  # nothing else leaves an environment that could
    assert ends["observe"] == ((EndReason.COMPLETED, 1.0) if goes_on else LOWEST)
    assert ends["drop"] == (dropped_as, 0.0) and outcomes(played["drop"]) == []
    assert ends["reward_min"] == LOWEST
    assert outcomes(played["observe"]) == FAULT and outcomes(played["reward_min"]) == FAULT
    if goes_on:
        shown = played["observe"].turns[0].observations[0]["content"]
        assert shown == {"raise": "do failed. KeyError: 'raise'", "quit": "do failed. SystemExit: 3"}[deed]
        assert "Traceback" in (played["reward_min"].error or "")


def test_a_model_that_finds_the_argument_which_raises_does_worse_than_one_that_answers(renderer: Renderer) -> None:
    for policy, rewards in (("reward_min", [1.0, -1.0]), ("drop", [1.0])):
        good, hostile = (play(renderer, Tools, call(deed), on_tool_fault=policy) for deed in ("work", "raise"))
        group = TrajectoryGroup("x", (good, hostile))
        assert [t.reward for t in group.valid] == rewards
        assert group.is_dropped == (policy == "drop")


def test_the_lowest_reward_is_kept_where_only_one_of_several_calls_fails(renderer: Renderer) -> None:
    t = play(renderer, Tools, call("work") + call("raise"), on_tool_fault="reward_min")
    assert (t.end_reason, t.reward) == LOWEST
    assert outcomes(t) == [("do", "ok"), ("do", "tool_fault")]


@pytest.mark.parametrize(
    ("deed", "isolation", "dropped_as"),
    [
        ("raise", "inline", EndReason.ENV_ERROR),
        ("raise", "process", EndReason.ENV_ERROR),
        ("hang", "thread", EndReason.ENV_TIMEOUT),
        ("exit", "process", EndReason.ENV_ERROR),
    ],
)
def test_a_step_without_tools_cannot_go_on_and_counts_only_where_the_entry_says_so(
    renderer: Renderer, deed: str, isolation: str, dropped_as: EndReason
) -> None:
    for policy in ("observe", "drop", "reward_min"):
        t = play(renderer, Plain, deed, isolation=isolation, on_tool_fault=policy)
        assert (t.end_reason, t.reward) == (LOWEST if policy == "reward_min" else (dropped_as, 0.0))
        assert outcomes(t) == ([(None, "tool_fault")] if policy == "reward_min" else [])


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("later raise", EndReason.ENV_ERROR),
        ("later hang", EndReason.ENV_TIMEOUT),
        ("done badly", EndReason.ENV_ERROR),
    ],
)
def test_a_fault_outside_of_the_step_is_the_authors_and_never_counts(
    renderer: Renderer, text: str, end: EndReason
) -> None:
    t = play(renderer, Plain, text, on_tool_fault="reward_min")
    assert (t.end_reason, t.reward, t.end_reason.is_valid) == (end, 0.0, False)
