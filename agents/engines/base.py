"""The protocols of engines: `Engine` writes the model's turns, a `TrainableEngine` also takes new weights.

Engines: `agents.engines.hf` (embedded), `agents.engines.sglang` (servers), `agents.engines.scripted` (tests,
demonstrations), and those of users (`agents.engines.own`). `python -m agents.check_engine` checks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.engines.busy import BusyTime
from agents.types import Completion, GenerateRequest, ProcessedImage

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is made from.

    `model_path` is a folder in the format of Hugging Face, or a hub id. `dtype` is "float32" or "bfloat16", and
    `device` the torch device to compute on. At most `max_batch` sessions need to write at once; others may wait.
    `image_token_id` is the placeholder of images, None where the model reads none. Files of the engine's own, such as
    logs, belong into `log_folder`, which the engine makes if it needs it.

    Example: `EngineSetup("path/to/model", "bfloat16", "cuda:0", 4096, 64, 151655, Path("runs/x/engine"))`.
    """

    model_path: str
    dtype: str
    device: str
    context_length: int
    max_batch: int
    image_token_id: int | None
    log_folder: Path


#: How weights reach an engine: copied in memory, from a folder, as CUDA handles, over a process group, as adapters.
WeightPath = Literal["memory", "disk", "ipc", "nccl", "adapter"]


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do beyond its protocol. One without a property `capabilities` takes weights from disk alone.

    With "memory" it is a `MemoryEngine`. One that `has_servers` is a `ServersEngine` of
    `agents.engines.weight_servers`; it `frees_memory` if a learner on the GPUs of its servers may have their memory.
    One that `gives_kept_ids` obeys `SamplingParams.top_k`, `top_p` and `min_p`, and fills `Completion.kept_NK`.
    One that `gives_routes` obeys `GenerateRequest.num_routed`, and fills `Completion.routes_RLK`.
    """

    weights: frozenset[WeightPath] = frozenset({"disk"})
    has_servers: bool = False
    frees_memory: bool = False
    gives_kept_ids: bool = False
    gives_routes: bool = False


class Session(Protocol):
    """One episode's turns on an engine, which may keep what it has read from turn to turn."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Write one model turn. The request's ids extend what the session has read and written of the same
        `GenerateRequest.stream`, or are the same again after a call that was cancelled. Another stream begins anew.

        The ids are those that were drawn, verbatim: none is decoded and encoded again. The turn ends with the first
        stop id, which belongs to it ("stop"), or after `max_new_tokens` ("length"). The log-probs are those of
        `SamplingParams.distribution`, with a `top_k` among the ids of `kept_NK`: no other filter is in force.

        Cancelling the call also stops the writing. An exception ends the run; a turn that only this episode has lost
        is a completion with the finish "abort".
        """
        ...


class Engine(Protocol):
    """Writes model turns for many sessions concurrently.

    Example::

        async with engine.session() as session:
            completion = await session.generate(GenerateRequest(ids, images, 64, SamplingParams(stop_ids=(2,)), seed=7))
    """

    @property
    def context_length(self) -> int:
        """Longest stream, prompt included, in tokens."""
        ...

    @property
    def weight_version(self) -> int:
        """The version of the weights that write now; 0 before any update."""
        ...

    async def start(self) -> None:
        """Begin to run, on the event loop of the run; called once, before anything else."""
        ...

    def session(self) -> AbstractAsyncContextManager[Session]:
        """Open a session; leaving the context frees what it holds."""
        ...

    async def pause(self) -> None:
        """Stop writing, so that the weights can change; return once nothing is being written.

        Turns in flight keep their tokens. Their `generate` continues after `resume` under the new weights, and
        `Completion.versions` says which weights wrote which tokens.
        """
        ...

    async def resume(self) -> None:
        """Continue writing."""
        ...

    async def score(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> NDArray[np.float32]:
        """Return the log-prob of each id but the first, given those before it, at temperature 1; nothing suppressed."""
        ...

    async def close(self) -> None:
        """Free what the engine holds, such as connections and servers that it started."""
        ...


class TrainableEngine(Engine, Protocol):
    """An engine that takes new weights from disk."""

    async def update_from_disk(self, folder: Path, version: int) -> None:
        """Load the weights of a folder in the format of Hugging Face: config.json and safetensors, no tokenizer.

        From then on weights `version` write, and nothing that older weights have computed is used again: no keys and
        values of open sessions, no encoded images. Called while the engine is paused or idle. The folder may be
        deleted after the call.
        """
        ...


class MemoryEngine(Engine, Protocol):
    """An engine in this process, which copies new weights in memory."""

    @property
    def busy(self) -> BusyTime:
        """The seconds in which it wrote."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return its weights by their names in the network."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy weights; from then on `version` writes. Called while the engine is paused or idle."""
        ...


def capabilities_of(engine: Engine) -> Capabilities:
    """Return what an engine can do beyond its protocol."""
    return getattr(engine, "capabilities", Capabilities())


def memory_engine(engine: Engine) -> MemoryEngine | None:
    """Return an engine that copies weights in memory as one; None for any other engine."""
    return engine if "memory" in capabilities_of(engine).weights else None  # type: ignore[return-value]
