"""Environments: what the agent acts in. Knows nothing of tokens, torch or models.

What an environment is written with can be imported from here: ``from envs import ToolEnv, ToolError, tool``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.env import Env as Env
    from envs.env import EnvArgs as EnvArgs
    from envs.tool_env import ToolEnv as ToolEnv
    from envs.tools import ToolError as ToolError
    from envs.tools import tool as tool
    from envs.types import Sample as Sample

_HOMES = {
    "Env": "envs.env",
    "EnvArgs": "envs.env",
    "Sample": "envs.types",
    "ToolEnv": "envs.tool_env",
    "ToolError": "envs.tools",
    "tool": "envs.tools",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a process that only forks workers imports nothing of this."""
    if name not in _HOMES:
        raise AttributeError(f"module 'envs' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
