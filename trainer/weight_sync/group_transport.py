"""Sends weights to servers on any GPU and host over a process group: NCCL between GPUs, gloo on CPUs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agents.engines.weight_servers import (
    GroupAddress,
    ServerLost,
    ServerRefused,
    ServersEngine,
    ServerStuck,
    WeightClient,
    WeightMessage,
    WeightServer,
)
from envs.errors import UserError
from trainer.learner.protocol import Learner
from trainer.learner.weight_group import GroupBroken, cancel
from trainer.learner.weight_sender import Sent, WeightSender
from trainer.weight_sync.transports import ServersTransport, WeightPush

#: How long a server may still wait in a broken group before it is restarted.
STUCK_S = 10.0
#: Tries to form a group of the servers that are left before these weights go over disk.
MAX_TRIES = 3


@dataclass(frozen=True)
class _Joined:
    """A group that servers have joined, and what tells whether they are still in it."""

    address: GroupAddress
    members: object


class GroupTransport(ServersTransport):
    """Broadcasts weights from learner rank 0 to every GPU of the servers; servers that restart read the folder.

    A server that is lost breaks the group for all: the others give up what they wait for, load these weights from the
    folder as if they had been lost too, and join a new group at the next push. Where no group can be formed, weights
    go over disk, unless the group `is_required`.
    """

    def __init__(
        self, learner: Learner, engine: ServersEngine, folder: Path, sender: WeightSender, is_required: bool = False
    ) -> None:
        super().__init__(learner, engine, folder)
        self._sender = sender
        self._is_required = is_required
        self._messages: Sequence[WeightMessage] = ()
        self._group: _Joined | None = None
        self._is_over_disk = False
        engine.before_close = self._leave

    async def start(self) -> None:
        """Start the servers, and send them the weights, which proves the way before the first step.

        Raises:
            UserError: a server cannot be started or found, or no group can be formed although it is required.
        """
        await self.engine.start()
        await self.push(0)

    async def _push(self, version: int) -> WeightPush:
        if self._is_over_disk:
            return await super()._push(version)
        try:
            group = await self._joined()
        except GroupBroken as error:
            self._use_disk(str(error), version)
            return await super()._push(version)
        if group is None:
            return await super()._push(version)
        sent, fault = await self._send(group, version)
        if fault:
            await self._leave()
            self.engine.servers.events.append(f"weights {version} go over disk to servers that were lost: {fault}")
            if version == 0:
                self._use_disk(fault, version)
        return WeightPush(sent.num_bytes, {"gather_s": sent.gather_s, "send_s": sent.send_s})

    def _use_disk(self, fault: str, version: int) -> None:
        """Send all later weights over disk. Raises `UserError` at the start if a group is required."""
        if self._is_required and version == 0:
            rule = "needs servers that can form a process group with the learner, each on GPUs of its own"
            raise UserError("--sync nccl", rule, fault, "give --sync auto, or see the servers' logs")
        self._is_over_disk = True
        self.engine.servers.events.append(f"weights go over disk from now on, not over a process group: {fault}")

    async def _joined(self) -> _Joined | None:
        """Return the group of all servers that are up, a new one where those have changed; None while none is up.

        Raises:
            GroupBroken: they cannot form one.
        """
        self._messages = self._messages or await asyncio.to_thread(self._sender.messages)
        fault = ""
        num_tries = 0
        while True:
            # A dead server that is still in the group would break it for all.
            await self._drop_dead()
            servers = self.engine.servers.up
            if not servers:
                return None
            if self._group and self._group.members == self._members(servers):
                return self._group
            await self._leave()
            if num_tries == MAX_TRIES:
                raise GroupBroken(fault or "servers were lost or came back in every try")
            num_tries += 1
            members = self._members(servers)  # one that restarts while the others join is not in the group
            try:
                address, fault = await self._join(servers)
            except GroupBroken as error:
                fault = str(error)
                continue
            if not fault:
                self._group = _Joined(address, members)

    def _members(self, servers: Sequence[WeightServer]) -> object:
        """Return what changes when a server is restarted, by us or, if it is not ours, by others."""
        numbers = [(server.url, server.num_restarts) for server in servers]
        return numbers, self.engine.num_loaded

    async def _drop_dead(self) -> None:
        """Report the servers that have died since the last push: the others would wait for them."""

        async def one(server: WeightServer) -> None:
            try:
                name = await server.client.weight_version()
                if self._group and not self.engine.is_current(name):
                    raise ServerLost(f"has weights {name}, not {self.engine.weight_version}")
            except (ServerLost, ServerRefused) as error:
                self.engine.servers.report_lost(server, str(error))

        await asyncio.gather(*map(one, self.engine.servers.up))

    async def _join(self, servers: Sequence[WeightServer]) -> tuple[GroupAddress, str]:
        """Let servers and learner join a new group; return where, and why it failed.

        Raises:
            GroupBroken: a server does not say how many members it would be.
        """
        counts = await asyncio.gather(*map(self._num_gpus, servers))
        hosts = [urlsplit(server.url).hostname or "" for server in servers]
        # A server that still waits in an old group must not meet the members of the new one.
        name = f"trueturn-{secrets.token_hex(4)}"
        address = await asyncio.to_thread(self._sender.open_group, name, hosts, sum(counts))

        async def one(server: WeightServer, first_rank: int) -> str:
            try:
                await server.client.join_group(address, first_rank)
            except (ServerLost, ServerRefused) as error:
                # Without this the other members would wait for this one to the end of their limit.
                await asyncio.to_thread(cancel, address.host, address.port)
                if isinstance(error, ServerLost):
                    self.engine.servers.report_lost(server, str(error), must_restart=True)
                return str(error)
            return ""

        # The learner is rank 0; a server has as many ranks as GPUs.
        ranks = [1 + sum(counts[:place]) for place in range(len(counts))]
        faults = await asyncio.gather(*map(one, servers, ranks), asyncio.to_thread(self._sender.join_group))
        return address, "; ".join(filter(None, faults))

    async def _num_gpus(self, server: WeightServer) -> int:
        """Return the GPUs of a server; report one that gives no answer. Raises `GroupBroken` if it does not say."""
        try:
            return await server.client.num_gpus()
        except (ServerLost, ServerRefused) as error:
            if isinstance(error, ServerLost):
                self.engine.servers.report_lost(server, str(error))
            raise GroupBroken(str(error)) from error

    async def _send(self, group: _Joined, version: int) -> tuple[Sent, str]:
        """Send the weights while all servers receive them; return what was sent, and why some did not get all."""
        faults: list[str] = []
        is_broken = asyncio.Event()

        async def give_up(fault: str) -> None:
            faults.append(fault)
            is_broken.set()
            await asyncio.to_thread(cancel, group.address.host, group.address.port)

        async def receive(client: WeightClient) -> None:
            try:
                await _unless(is_broken, client.update_from_group(self._messages, group.address.name, version))
            except (ServerLost, ServerRefused) as error:
                await give_up(str(error))
                raise

        def on_sent(done: asyncio.Future[Sent]) -> None:
            if done.cancelled() or done.exception() or done.result().fault:
                is_broken.set()

        sending = asyncio.ensure_future(asyncio.to_thread(self._sender.send_weights))
        sending.add_done_callback(on_sent)
        try:
            await self.engine.update(receive, version)
        except BaseException:
            # A thread cannot be cancelled: the sender's ends once the group is broken.
            await give_up("the push was ended")
            raise
        finally:
            sent = await sending
        return sent, "; ".join(filter(None, [sent.fault, *faults]))

    async def _leave(self) -> None:
        """Let all members leave the group, if there is one; a broken one may not answer."""
        group = self._group
        self._group = None
        if group is None:
            return
        clients = [server.client for server in self.engine.servers.up]
        leaving = (client.leave_group(group.address.name) for client in clients)
        # A member that cannot answer has left already.
        await asyncio.gather(*leaving, asyncio.to_thread(self._sender.close_group), return_exceptions=True)


async def _unless(is_broken: asyncio.Event, call: Awaitable[None]) -> None:
    """Wait for a call; raise `ServerStuck` if the group breaks and the call does not end soon after."""
    calling = asyncio.ensure_future(call)
    breaking = asyncio.ensure_future(is_broken.wait())
    try:
        await asyncio.wait((calling, breaking), return_when=asyncio.FIRST_COMPLETED)
        # A server that has received everything may still be loading it.
        await asyncio.wait((calling,), timeout=STUCK_S)
        if not calling.done():
            raise ServerStuck(f"waited for another member of the group {STUCK_S:g} s after that was gone")
        await calling
    finally:
        calling.cancel()
        breaking.cancel()
