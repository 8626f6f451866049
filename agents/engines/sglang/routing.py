"""Sends the samples of one prompt to one server, which shares what it has read, and keeps the servers equally busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agents.types import GenerateRequest

if TYPE_CHECKING:
    from agents.engines.sglang.servers import Server

#: Sessions above the mean that a server may always have. So few cost no time: decoding is bound by reading weights.
SLACK = 16


def most_sessions(mean: float) -> float:
    """Return how many sessions a server may have before it gets no more because it knows their prompt.

    >>> most_sessions(8), most_sessions(200)
    (24, 250.0)
    """
    return mean + max(SLACK, mean / 4)


def prompt_key(request: GenerateRequest) -> int:
    """Return a number that requests share whose ids and images are the same."""
    return hash((request.ids, *(image.digest for image in request.images)))


class PromptRouter:
    """Remembers which server has read a prompt. A new prompt goes to the server with the fewest sessions.

    Example: with two idle servers and groups of 8, the groups go to servers 0, 1, 0, 1 and so on, each as a whole.
    """

    def __init__(self) -> None:
        self._servers: dict[int, Server] = {}

    def choose(self, servers: Sequence[Server], prompt: int | None) -> Server:
        """Return the server for a session with this prompt: the one that has read it, unless it has too many sessions
        or is not among `servers`; then the one with the fewest, where the next sessions with the prompt follow."""
        fewest = min(servers, key=lambda server: (server.num_sessions, server.number))
        if prompt is None:
            return fewest
        chosen = self._servers.get(prompt, fewest)
        # Counted with the session that is to be placed.
        mean = (sum(server.num_sessions for server in servers) + 1) / len(servers)
        if chosen not in servers or chosen.num_sessions + 1 > most_sessions(mean):
            chosen = fewest
        self._servers[prompt] = chosen
        return chosen

    def forget(self) -> None:
        """Forget every prompt: new weights empty the servers' caches."""
        self._servers.clear()
