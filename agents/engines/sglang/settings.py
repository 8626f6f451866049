"""Where SGLang servers are, or how to start them."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from agents.types import RouteShape


@dataclass(frozen=True)
class ServerPlace:
    """Where a started server listens, and its first GPU, as its process numbers them."""

    port: int
    address: str = "127.0.0.1"
    first_gpu: int = 0


@dataclass(frozen=True)
class SGLangSettings:
    """Where servers are, or how to start them.

    With `urls` the servers there are used and never stopped. Else `num_servers` servers of `model_path` are started,
    server k on GPU `first_gpu + k * tensor_parallel`, of which it may take `mem_fraction`. Together they serve
    `max_sessions` at once, of streams up to `context_length` (0: the model's). `command` starts a server and takes
    SGLang's arguments, which are chosen (`agents.engines.sglang.server_arguments`); `arguments` have the last word.
    Every call proves `api_key`. Started servers ask for it, and for a random key if there is none and `arguments` give
    none. While a started server writes for many, a turn waits up to `turn_wait_s` for others before it is read.
    `lora_targets` are the layers that servers adapt, with `lora_rank` rows at most; 0: none. If servers share GPUs with
    the learner, `frees_memory` has them free their memory while it trains. With `keeps_kv_cache`, a session that new
    weights come to goes on from what the older ones have read. With `routes` servers say which experts of a network of
    that shape each token took.
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
    routes: RouteShape | None = None

    def with_key(self) -> SGLangSettings:
        """Return these settings with the key that started servers ask for: the user's, or else a random one."""
        # The last word on arguments is the user's, so it may be there and not in `api_key`.
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
