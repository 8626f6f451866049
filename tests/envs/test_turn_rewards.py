"""Claims about rewards by turn: every way of playing an episode adds them up alike, and names what is none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest

import trueturn as tt
from envs.as_gymnasium import TrueTurnEnv
from envs.contract import EnvFault
from envs.env import Env, EnvArgs
from envs.execution.runner import EnvRunner
from envs.spec import EnvLimits
from envs.tool_env import ToolEnv
from envs.tools import tool
from envs.types import Sample

SAMPLE = Sample("s", ({"role": "user", "content": "Walk."},))


class Walk(Env):
    """A turn earns what its text says, as a Python expression; "nothing" earns nothing."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        earned = {} if response_text == "nothing" else {"reward": eval(response_text)}
        return {"obs_str": "on"}, False, earned


class Graded(Walk):
    def reward(self, final_text: str) -> float:
        return 10.0


class Bare:
    """Leaves `reward` out altogether."""

    tools = ()
    reset, step, format_observation = Walk.reset, Walk.step, Walk.format_observation

    def close(self) -> None:
        pass


def play(env: Any, *texts: str) -> tuple[list[float], float]:
    """Return the reward of each turn and of the episode."""

    async def story() -> tuple[list[float], float]:
        runner = EnvRunner(lambda: env, EnvLimits(inline=True))
        await runner.open()
        rewards = [(await runner.step(text)).reward for text in texts]
        return rewards, await runner.reward(texts[-1] if texts else "")

    return asyncio.run(story())


def test_the_reward_of_an_episode_is_the_sum_of_its_turns_and_its_last_text() -> None:
    assert play(Graded(), "0.5", "nothing", "-2") == ([0.5, 0.0, -2.0], 8.5)
    assert play(Walk(), "0.1", "0.2") == ([0.1, 0.2], pytest.approx(0.3))
    assert play(Bare(), "1", "2") == ([1.0, 2.0], 3.0)
    assert play(Walk()) == ([], 0.0)


def test_reward_may_be_left_out_only_where_every_step_gives_one() -> None:
    for env in (Walk(), Bare()):
        with pytest.raises(EnvFault, match=r"got None; does it return\? It may be left out only where every step"):
            play(env, "1", "nothing")


@pytest.mark.parametrize("value", ["None", "True", "'1'", "float('nan')", "10**400", "[1]"])
def test_a_reward_of_a_turn_that_is_no_finite_number_is_a_fault_with_its_place(value: str) -> None:
    with pytest.raises(EnvFault, match=r"^info\['reward'\] must be a finite number"):
        play(Graded(), value)


def test_a_sum_beyond_float32_is_a_fault() -> None:
    with pytest.raises(EnvFault, match="the sum of all rewards must be a finite number within"):
        play(Walk(), "3e38", "3e38")


def test_a_narrow_float_counts_as_its_shortest_decimal() -> None:
    class Narrow(Walk):
        def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
            return {}, True, {"reward": np.float32(0.9)}

    assert play(Narrow(), "x") == ([0.9], 0.9)


class Shop(ToolEnv):
    @tool
    def buy(self, price: int) -> str:
        """Buy something.

        Args:
            price: what it costs
        """
        self.info["reward"] = 1.0 / price
        return "bought"


CALL = '<tool_call>{"name": "buy", "arguments": {"price": 4}}</tool_call>'


def test_a_tool_gives_its_turn_a_reward_and_a_sample_without_a_label_has_no_other() -> None:
    assert play(Shop(SAMPLE, EnvArgs(max_turns=3)), CALL, CALL) == ([0.25, 0.25], 0.5)
    with pytest.raises(EnvFault, match="sample 's' has no label"):
        play(Shop(SAMPLE, EnvArgs(max_turns=3)), "nothing bought")


def test_gymnasium_gets_the_reward_of_each_turn_and_at_the_end_that_of_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envs.as_gymnasium.load_env", lambda spec: lambda sample, args: Graded())
    env = TrueTurnEnv("guess", samples=[SAMPLE], max_turns=3)
    for _ in range(2):
        env.reset(seed=0)
        assert [env.step(text)[1] for text in ("1", "nothing", "0.5")] == [1.0, 0.0, 10.5]


def test_a_gymnasium_environment_gives_its_rewards_turn_by_turn() -> None:
    class Paid(gymnasium.Env[Any, Any]):
        action_space = gymnasium.spaces.Discrete(2)
        observation_space = gymnasium.spaces.Discrete(9)
        taken = 0

        def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[int, dict]:
            self.taken = 0
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
            self.taken += 1
            return self.taken, 0.25 * self.taken, self.taken == 3, False, {}

    gymnasium.register("turns/Paid-v0", Paid, max_episode_steps=9)
    from envs.from_gymnasium import FromGymnasium

    env = FromGymnasium(SAMPLE, EnvArgs(max_turns=9, options={"id": "turns/Paid-v0"}))
    act = '<tool_call>{"name": "act", "arguments": {"action": 1}}</tool_call>'
    assert play(env, act, "no call", act, act) == ([0.25, 0.0, 0.5, 0.75], 1.5)


def test_an_environment_that_is_played_by_hand_adds_them_up_too() -> None:
    env = tt.env(lambda sample, args: Graded(), id="by_hand", data=[{"problem": "Walk.", "answer": "x"}])
    for _ in range(2):
        env.reset()
        env.step("0.5")
        env.step("nothing")
        assert env.reward() == 10.5
    env.close()
