"""Workers on the nodes of a Ray cluster, for environments whose tools are too heavy for one host.

Each is an actor with a worker process of its own node. When the actor is killed, that node's fork server kills the
process, with those that it has started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from envs.workers.worker import Worker, WorkerDied, WorkerError, WorkerLost, WorkerTimeout

R = TypeVar("R")
#: How long an idle worker may take to answer. One that does not is replaced, perhaps on another node.
PING_S = 5.0
#: How long a call with a time limit may wait for a node with room, besides that limit.
PLACE_S = 30.0
#: Where Ray keeps the token that it makes.
TOKEN = Path.home() / ".ray" / "auth_token"
#: The resources that Ray has names for.
KNOWN = ("num_cpus", "num_gpus", "memory")
FAULTS = (WorkerError, WorkerDied, WorkerTimeout)


class WorkerHost:
    """Holds one worker process on the node where Ray has placed this actor."""

    def __init__(self, path: list[str]) -> None:
        sys.path[:] = path
        self._worker = Worker()

    def call(self, function: Callable[..., object], args: tuple[object, ...], timeout_s: float | None) -> object:
        """Return the value of a call, or the fault: Ray would send a raised one with its own traceback."""
        try:
            return self._worker.call(function, *args, timeout_s=timeout_s)
        except FAULTS as fault:
            return fault

    def is_idle(self) -> bool:
        """Return whether the process waits for a call."""
        return self._worker.is_idle


class RayWorker:
    """A worker process on any node that has the resources.

    Example::

        worker = RayWorker({"num_cpus": 2})
        worker.call(math.sqrt, 2.0)        # 1.4142135623730951, computed somewhere in the cluster
    """

    def __init__(self, resources: Mapping[str, float]) -> None:
        """Ask for an actor and return at once; the first call waits for a node with room."""
        connect()
        self._resources = {"num_cpus": 1, **resources}
        own = {name: value for name, value in self._resources.items() if name not in KNOWN}
        known = {name: value for name, value in self._resources.items() if name in KNOWN}
        actor: Any = ray.remote(WorkerHost).options(
            **known, resources=own, max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._actor: Any = actor.remote(sys.path)
        self.is_alive = True

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for a call; False where its node does not answer."""
        try:
            return self.is_alive and ray.get(self._actor.is_idle.remote(), timeout=PING_S)
        except (RayError, GetTimeoutError):
            return False

    def call(self, function: Callable[..., R], *args: object, timeout_s: float | None = None) -> R:
        """Run `function(*args)` in the process and return its value.

        Raises:
            WorkerError, WorkerDied, WorkerTimeout: as `envs.workers.worker.Worker.call`.
            WorkerLost: the node is gone, or another thread has called `kill`.
        """
        if timeout_s is None:
            limit_s = None
        else:
            limit_s = timeout_s + PLACE_S
        try:
            value: Any = ray.get(self._actor.call.remote(function, args, timeout_s), timeout=limit_s)
        except GetTimeoutError:
            self.kill()
            room = f"does a node have room for {self._resources}?"
            raise WorkerTimeout(f"no answer from the cluster in {limit_s:g} s: {room}") from None
        except RayTaskError as error:  # what was sent or returned cannot be pickled or imported there
            raise WorkerError(str(error)) from error
        except RayError as error:
            self.is_alive = False
            raise WorkerLost(f"{str(error).splitlines()[0]:.200}") from error
        if isinstance(value, FAULTS):
            self.is_alive = isinstance(value, WorkerError)
            raise value
        return value

    def kill(self) -> None:
        """Kill the process, with its actor; a call that runs in it raises `WorkerDied`."""
        self.is_alive = False
        ray.kill(self._actor)


def connect() -> None:
    """Connect to the cluster that `RAY_ADDRESS` names, or start one on this host, unless Ray is connected."""
    if not ray.is_initialized():
        begin_ray(os.environ.get("RAY_ADDRESS", ""))


def begin_ray(address: str, **options: Any) -> None:
    """Connect to the Ray cluster at an address; without one, start Ray on this host with `options` of `ray.init`.

    What is started listens on the loopback interface alone, and takes no command without Ray's token.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address not in ("", "local"):
        ray.init(address, **quiet)
        return
    has_cluster = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # else Ray takes the address of the host in place of a loopback one
    try:
        ray.init("local", _node_ip_address="127.0.0.1", include_dashboard=False, **quiet, **options)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = has_cluster
    with contextlib.suppress(OSError):  # it may come from RAY_AUTH_TOKEN
        TOKEN.chmod(0o600)  # Ray lets everyone read it
