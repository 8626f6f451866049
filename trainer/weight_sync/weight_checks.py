"""Compares the weights that servers hold with the learner's, by checksums, after every push.

Servers join weights (queries, keys and values) and cut them for their GPUs. How they do so is not known but found out,
while both sides are known to hold the same: each tensor of a server is looked for among the ways to cut the learner's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agents.engines.weight_servers import ServerLost, ServerRefused, ServersEngine, WeightServer
from trainer.learner.checksums import TensorSlice
from trainer.learner.weight_sender import WeightSender

#: Weights that servers may hold as one.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Every push compares this fraction of the tensors, and other ones than the push before; the first one all.
SHARES = 8


class WeightsDiffer(RuntimeError):
    """A server holds other weights than the learner."""


@dataclass(frozen=True)
class _Place:
    """A tensor of a server: of which of its GPUs, and its name there."""

    gpu: int
    name: str


class WeightChecks:
    """Checks the servers of an engine.

    Example::

        checks = WeightChecks(engine, sender)
        await checks.check()      # while both sides hold the same: finds out how servers hold what they hold
        await checks.check()      # after a push; raises `WeightsDiffer`
    """

    def __init__(self, engine: ServersEngine, sender: WeightSender) -> None:
        self._engine = engine
        self._sender = sender
        #: By the number of a server's GPUs: what each of its tensors is.
        self._cuts: dict[int, list[tuple[_Place, TensorSlice]]] = {}
        self._num_checks = 0

    async def check(self) -> None:
        """Compare a part of the weights. Of servers that were not seen before, find out what can be compared.

        Servers that give no checksums, and tensors of another layout, are left to the probe.

        Raises:
            WeightsDiffer: a server that is up holds other weights; names some.
        """
        held = await self._held()
        known = {server: self._cuts[count] for server in held if (count := _num_gpus(held[server])) in self._cuts}
        shares = {server: self._share(cuts) for server, cuts in known.items()}
        wanted = dict.fromkeys(cut for share in shares.values() for _, cut in share)
        if wanted:
            own = await asyncio.to_thread(self._sender.checksums, list(wanted))
        else:
            own = {}
        self._num_checks += bool(wanted)
        for server, share in shares.items():
            wrong = [place.name for place, cut in share if held[server].get(place, own[cut]) != own[cut]]
            if wrong:
                found = f"{len(wrong)} of {len(share)} tensors differ from the learner's: {', '.join(wrong[:3])}"
                raise WeightsDiffer(f"server {server.number} holds other weights as {server.client.url}: {found}")
        for server in held:
            if (count := _num_gpus(held[server])) not in self._cuts:
                self._cuts[count] = await self._learned(held[server], count)

    def _share(self, cuts: Sequence[tuple[_Place, TensorSlice]]) -> Sequence[tuple[_Place, TensorSlice]]:
        """Return the cuts to compare now: all the first time, then another share of them each time."""
        if self._num_checks:
            return cuts[self._num_checks % SHARES :: SHARES]
        return cuts

    async def _held(self) -> Mapping[WeightServer, Mapping[_Place, str]]:
        """Return the checksums of every server that gives some; one that does not is asked no more."""

        async def one(server: WeightServer) -> Mapping[_Place, str]:
            try:
                gpus = await server.client.checksums()
            except (ServerLost, ServerRefused):
                return {}
            return {_Place(gpu, name): value for gpu, tensors in enumerate(gpus) for name, value in tensors.items()}

        servers = self._engine.servers.up
        answers = await asyncio.gather(*map(one, servers))
        return {server: answer for server, answer in zip(servers, answers, strict=True) if answer}

    async def _learned(self, held: Mapping[_Place, str], num_gpus: int) -> list[tuple[_Place, TensorSlice]]:
        """Return which cut each tensor of a server is. Of tensors with equal values, the name must tell."""
        messages = await asyncio.to_thread(self._sender.messages)
        names = [name for message in messages for name in message.names]
        own = await asyncio.to_thread(self._sender.checksums, list(ways(names, num_gpus)))
        cuts_of: dict[str, list[TensorSlice]] = {}
        for cut, value in own.items():
            cuts_of.setdefault(value, []).append(cut)
        times = Counter((place.gpu, value) for place, value in held.items())
        found: list[tuple[_Place, TensorSlice]] = []
        for place, value in held.items():
            cuts = cuts_of.get(value, [])
            if len(cuts) > 1 or times[place.gpu, value] > 1:
                cuts = [cut for cut in cuts if _is_named_alike(place.name, cut)]
            found += [(place, cuts[0])] if len(cuts) == 1 else []
        if len(found) < len(held):
            text = f"checksums compare {len(found)} of {len(held)} tensors of a server with the learner's"
            self._engine.servers.events.append(f"{text}; the others are left to the probe")
        return found


def _num_gpus(held: Mapping[_Place, str]) -> int:
    return 1 + max(place.gpu for place in held)


def _is_named_alike(name: str, cut: TensorSlice) -> bool:
    """Return whether a server's tensor and a single weight have one name but for its beginning."""
    return len(cut.names) == 1 and f".{cut.names[0]}".endswith(f".{name.partition('.')[2] or name}")


def ways(names: Sequence[str], num_gpus: int) -> Iterable[TensorSlice]:
    """Yield every way in which one of a server's GPUs may hold weights of these names."""
    sets = [(name,) for name in names] + joined(names)
    for each in sets:
        yield TensorSlice(each)
        if num_gpus > 1:
            axes = (0, 1) if len(each) == 1 else (0,)
            yield from (TensorSlice(each, axis, index, num_gpus) for axis in axes for index in range(num_gpus))


def joined(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the names of weights that servers may hold as one.

    >>> joined(["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"])
    [('mlp.gate_proj.weight', 'mlp.up_proj.weight')]
    """
    every = set(names)
    sets = [tuple(n.replace(parts[0], part) for part in parts) for parts in JOINED for n in names if parts[0] in n]
    return [each for each in sets if every.issuperset(each)]
