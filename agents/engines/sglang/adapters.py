"""Which low-rank adapters SGLang servers take; loads them, and lets servers forget older ones."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from agents.engines.sglang.client import SGLangClient
from agents.engines.weight_servers import Adapter, ServerLost, ServerRefused

#: The linear layers of a decoder that a server adapts. Vision towers, experts and the output layer are no such layers.
_LAYER = re.compile(r"(.*\blayers\.\d+\.(?:self_attn|mlp))\.((?:q|k|v|o|gate|up|down)_proj)")
#: The version of a checkpoint whose adapter is not loaded yet: no engine's current one.
NO_VERSION = -1


def why_unsupported(layers: Sequence[str]) -> str:
    """Return why SGLang cannot serve an adapter of these layers; "" if it can.

    Servers fuse the queries, keys and values of a layer, and its gate and up projections. Version 0.5.15 fills in a
    missing key or up projection, but no other part.

    >>> why_unsupported(["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"])
    ''
    >>> why_unsupported(["model.layers.0.mlp.up_proj"])
    'servers adapt up_proj only together with gate_proj'
    >>> why_unsupported(["model.visual.blocks.0.attn.qkv"])
    'servers cannot adapt model.visual.blocks.0.attn.qkv'
    """
    parts_of: dict[str, set[str]] = defaultdict(set)
    for layer in layers:
        match = _LAYER.fullmatch(layer)
        if match is None:
            return f"servers cannot adapt {layer}"
        parts_of[match[1]].add(match[2])
    for fused, needed in ((("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")), (("up_proj",), ("gate_proj",))):
        for parts in parts_of.values():
            given = [part for part in fused if part in parts]
            if given and (missing := [part for part in needed if part not in parts]):
                return f"servers adapt {given[0]} only together with {missing[0]}"
    return ""


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
        # One of others that was started again serves its own weights, under its own version.
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
