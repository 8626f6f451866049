"""SGLang servers on any node of a Ray cluster: each is held by an actor, which dies with its node or with the run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agents.engines.sglang.process import STOP_S, LocalProcess, ReservedPorts
from agents.engines.sglang.settings import ServerPlace, SGLangSettings
from envs.errors import UserError, first_line
from trainer.learner.ray_worker import Place

#: How long to wait for an actor to answer, and to stop a server.
ANSWER_S = 10.0


@dataclass(frozen=True)
class Shared:
    """GPUs of learner ranks that a server uses too: their node, and their names there as Ray gives them."""

    node: str
    gpus: tuple[str, ...]


class ServerHost:
    """Holds one server on the node where Ray has placed this actor.

    Example::

        host = ray.remote(ServerHost).options(num_gpus=1).remote(settings, number=0, port=30000)
        ray.get(host.start.remote())      # ("http://10.0.0.2:30000", "8c1f...")
    """

    def __init__(self, settings: SGLangSettings, number: int, port: int, shared: Shared | None = None) -> None:
        self._settings = settings
        self._number = number
        self._port = port
        self._shared = shared
        self._process: LocalProcess | None = None

    def start(self) -> tuple[str, str]:
        """Start the server; return where it listens, and the node."""
        address = ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        # Ray names the GPUs of a bundle; without a bundle they are those of the ranks.
        shared = self._shared or Shared(node, own_gpus())
        if shared.gpus:
            # Its own come first. It also sees the others, since a learner there may lend it weights.
            others = [gpu for gpu in gpus_of_host() if gpu not in shared.gpus]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((*shared.gpus, *others))
        if not self._settings.log_folder.parent.exists():  # the run's folder is not shared with this node
            own = Path(tempfile.gettempdir()) / "trueturn" / self._settings.log_folder.parent.name
            self._settings = replace(self._settings, log_folder=own)
        # Held until the server listens, so that no other process takes it meanwhile.
        self._ports = ReservedPorts(1, address, [self._port] if self._port else [])
        place = ServerPlace(self._ports.numbers[0], address)
        self._process = LocalProcess(self._settings, self._number, place)
        return self._process.url, node

    def ended(self) -> str:
        """Return how the server ended; "" while it runs."""
        if self._process:
            return self._process.ended()
        return ""

    def log(self) -> str:
        """Return where the log is, and its end."""
        if self._process:
            return f"on {ray.util.get_node_ip_address()} {self._process.log()}"
        return "it has no log yet"

    def stop(self) -> None:
        """End the server."""
        if self._process:
            self._process.stop()


def own_gpus() -> tuple[str, ...]:
    """Return the GPUs that Ray has given to this actor, as it names them."""
    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", [])))


def gpus_of_host() -> list[str]:
    """Return the numbers of all GPUs of this host; none without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    # Without the tool there are no GPUs to see, as on the hosts of the tests.
    except (OSError, subprocess.SubprocessError):
        return []


class RayProcess:
    """A server that an actor holds. What it says of the server is what the actor has last answered."""

    def __init__(self, make_actor: Callable[[], Any]) -> None:
        """Begin with the actor that is made; as long as None is, `ended` tries again."""
        self.url = self.node = ""
        self._make_actor = make_actor
        self._actor: Any = None
        self._call: Any = None
        self._end = ""
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._actor = self._make_actor()
        self._call = self._actor and self._actor.start.remote()

    def ended(self) -> str:
        """Return how the server ended: by itself, with its actor or with its node."""
        with self._lock:
            try:
                if not self._actor:
                    self._begin()
                # Never waits: the loop that asks watches all servers.
                elif not self._end and ray.wait([self._call], timeout=0)[0]:
                    answer: Any = ray.get(self._call)
                    if self.url:
                        self._end = answer
                    else:
                        self.url, self.node = answer
                    self._call = self._actor.ended.remote()
            except RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                self._end = f"its node could not start it: {first_line(error.cause)}"
            except RayError as error:
                self._end = f"its node or its actor is gone: {first_line(error):.200}"
            return self._end

    def log(self) -> str:
        """Return where the log is and its end, if the actor still answers."""
        if not self._actor:
            return "it waits for the learner, whose GPUs it uses"
        try:
            text: Any = ray.get(self._actor.log.remote(), timeout=ANSWER_S)
            return text
        except (RayError, GetTimeoutError):
            return "its log is on a node that does not answer"

    def stop(self) -> None:
        """End the server, and free its GPUs."""
        self._make_actor = lambda: None
        if not self._actor:
            return
        with contextlib.suppress(RayError, GetTimeoutError):
            ray.get(self._actor.stop.remote(), timeout=2 * STOP_S + ANSWER_S)
        # Also where it does not answer: its GPUs must become free.
        ray.kill(self._actor)


class RayLauncher:
    """Starts servers on the nodes of a Ray cluster: on a reservation of their own, or on GPUs that learners use.

    A server is started again on its node or, if that is gone, where Ray finds room for its part of the reservation. On
    learners' GPUs it waits while these are being started again.
    """

    def __init__(
        self, reserved: PlacementGroup | None, on_gpu: bool, learners: Callable[[], Sequence[Place]] = tuple
    ) -> None:
        """Start each server in its bundle of `reserved`; without it, on GPUs of `learners()`, as many as they have."""
        self._reserved = reserved
        self._on_gpu = on_gpu
        self._learners = learners
        self._shared: dict[int, Shared] = {}

    def check(self, settings: SGLangSettings) -> None:
        """Raise `UserError` if servers could be reached without a key: they listen on the cluster's network."""
        if not settings.gives_key and not settings.with_key().api_key:
            rule = "must come with the key of the servers, which listen on the network of the cluster"
            fix = "leave --config out of --engine-args, or give the key that it holds with --engine-api-key-file"
            raise UserError("--engine-args", rule, "--config", fix)

    def launch(self, settings: SGLangSettings, number: int, port: int) -> RayProcess:
        """Start the actor of the `number`-th server and return at once."""
        return RayProcess(lambda: self._actor(settings, number, port))

    def _actor(self, settings: SGLangSettings, number: int, port: int) -> Any:
        count = settings.tensor_parallel
        shared = None
        # Restarts are the pool's, which also sends the weights again.
        options: dict[str, Any] = {"max_restarts": 0}
        if self._reserved is not None:
            options |= {"num_cpus": 0, "num_gpus": count} if self._on_gpu else {"num_cpus": count}
            strategy: Any = PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=number)
        elif not are_alive(learners := self._learners()):
            return None
        else:
            others = [place for other, place in self._shared.items() if other != number]
            shared = self._shared[number] = shared_place(learners, others, settings.num_servers, count)
            options |= {"num_cpus": 0}
            strategy = NodeAffinitySchedulingStrategy(shared.node, soft=False)
        actor = ray.remote(ServerHost).options(scheduling_strategy=strategy, **options)
        return actor.remote(settings, number, port, shared)


def are_alive(learners: Sequence[Place]) -> bool:
    """Return whether all nodes of a learner are there; a learner that is being started again has no places."""
    # Ray knows of a lost node before a connection breaks.
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return bool(learners) and all(rank.node in alive for rank in learners)


def shared_place(learners: Sequence[Place], others: Sequence[Shared], num_servers: int, tensor_parallel: int) -> Shared:
    """Return the GPUs of a server: those of the first ranks, all on one node, that the fewest `others` use.

    Raises:
        UserError: no node has enough ranks for a server, or all have too few GPUs for a GPU of each server's own.
    """
    nodes: dict[str, list[str]] = {}
    for rank in learners:
        nodes.setdefault(rank.node, []).extend(rank.gpus or ("",))  # on a CPU there is no name
    slots = [
        (node, tuple(filter(None, gpus[first : first + tensor_parallel])))
        for node, gpus in nodes.items()
        for first in range(0, len(gpus) - tensor_parallel + 1, tensor_parallel)
    ]
    if not slots:
        rule = f"must be at most the {max(map(len, nodes.values()), default=0)} learners of one node"
        raise UserError("--tensor-parallel", rule, tensor_parallel, "give less, or --placement split")
    if any(rank.gpus for rank in learners) and num_servers > len(slots):
        raise UserError(
            "--num-servers", f"must be at most {len(slots)}, the servers that fit", num_servers, "give less"
        )
    taken = Counter((other.node, other.gpus) for other in others)
    place = min(range(len(slots)), key=lambda place: taken[slots[place]])
    return Shared(*slots[place])
