"""An engine of servers as the code that brings weights sees it: `ServersEngine`, its servers, and what is sent to them.

`agents.engines.sglang` is one. Another engine whose servers take weights by the same calls needs no change elsewhere:
its `capabilities` name the ways that it takes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.engines.base import Capabilities, Engine, TrainableEngine, capabilities_of
from agents.engines.busy import BusyTime
from agents.types import ProcessedImage

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


class ServerLost(Exception):
    """The server gave no answer, or a malformed one: it is gone, broken or too slow. Another server may answer."""


class ServerRefused(Exception):
    """The server answered, with an HTTP status, that it will not do this; another try would not help."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class ServerStuck(ServerLost):
    """The server waits for another process that is gone. Only a restart ends that."""


class EngineDown(Exception):
    """No server is left that can write."""


@dataclass(frozen=True)
class Adapter:
    """The low-rank updates of some linear layers, W + (alpha / rank) B A, in the format of peft.

    `config` is the content of peft's `adapter_config.json`. `tensors` is a base64 pickle of A and B by peft's names, as
    tensors on the CPU: the pickle holds their values. `num_bytes` counts these values alone. `layers` are the adapted
    layers' names.

    Example: rank 8 on all decoder layers of a 2B Qwen3-VL is 17,432,576 bytes in bfloat16; its weights are 4.3 GB.
    """

    config: Mapping[str, Any]
    tensors: str
    num_bytes: int
    layers: tuple[str, ...]

    @property
    def rank(self) -> int:
        """The number of rows of A and of columns of B."""
        return int(self.config["r"])

    @property
    def targets(self) -> tuple[str, ...]:
        """The last parts of the layers' names, such as `q_proj`."""
        return tuple(self.config["target_modules"])


def kinds_of(layers: Sequence[str]) -> tuple[str, ...]:
    """Return the last parts of layers' names, each once: what servers call the targets of an adapter.

    >>> kinds_of(["model.layers.0.self_attn.v_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"])
    ('up_proj', 'v_proj')
    """
    return tuple(sorted({layer.rpartition(".")[2] for layer in layers}))


@dataclass(frozen=True)
class GroupAddress:
    """Where the members of a process group meet: the store of its rank 0, and how many they are."""

    name: str
    host: str
    port: int
    num_members: int
    backend: str


@dataclass(frozen=True)
class WeightMessage:
    """Weights that are sent as one tensor of bytes: their names in a checkpoint, their dtype and shapes.

    Example: `WeightMessage(("model.norm.weight", "lm_head.weight"), "bfloat16", ((128,), (4096, 128)))`.
    """

    names: tuple[str, ...]
    dtype: str
    shapes: tuple[tuple[int, ...], ...]


class WeightClient(Protocol):
    """Calls to one server. Each raises `ServerLost` where another try may help, and `ServerRefused` where none does."""

    @property
    def url(self) -> str:
        """Where the server listens."""
        ...

    @property
    def node(self) -> str:
        """The node of the Ray cluster that the server runs on; "" without one."""
        ...

    async def weight_version(self) -> str:
        """Return the version of the weights that the server reports."""
        ...

    async def num_gpus(self) -> int:
        """Return how many GPUs serve together."""
        ...

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a checkpoint folder."""
        ...

    async def update_from_tensors(self, payloads: Sequence[str], version: int, num_gpus: int = 1) -> None:
        """Load pickled handles of tensors on a GPU that the server sees ("ipc")."""
        ...

    async def join_group(self, group: GroupAddress, first_rank: int) -> None:
        """Join a process group; each GPU of the server is a member, from `first_rank` on ("nccl")."""
        ...

    async def update_from_group(self, messages: Sequence[WeightMessage], group: str, version: int) -> None:
        """Receive and load weights over a process group."""
        ...

    async def leave_group(self, group: str) -> None:
        """Leave a process group."""
        ...


class WeightServer(Protocol):
    """One server of an engine."""

    @property
    def number(self) -> int:
        """Its place among the servers, from 0 on."""
        ...

    @property
    def url(self) -> str:
        """Where it listens."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often the engine has started it again."""
        ...

    @property
    def client(self) -> WeightClient:
        """The calls to it."""
        ...

    @property
    def busy(self) -> BusyTime:
        """The seconds in which it wrote."""
        ...


class Servers(Protocol):
    """All servers of an engine."""

    #: Messages about servers, in order; whoever brings weights adds its own.
    events: list[str]

    @property
    def all(self) -> Sequence[WeightServer]:
        """Every server; none once they were ended."""
        ...

    @property
    def up(self) -> Sequence[WeightServer]:
        """The servers that may get work."""
        ...

    def report_lost(self, server: Any, reason: str, must_restart: bool = False) -> None:
        """Take one of `all` out of service until it answers again with the current weights."""
        ...

    def starting(self) -> Sequence[int]:
        """Return the numbers of the launched servers that do not listen yet. Raises `UserError` if one has ended."""
        ...


class ServersEngine(TrainableEngine, Protocol):
    """An engine whose turns servers write. They may die, and come back with the current weights."""

    #: Returns a folder with the current weights, for a server that is back; the code that pushes weights sets it.
    current_weights: Callable[[], Path] | None
    #: Called before servers that the run did not start are let go; the code that pushes weights may set it.
    before_close: Callable[[], Awaitable[None]] | None

    @property
    def capabilities(self) -> Capabilities:
        """Which of the ways below it takes weights by."""
        ...

    @property
    def servers(self) -> Servers:
        """Its servers."""
        ...

    @property
    def are_started_here(self) -> bool:
        """Whether the run starts the servers; others may hold any weights."""
        ...

    @property
    def gpus_per_server(self) -> int:
        """The GPUs of each server that is started here."""
        ...

    @property
    def num_loaded(self) -> int:
        """How often a server that came back got weights."""
        ...

    def is_current(self, name: str) -> bool:
        """Return whether the version that a server reports is the current one."""
        ...

    def launch(self) -> None:
        """Start the processes of servers and return at once; `start` waits for them."""
        ...

    async def update(self, push: Callable[[WeightClient], Awaitable[None]], version: int) -> None:
        """Call `push(client)` for every server that is up; from then on weights `version` write. Pause before."""
        ...

    async def score_everywhere(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> list[NDArray[np.float32]]:
        """Return the scores of every server that is up."""
        ...

    async def free_memory(self) -> None:
        """Pause, and have servers free their memory for a learner on their GPUs until `update` and `resume`."""
        ...

    def why_no_adapter(self, layers: Sequence[str]) -> str:
        """Return why servers cannot write with an adapter of these layers; "" if they can."""
        ...

    def adapt(self, rank: int, targets: Sequence[str]) -> None:
        """Have servers launched so that they take adapters of this rank on these layers; call it before `launch`."""
        ...

    async def offer_adapter(self, adapter: Adapter) -> str:
        """Do as `update_adapter` with version 0, if every server takes the adapter; else return why one refuses it."""
        ...

    async def update_adapter(self, adapter: Adapter, version: int) -> None:
        """Let an adapter over the checkpoint write as weights `version`, on every server. Pause before."""
        ...


def servers_of(engine: Engine) -> ServersEngine | None:
    """Return an engine of servers as one; None for any other engine."""
    return engine if capabilities_of(engine).has_servers else None  # type: ignore[return-value]
