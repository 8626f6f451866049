"""Turns successful episodes of an endpoint into conversations, a JSON line each, as `trainer.sft` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agents.types import Trajectory, is_success
from envs.errors import UserError
from envs.spec import EnvSpec
from envs.tool_calls import ToolCall, ToolFormat, find_tool_calls, outside_tool_calls
from envs.types import openai_message


class Demonstrations:
    """Writes the successes of an environment to a file as they come.

    Example::

        demonstrations = Demonstrations(Path("demos.jsonl"), spec, "hermes")
        demonstrations.add(trajectory)      # a line more, if it was a success
    """

    def __init__(self, path: Path | None, spec: EnvSpec, tool_format: ToolFormat) -> None:
        """Without a path, nothing is written.

        Raises:
            UserError: the environment knows no success, or the file cannot be written or is there already.
        """
        self._path = path
        self._success = spec.success_rule
        self._tool_format: ToolFormat = tool_format
        if path and self._success is None:
            fix = "write success: 0.9 (a reward) or success: KEY (of the info) in the entry"
            rule = "needs an environment that says what a success is"
            raise UserError("--save-demonstrations", rule, f"'{spec.id}' with success: none", fix)
        if path and (path.exists() or not path.parent.is_dir()):
            raise UserError("--save-demonstrations", "must be a new file in a folder", str(path), "give another name")

    def add(self, trajectory: Trajectory) -> None:
        """Write an episode if it is a success and says something in every turn."""
        # An empty turn cannot be taught: there is nothing to write.
        if self._path and is_success(trajectory, self._success) and all(turn.text for turn in trajectory.turns):
            # Opened for each: a killed run keeps what it has.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(demonstration(trajectory, self._tool_format)) + "\n")


def demonstration(trajectory: Trajectory, tool_format: ToolFormat) -> dict[str, Any]:
    """Return the row of an episode: its messages, with images inside, and the schemas of its tools."""
    messages = [_taught(message, tool_format) for message in trajectory.messages]
    if trajectory.tools:
        return {"messages": messages, "tools": [*trajectory.tools]}
    return {"messages": messages}


def _taught(message: Mapping[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    """Return a message with its calls apart, since the model to be taught may write them in another format."""
    if message["role"] != "assistant":
        return openai_message(message)
    text = message["content"]
    # Read as the environment has read them, so that what is taught is what worked.
    calls = find_tool_calls(text, tool_format)
    given = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
        if isinstance(call, ToolCall)
    ]
    if len(given) < len(calls):
        return {**message, "train": False}  # a broken call is no example
    if not given:
        return dict(message)
    return {"role": "assistant", "content": outside_tool_calls(text, tool_format).strip(), "tool_calls": given}
