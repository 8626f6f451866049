"""Sends a learner's weights to servers over a process group, gathered from the shards bucket by bucket."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from agents.engines.weight_servers import GroupAddress, WeightMessage
from trainer.learner.buckets import Bucket, buckets
from trainer.learner.protocol import WeightSource
from trainer.learner.weight_group import GroupBroken, WeightGroup, own_address

#: Values of one message: 512 MiB in bfloat16. The servers hold a bucket twice while they load it.
BUCKET_VALUES = 2**28


@dataclass(frozen=True)
class Sent:
    """The bytes of the weights, and the seconds to gather and to send them; `fault` says why they did not arrive."""

    num_bytes: int
    gather_s: float
    send_s: float
    fault: str = ""


class WeightSender(Protocol):
    """What sends a learner's weights to servers.

    Example::

        messages = sender.messages()                                  # what the servers are told to receive
        address = sender.open_group("run-1", ["gpu1"], num_receivers=2)
        fault = sender.join_group()                                   # while the servers join; "" if all have
        sent = sender.send_weights()                                  # while they receive one message after the other
        sender.close_group()
    """

    def messages(self) -> Sequence[WeightMessage]:
        """Return what `send_weights` sends, in order."""
        ...

    def open_group(self, name: str, hosts: Sequence[str], num_receivers: int) -> GroupAddress:
        """Open a new group, for so many GPUs of servers on these hosts; return where they meet."""
        ...

    def join_group(self) -> str:
        """Join the group as rank 0; return why it failed, "" if it did not."""
        ...

    def send_weights(self) -> Sent:
        """Send all weights, as they are now."""
        ...

    def close_group(self) -> None:
        """Leave the group, if there is one."""
        ...


class RankSender:
    """One rank's part of a `WeightSender`. Rank 0 sends; all ranks must call `send_weights`: it gathers shards."""

    def __init__(self, learner: WeightSource, bucket_values: int = BUCKET_VALUES) -> None:
        self.learner = learner
        self._bucket_values = bucket_values
        self._group: WeightGroup | None = None

    def messages(self) -> Sequence[WeightMessage]:
        """Return what is sent, in order."""
        dtype = self.learner.dtype
        # On the meta device, where the plan of a push takes no memory.
        empty = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape in self.learner.shapes())
        return tuple(_message(bucket) for bucket in buckets(empty, self._bucket_values))

    def open_group(self, name: str, hosts: Sequence[str], num_receivers: int) -> GroupAddress:
        """Open a new group on rank 0."""
        self.close_group()
        device = self.learner.device
        if device.type == "cuda":
            backend = "nccl"
        else:
            backend = "gloo"
        # All ranks are called alike, though rank 0 alone sends.
        if dist.get_rank():
            return GroupAddress(name, "", 0, num_receivers + 1, backend)
        address = own_address(hosts)
        self._group = WeightGroup(name, num_receivers, device, address)
        return GroupAddress(name, address, self._group.port, num_receivers + 1, backend)

    def join_group(self) -> str:
        """Join the group on rank 0; return why it failed."""
        try:
            if self._group:
                self._group.join()
        except GroupBroken as error:
            return str(error)
        return ""

    def send_weights(self) -> Sent:
        """Gather all weights, and send them from rank 0.

        After a fault it goes on to gather: the other ranks cannot know of it, and wait for this one.
        """
        began = time.perf_counter()
        send_s = 0.0
        num_bytes = 0
        fault = ""
        # All ranks come here: `stream` gathers shards, rank 0 alone has a group to send into.
        for bucket in buckets(self.learner.stream(), self._bucket_values):
            started = time.perf_counter()
            if self._group and not fault:
                try:
                    self._group.send(bucket.flat)
                    num_bytes += bucket.flat.nbytes
                except GroupBroken as error:
                    fault = str(error)
            # The rest of the time went into gathering, which the loop's iterator does.
            send_s += time.perf_counter() - started
        return Sent(num_bytes, time.perf_counter() - began - send_s, send_s, fault)

    def close_group(self) -> None:
        """Leave the group."""
        group = self._group
        self._group = None
        if group:
            group.close()


def _message(bucket: Bucket) -> WeightMessage:
    names, tensors = zip(*bucket.named, strict=True)
    return WeightMessage(names, str(bucket.flat.dtype).removeprefix("torch."), tuple(tuple(t.shape) for t in tensors))
