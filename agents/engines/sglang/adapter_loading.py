"""Loads adapters into servers, and lets servers forget older ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from agents.engines.sglang.client import SGLangClient
from agents.engines.weight_servers import Adapter, ServerLost, ServerRefused

#: The version of a checkpoint whose adapter is not loaded yet: no engine's current one.
NO_VERSION = -1


class AdapterLoader:
    """Keeps which adapter each server was given last.

    With a `checkpoint`, servers may hold any weights and load it first; without one, they were started with it.

    Example::

        loader = AdapterLoader(checkpoint="path/to/model")
        await loader.give(client, "run-1", adapter)
        await loader.give(client, "run-2", newer)       # which unloads run-1
    """

    def __init__(self, checkpoint: str = "") -> None:
        self._checkpoint = checkpoint
        self._held: dict[str, str] = {}  # by URL
        self._unended: set[tuple[str, str]] = set()  # URL and adapter of requests whose end a server may not know

    async def give(self, client: SGLangClient, name: str, adapter: Adapter) -> None:
        """Load an adapter under a name into a server, and let it forget the one before."""
        held = self._held.pop(client.url, "")
        if self._checkpoint and not (held and await client.weight_version() == held):
            folder = Path(self._checkpoint)
            await client.update_from_disk(str(folder.absolute() if folder.is_dir() else folder), NO_VERSION)
        await client.load_adapter(name, adapter)
        self._held[client.url] = name
        if held not in ("", name):
            await self._forget(client, held)

    def note_unended(self, client: SGLangClient, name: str) -> None:
        """Note that a server may count a request of an adapter as not ended; it then keeps the adapter.

        SGLang 0.5.15 never counts a request as ended that was aborted in its queue, and would wait for it for ever.
        """
        self._unended.add((client.url, name))

    async def forget_all(self, clients: Iterable[SGLangClient]) -> None:
        """Let servers forget the adapters that they hold."""
        for client in clients:
            if held := self._held.pop(client.url, ""):
                await self._forget(client, held)

    async def _forget(self, client: SGLangClient, name: str) -> None:
        """Let a server forget an adapter, if it has it and knows that all requests of it have ended."""
        if (client.url, name) not in self._unended:
            with contextlib.suppress(ServerLost, ServerRefused):
                await client.unload_adapter(name)
