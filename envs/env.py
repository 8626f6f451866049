"""The environment contract. One object is one episode; the agent loop enforces all limits (turns, tokens, time)."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from envs.tool_calls import ToolFormat
from envs.types import Message

#: Which calls of a turn run: the last alone, or all in order.
CallPolicy = Literal["last", "sequential"]
#: What a fault that the model's own action caused is worth: the model reads the error and the episode goes on, the
#: episode is dropped, or it ends with the lowest reward.
ToolFaultPolicy = Literal["observe", "drop", "reward_min"]
#: Edits what the model goes on seeing of a conversation.
EditHistory = Callable[[list[Message]], Sequence[Message]]


@dataclass(frozen=True)
class EnvArgs:
    """The settings that `build_env` gets with its sample: the turn limit and the settings of the registry entry.

    `success_key` is the key of the info that says whether an episode is a success, if the entry names one. With
    `on_tool_fault` "observe", the async tools of a turn are cancelled after `tools_timeout_s`.

    Example::

        EnvArgs(max_turns=3, tool_format="qwen_xml", options={"difficulty": 2})
    """

    max_turns: int
    tool_format: ToolFormat = "hermes"
    tool_calls: CallPolicy = "sequential"
    grader: str = "math"
    reward_max_val: float = 1.0
    reward_min_val: float = 0.0
    success_key: str = ""
    on_tool_fault: ToolFaultPolicy = "observe"
    tools_timeout_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> EnvArgs:
        """Return the arguments with a copy of the options; all other fields are immutable."""
        return replace(self, options=copy.deepcopy(dict(self.options), memo) if self.options else {})

    def reward(self, score: float) -> float:
        """Return the reward for a score from 0 to 1: `reward_min_val` for 0, `reward_max_val` for 1.

        >>> EnvArgs(3, reward_max_val=2.0, reward_min_val=-1.0).reward(1.0)
        2.0
        """
        return self.reward_min_val * (1.0 - score) + self.reward_max_val * score  # exact for 0 and 1


class Env(ABC):
    """One episode of a multi-turn task.

    A module names its constructor ``build_env(sample, args) -> Env`` in `registry.yaml`. Then, per episode::

        env = build_env(sample, args)                                # args.max_turns is the loop's limit
        observation, info = env.reset()                              # often empty: the problem is in the prompt
        observation, done, step_info = env.step("<tool_call>...")    # `done`: the task ended, never a limit
        message = env.format_observation(observation)                # {"role": "tool", "content": "..."}
        env.close()

    The reward of the episode is ``env.reward(final_text)``, computed from the final model text, plus the rewards of
    its turns: a step may give one, a finite number, as ``step_info["reward"]``. Where every step does, `reward` may be
    left out.

    `step` and `reward` get what the model says. What it thinks, such as ``<think>...</think>``, is taken out before,
    and an unfinished thought leaves an empty text (`thinking` of the registry entry, `envs.tool_calls.thinking`).

    An environment that defines ``edit_history(messages)`` edits what the model goes on seeing: after each step that
    does not end the task it gets the messages that the model has read and written, with the new observation, and
    returns those to go on with. An image stands in them as its number, such as ``{"type": "image", "image": 3}``.
    """

    #: JSON schemas of the tools for the chat template's `tools`; read after `reset`.
    tools: Sequence[dict[str, Any]] = ()

    @abstractmethod
    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the episode; return the first observation (empty: none) and an info dict."""

    @abstractmethod
    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Process what the model says; return the observation, whether the task ended, and a step info dict."""

    def format_observation(self, observation: dict[str, Any]) -> Message | Sequence[Message]:
        """Return the chat message that shows an observation to the model, or several in order.

        The message holds the images of `multi_modal_data`, a dict of lists such as ``{"image": [image]}``, and then
        the text `obs_str`. Its role is `role`, "tool" by default.
        """
        if not {"obs_str", "multi_modal_data"} & observation.keys():
            rule = "an observation must hold obs_str or multi_modal_data, or format_observation be defined"
            raise ValueError(f"{rule}, got the keys {', '.join(map(str, observation))}")
        # An author who writes "image" beside the text would train a model that never sees it.
        if "multi_modal_data" not in observation and (lost := {"image", "images"} & observation.keys()):
            raise ValueError(f'images must stand in multi_modal_data, got {lost.pop()!r}; write {{"image": [image]}}')
        groups = observation.get("multi_modal_data") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(group, list | tuple) for group in groups.values()):
            raise ValueError(f'multi_modal_data must be like {{"image": [image]}}, got {groups!r:.200}')
        return observation_message(observation, "tool")

    def reward(self, final_text: str) -> float | None:
        """Return the reward of what the model says in its last turn, a finite number; None, the default, for none.

        The rewards of the steps are added to it.
        """
        return None

    def called_tools(self, response_text: str) -> Sequence[str] | None:
        """Return the names of the tools that a text calls; None, the default, if `step` is not made of tool calls."""
        return None

    def solution(self) -> Sequence[str]:
        """Return model texts that solve the episode, one per turn; empty if they are not known.

        `python -m envs.check` plays them and expects the best reward.
        """
        return ()

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Release the episode's resources; called exactly once, also after a fault."""


def observation_message(observation: Mapping[str, Any], default_role: str) -> Message:
    """Return the message of an observation: the images of `multi_modal_data`, then `obs_str`, under its `role`."""
    images = [image for group in (observation.get("multi_modal_data") or {}).values() for image in group]
    text = observation.get("obs_str", "")
    if images:
        content = [*({"type": "image", "image": i} for i in images), {"type": "text", "text": text}]
    else:
        content = text
    return {"role": observation.get("role", default_role), "content": content}
