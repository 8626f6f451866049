"""Chooses the agent loop of a registry entry."""

from __future__ import annotations

import functools
from collections.abc import Callable

from agents.rollout.episode import Episode
from envs.spec import EnvSpec


def episode_of(entry: EnvSpec) -> Callable[..., Episode]:
    """Return the class of an entry's episodes, to call with the arguments of `Episode`.

    An agent's entry has episodes of `agents.gateway`. Raises `UserError` if the web server for them is not installed.
    """
    if not entry.agent:
        return Episode
    # Only here: it needs a web server, which no other episode does.
    from agents.gateway.episode import AgentEpisode

    return functools.partial(AgentEpisode, entry)
