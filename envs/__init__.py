"""Environments in which an agent acts. This package knows nothing of tokens, torch or models.

An environment module imports what it needs from here: ``from envs import ToolEnv, ToolError, tool``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from envs.interrupts import end_quietly

if TYPE_CHECKING:
    from envs.env import Env as Env
    from envs.env import EnvArgs as EnvArgs
    from envs.tool_env import ToolEnv as ToolEnv
    from envs.tools import ToolError as ToolError
    from envs.tools import tool as tool
    from envs.types import Sample as Sample

end_quietly(__name__)

_MODULES = {
    "Env": "envs.env",
    "EnvArgs": "envs.env",
    "Sample": "envs.types",
    "ToolEnv": "envs.tool_env",
    "ToolError": "envs.tools",
    "tool": "envs.tools",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the fork server imports none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'envs' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
