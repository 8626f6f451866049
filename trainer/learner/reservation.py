"""Reserves GPUs, or CPUs, of a Ray cluster for the ranks of a learner and for servers: all of them, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from envs.errors import UserError
from trainer.config.learner import ClusterConfig

#: How long to wait for free GPUs or CPUs in the cluster.
PLACE_S = 60.0


@dataclass(frozen=True)
class Request:
    """What to reserve: a GPU or CPU for each learner rank, and `per_server` of them on one node for each server.

    Example: `Request("GPU", "--num-gpus", num_ranks=4, num_servers=2, per_server=2)` takes 8 GPUs.
    """

    kind: str
    flag: str
    num_ranks: int
    num_servers: int = 0
    per_server: int = 1

    @classmethod
    def of(cls, cluster: ClusterConfig, num_servers: int = 0, per_server: int = 1) -> Request:
        """Return the request of a cluster's learner, and of servers."""
        kind, flag = ("GPU", "--num-gpus") if cluster.num_gpus else ("CPU", "--num-learners")
        return cls(kind, flag, cluster.num_ranks, num_servers, per_server)

    @property
    def for_servers(self) -> int:
        """The GPUs or CPUs of all servers."""
        return self.num_servers * self.per_server

    def check(self) -> None:
        """Raise `UserError` if the whole cluster, were all of it free, is too small."""
        total = int(ray.cluster_resources().get(self.kind, 0))
        on_node = max((int(node["Resources"].get(self.kind, 0)) for node in ray.nodes() if node["Alive"]), default=0)
        if self.num_servers and self.per_server > on_node:
            rule = f"must be at most the {on_node} {self.kind}s of the cluster's largest node"
            raise UserError("--tensor-parallel", rule, self.per_server, "give less")
        if self.num_ranks + self.for_servers > total:
            raise UserError(self.flag, self._rule(total, "of the cluster"), self.num_ranks, self._fix(total))

    def reserve(self) -> tuple[PlacementGroup, PlacementGroup | None]:
        """Reserve a bundle for each rank and, in a group of their own, for each server; wait a minute for room.

        Raises:
            UserError: the cluster is too small, or others use it.
        """
        # A group that is larger than the whole cluster would wait for ever.
        self.check()
        # Packed: ranks exchange gradients in every step, and a node's own links are the fastest.
        groups = [placement_group([{self.kind: 1}] * self.num_ranks, strategy="PACK")]
        if self.num_servers:
            groups.append(placement_group([{self.kind: self.per_server}] * self.num_servers, strategy="PACK"))
        try:
            wait_for(groups)
        except GetTimeoutError:
            # Half a reservation would only keep others waiting.
            for group in groups:
                remove_placement_group(group)
            raise self.no_room() from None
        return groups[0], groups[1] if self.num_servers else None

    def no_room(self) -> UserError:
        """Return the error for a cluster that others use."""
        free, total = (int(found.get(self.kind, 0)) for found in (ray.available_resources(), ray.cluster_resources()))
        rule = self._rule(free, f"that are free of the cluster's {total}")
        return UserError(self.flag, rule, self.num_ranks, "wait until others are done, or give less")

    def _rule(self, count: int, which: str) -> str:
        if not self.num_servers:
            return f"must be at most the {count} {self.kind}s {which}"
        return f"must leave {self.num_servers} servers their {self.for_servers} of the {count} {self.kind}s {which}"

    def _fix(self, total: int) -> str:
        if not self.num_servers:
            return f"give {total} or less"
        most = total - self.for_servers
        if most > 0:
            fewer = f"give {most} or less"
        else:
            fewer = "give less --num-servers"
        return f"{fewer}, or --placement colocate"


def wait_for(groups: Sequence[PlacementGroup]) -> None:
    """Wait until groups have their GPUs or CPUs; raise `GetTimeoutError` after a minute."""
    ray.get([group.ready() for group in groups], timeout=PLACE_S)
