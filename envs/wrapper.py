"""`Wrapper`: an environment around another one, to observe or change its inputs and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs.contract import EpisodeEnv
from envs.env import EditHistory, Env
from envs.types import Message

_CONTRACT = tuple(name for name in vars(EpisodeEnv) if not name.startswith("_"))


def can_be_wrapped(env: object) -> bool:
    """Return whether an object has all members of the contract; `EnvRunner` reports the missing ones."""
    return all(hasattr(env, name) for name in _CONTRACT)


def unwrapped(env: object) -> object:
    """Return the environment inside all wrappers."""
    while isinstance(env, Wrapper):
        env = env.env
    return env


class Wrapper(Env):
    """An environment that forwards every call to another one; a subclass changes some of them.

    Example::

        class Loud(Wrapper):
            def step(self, response_text):
                print(response_text)
                return super().step(response_text)
    """

    def __init__(self, env: EpisodeEnv) -> None:
        self.env = env

    @property
    def tools(self) -> Sequence[dict[str, Any]]:  # type: ignore[override]
        """The tools' schemas."""
        return self.env.tools

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset."""
        return self.env.reset()

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Step."""
        return self.env.step(response_text)

    def format_observation(self, observation: dict[str, Any]) -> Message | Sequence[Message]:
        """Format the observation."""
        return self.env.format_observation(observation)

    @property
    def edit_history(self) -> EditHistory | None:
        """The environment's own `edit_history`, if it has one."""
        return getattr(self.env, "edit_history", None)

    def reward(self, final_text: str) -> float | None:
        """Return the reward of the last text."""
        if hasattr(self.env, "reward"):
            return self.env.reward(final_text)
        return None

    def called_tools(self, response_text: str) -> Sequence[str] | None:
        """Return the names of the tools that a text calls."""
        if isinstance(self.env, Env):
            return self.env.called_tools(response_text)
        return None

    def solution(self) -> Sequence[str]:
        """Return the texts that solve the episode."""
        if isinstance(self.env, Env):
            return self.env.solution()
        return ()

    def close(self) -> None:
        """Close."""
        self.env.close()
