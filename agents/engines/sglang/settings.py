"""Where SGLang servers are, or how to start them."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agents.engines.sglang.routing import most_sessions
from agents.engines.sglang.server_arguments import (
    Argument,
    ServerFacts,
    choose_arguments,
    server_gpus,
    without_given,
)
from agents.engines.sglang.server_facts import Host, ServedModel

#: The port at which the processes of a server meet, counted from its own (`agents.engines.sglang.process`).
MEETING_PORT = 50


@dataclass(frozen=True)
class ServerPlace:
    """Where a started server listens, and its first GPU, as its process numbers them.

    At most `servers_on_gpu` servers share one of its GPUs.
    """

    port: int
    address: str = "127.0.0.1"
    first_gpu: int = 0
    servers_on_gpu: int = 1


@dataclass(frozen=True)
class SGLangSettings:
    """Where servers are, or how to start them.

    With `urls` the servers there are used and never stopped. Else `num_servers` servers of `model_path` are started,
    server k on GPU `first_gpu + k * tensor_parallel`; those on one GPU share `mem_fraction` of it. Together they serve
    `max_sessions` at once, of streams up to `context_length` (0: the model's). `command` starts a server and takes
    SGLang's arguments, which are chosen (`agents.engines.sglang.server_arguments`); `arguments` have the last word.
    Every call proves `api_key`. Started servers ask for it, and for a random key if there is none and `arguments` give
    none. While a started server writes for many, a turn waits up to `turn_wait_s` for others before it is read.
    `lora_targets` are the layers that servers adapt, with `lora_rank` rows at most; 0: none. If servers share GPUs with
    the learner, `frees_memory` has them free their memory while it trains. With `keeps_kv_cache`, a session that new
    weights come to goes on from what the older ones have read.
    """

    model_path: str = ""
    urls: tuple[str, ...] = ()
    num_servers: int = 1
    tensor_parallel: int = 1
    first_gpu: int = 0
    mem_fraction: float = 0.4
    dtype: str = "bfloat16"
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server")
    log_folder: Path = Path("runs")
    api_key: str = field(default="", repr=False)
    request_timeout_s: float = 600.0
    turn_wait_s: float = 0.2
    start_timeout_s: float = 600.0
    max_restarts: int = 3
    max_sessions: int = 256
    context_length: int = 0
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    frees_memory: bool = False
    keeps_kv_cache: bool = False

    def with_key(self) -> SGLangSettings:
        """Return these settings with the key that started servers ask for: the user's, or else a random one."""
        for place, word in enumerate(self.arguments):
            name, _, value = word.partition("=")
            if name == "--api-key":
                return replace(self, api_key=value or self.arguments[place + 1])
        if self.gives_key:
            return replace(self, api_key=self.api_key or secrets.token_hex(32))
        return self

    @property
    def gives_key(self) -> bool:
        """Whether started servers get their key from us.

        The user's arguments may give one, or a file of arguments, which may hold it; SGLang takes one such file.
        """
        return not {"--api-key", "--config"} & {word.partition("=")[0] for word in self.arguments}

    def place_here(self, number: int, port: int, host: Host) -> ServerPlace:
        """Return the place of the `number`-th server if all are on this host."""
        gpus = [server_gpus(self.first_gpu, k, self.tensor_parallel, host.num_gpus) for k in range(self.num_servers)]
        sharing = max(sum(index in other for other in gpus) for index in gpus[number])
        return ServerPlace(port, first_gpu=gpus[number][0], servers_on_gpu=sharing)

    def chosen_arguments(self, place: ServerPlace, host: Host) -> list[Argument]:
        """Return the arguments of a server at a place of a host that `arguments` do not decide.

        Raises:
            UserError: servers share a GPU whose memory is too small for them.
        """
        gpu = place.first_gpu
        own = {
            "--port": str(place.port),
            "--host": place.address,
            "--dtype": self.dtype,
            "--base-gpu-id": str(gpu),
            "--weight-version": "0",
            "--log-level": "warning",
        }
        facts = ServerFacts(
            gpu=host.gpus[gpu] if gpu < len(host.gpus) else None,
            has_fa3=host.has_fa3,
            checkpoint=ServedModel.read(self.model_path, self.dtype),
            dtype=self.dtype,
            context_length=self.context_length,
            sessions=self._most_sessions(),
            turn_wait_s=self.turn_wait_s,
            mem_fraction=self.mem_fraction,
            servers_on_gpu=place.servers_on_gpu,
            tensor_parallel=self.tensor_parallel,
        )
        chosen = [
            Argument(("--model-path", self.model_path), other_names=("--model",)),
            Argument(("--tp-size", str(self.tensor_parallel)), other_names=("--tensor-parallel-size",)),
            *map(Argument, own.items()),
            Argument(
                ("--nccl-port", str(place.port + MEETING_PORT)),
                "the port that SGLang chooses is anybody's until the weights are loaded",
                other_names=("--dp-size", "--data-parallel-size"),  # its workers need a port each
            ),
            *choose_arguments(facts),
            *self._lora_arguments(),
            *self._saver_arguments(host),
        ]
        if self.dtype != "float32":  # as `agents.model.policy.float32_logits`
            chosen.append(Argument(("--enable-fp32-lm-head",), "log-probs of the learner come from float32 logits"))
        return without_given(chosen, self.arguments)

    def _most_sessions(self) -> int:
        """Return how many sessions one server may have at once."""
        mean = self.max_sessions / self.num_servers
        return min(self.max_sessions, math.ceil(most_sessions(mean)))

    def launch_command(self, chosen: Sequence[Argument]) -> list[str]:
        """Return the command that starts a server with chosen arguments, and the user's."""
        words = [word for argument in chosen for word in argument.words]
        return [sys.executable, "-m", "agents.engines.sglang.launch", *self.command, *words, *self.arguments]

    def _lora_arguments(self) -> list[Argument]:
        """Return what a server needs to take adapters. It has two places: for the one that writes and for none."""
        if not self.lora_rank:
            return []
        return [
            Argument(("--enable-lora",), "the learner trains adapters, and sends those alone"),
            Argument(("--max-lora-rank", str(self.lora_rank))),
            Argument(("--lora-target-modules", *self.lora_targets)),
            Argument(("--max-loras-per-batch", "2")),
        ]

    def _saver_arguments(self, host: Host) -> list[Argument]:
        """Return what a server needs to free its memory; nothing where its host lacks the package."""
        saves = self.frees_memory and host.has_memory_saver
        if saves:
            return [Argument(("--enable-memory-saver",), "the learner trains on its GPU")]
        return []
