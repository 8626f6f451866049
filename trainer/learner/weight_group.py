"""The sending end of a process group of learner rank 0 and every GPU of the servers: NCCL between GPUs, gloo on CPUs.

NCCL waits for a dead peer for ever, and torch ends the process that waits. So this end has limits of its own, and ends
a wait when the group is cancelled, by anyone who can reach its store: the caller learns first that a server is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from agents.engines.weight_servers import LOCAL_HOSTS
from envs.errors import first_line
from envs.execution.threads import DaemonThread
from trainer.learner.collectives import listen

T = TypeVar("T")

#: Longest wait for all servers to join, and for one bucket to reach them, and for a broken group to end.
JOIN_S = 120.0
SEND_S = 120.0
ABORT_S = 10.0
#: How often a wait looks whether the group was cancelled, and a broadcast whether it is done.
POLL_S = 0.02
DONE_S = 0.0005
#: Variables that the two ends of a group must have in common. SGLang sets this one; NCCL reads it once in a process.
SHARED_VARIABLES = {"NCCL_CUMEM_ENABLE": "0"}
_CANCELLED = "cancelled"
#: torch neither watches such a group nor ends the process when a wait takes too long: this module does.
_UNWATCHED = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


class GroupBroken(RuntimeError):
    """Servers did not join, or a weight did not reach them all. The group is of no more use."""


class WeightGroup:
    """Rank 0 of a group.

    Example::

        group = WeightGroup("run-1", num_receivers=2, device=torch.device("cuda", 0), address="10.0.0.1")
        group.join()              # while the servers join at 10.0.0.1, port `group.port`
        group.send(flat)          # while each server receives as many bytes
        group.close()
    """

    def __init__(
        self, name: str, num_receivers: int, device: torch.device, address: str, limit_s: float = SEND_S
    ) -> None:
        """Open the store where the members meet, at one address of this host."""
        if device.type == "cuda" and device.index is None:  # its threads would not know which one
            device = torch.device("cuda", torch.cuda.current_device())
        self.name = name
        self.device = device
        self._size = num_receivers + 1
        self._limit_s = limit_s
        limit = timedelta(seconds=JOIN_S)
        self._address = address
        listening = listen(address)
        self.port: int = listening.getsockname()[1]
        options: dict[str, Any] = {"timeout": limit, "wait_for_workers": False}
        self._store = TCPStore(address, self.port, is_master=True, master_listen_fd=listening.detach(), **options)
        # A connection of its own to look for the end: a store that waits for a key answers nothing else.
        self._ends = TCPStore(address, self.port, is_master=False, **options)
        self._members: dist.ProcessGroup | None = None
        self._thread = DaemonThread("weights")

    def join(self) -> None:
        """Become rank 0; with gloo, wait until all servers have joined. Raises `GroupBroken` if they do not."""
        self._members = self._within(min(JOIN_S, self._limit_s), "the servers to join", self._connect)

    def _connect(self) -> dist.ProcessGroup:
        """Return the group. The names of its keys are those of `torch.distributed` for a group that is made by name."""
        is_nccl = self.device.type == "cuda"
        limit = timedelta(seconds=self._limit_s)
        store = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
        store = PrefixStore("cuda/" if is_nccl else "cpu/", store)
        if not is_nccl:
            gloo: Any = dist.ProcessGroupGloo  # its types leave these options out
            pairs = gloo._Options()
            pairs._devices = [gloo.create_device(hostname=self._address)]
            pairs._timeout = limit
            return gloo(store, 0, self._size, pairs)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        with _variables(_UNWATCHED):
            return dist.ProcessGroupNCCL(store, 0, self._size, options)  # pyright: ignore[reportReturnType]

    def send(self, flat: Tensor) -> None:
        """Send a flat tensor to all servers, and wait until it has left. Raises `GroupBroken` if it does not arrive."""
        members = self._members
        assert members is not None, "a group is joined first"

        def broadcast() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            work = members.broadcast([flat.view(torch.uint8)], options)
            while not work.is_completed():
                time.sleep(DONE_S)
            work.wait()  # raises what went wrong

        self._within(self._limit_s, "the servers to take weights", broadcast)

    def _within(self, limit_s: float, what: str, call: Callable[[], T]) -> T:
        """Return what a call returns. One that takes too long or is cancelled is left behind in its thread."""

        def run() -> T:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return call()

        result = self._thread.begin(run)
        deadline = time.monotonic() + limit_s
        fault = ""
        while not fault and not wait([result], POLL_S).done:
            if self._ends.check([_CANCELLED]):
                fault = "a server is gone"
            elif time.monotonic() > deadline:
                fault = f"waited {limit_s:g} s for {what}"
        try:
            if fault:
                raise GroupBroken(fault)
            return result.result()
        except (RuntimeError, OSError) as error:
            self._abort()
            if isinstance(error, GroupBroken):
                raise
            raise GroupBroken(f"waited for {what}: {first_line(error)}") from error

    def _abort(self) -> None:
        """End what still waits, here and, where connections break, on the servers."""
        members = self._members
        self._members = None
        if members is not None:
            ending = Thread(target=members.abort, daemon=True)
            ending.start()
            ending.join(ABORT_S)

    def close(self) -> None:
        """Leave the group."""
        self._abort()
        self._thread.end()


def cancel(host: str, port: int) -> None:
    """End the waits of a group whose store is there; does nothing if the store is gone."""
    with contextlib.suppress(RuntimeError, OSError):
        limit = timedelta(seconds=ABORT_S)
        TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False).set(_CANCELLED, "")


def own_address(hosts: Sequence[str]) -> str:
    """Return the address of this host that the hosts of servers can reach; a local one if all of them are this host."""
    for host in hosts:
        if host not in LOCAL_HOSTS:
            family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as route:
                route.connect(address)  # sends nothing
                return str(route.getsockname()[0])
    return "127.0.0.1"


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
