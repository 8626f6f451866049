"""The environment contract. One object is one episode; the agent loop owns every limit (turns, tokens, time)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from envs.types import Message


class Env(ABC):
    """One episode of a multi-turn task.

    A module names its constructor ``build_env(sample, args) -> Env`` in `registry.yaml`. Then, per episode::

        env = build_env(sample, args)                                # args.max_turns is the loop's limit
        observation, info = env.reset()                              # often empty: the problem is in the prompt
        observation, done, step_info = env.step("<tool_call>...")    # `done`: the task ended, never a limit
        message = env.format_observation(observation)                # {"role": "tool", "content": "..."}
        env.close()

    The reward of the episode is ``env.reward(final_text)``: what the final model text is worth.
    """

    #: JSON schemas of the tools, as the chat template's `tools` takes them.
    tools: tuple[dict[str, Any], ...] = ()

    @abstractmethod
    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the episode; return the first observation (empty: none) and an info dict."""

    @abstractmethod
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Take the model's text; return the observation, whether the task ended, and a step info dict."""

    def format_observation(self, observation: dict[str, Any]) -> Message:
        """Return the chat message that shows an observation to the model (text and images)."""
        return {"role": observation.get("role", "tool"), "content": observation.get("obs_str", "")}

    @abstractmethod
    def reward(self, final_text: str) -> float:
        """Return the episode's reward, a finite number, from the last text that the model wrote."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release what the episode holds; called once, whatever happened."""
