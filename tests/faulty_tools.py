"""Environments that fail as the model asks: one whose tool does, one whose step does."""

from __future__ import annotations

import os
import time
from typing import Any

from envs.env import Env
from envs.tool_env import ToolEnv
from envs.tools import tool


def act(deed: str) -> str:
    """Do what the model asks for, as a weak tool does."""
    if deed == "raise":
        raise KeyError(deed)
    if deed == "quit":
        raise SystemExit(3)
    if deed == "hang":
        time.sleep(60)
    if deed == "exit":
        os._exit(3)
    return deed


class Tools(ToolEnv):
    """Pays whoever reaches its reward."""

    @tool
    def do(self, deed: str) -> str:
        """Do something."""
        return act(deed)

    def reward(self, final_text: str) -> float:
        return 1.0


class Plain(Env):
    """The same without tools; it may fail after the step too."""

    def __init__(self, sample: object, args: object) -> None:
        pass

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        return (
            {"obs_str": response_text if "later" in response_text else act(response_text)},
            "done" in response_text,
            {},
        )

    def format_observation(self, observation: dict[str, Any]) -> Any:
        act(observation["obs_str"].removeprefix("later "))
        return super().format_observation(observation)

    def reward(self, final_text: str) -> float:
        return float(act("raise")) if final_text == "done badly" else 1.0
