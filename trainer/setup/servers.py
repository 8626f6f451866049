"""SGLang servers of a run: whether those that run can be used, where those to start go, and their settings."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agents.engines.sglang import SGLangSettings
from agents.engines.sglang.client import ask
from agents.engines.sglang.releases import OLDEST, UNKNOWN, Release, dotted
from agents.engines.sglang.server_arguments import server_gpus
from agents.engines.weight_servers import ServerLost, ServerRefused
from agents.model.architectures import NO_IMAGE_TOKEN, ModelFacts
from envs.errors import UserError, first_line
from envs.execution.watchdog import bounded
from trainer.config.inputs import ModelConfig
from trainer.config.rollout import API_KEY_VARIABLE, EngineConfig, Placement, ServersConfig

#: How long a program may take to write a key into a pipe.
KEY_S = 10.0


def engine_api_key(engine: ServersConfig) -> str:
    """Return the API key of the servers, from its file or variable; empty if there is none.

    Raises:
        UserError: the file cannot be read, or holds no key.
    """
    file = engine.engine_api_key_file
    if file is None:
        return os.environ.get(API_KEY_VARIABLE, "").strip()
    try:
        with bounded(f"reading --engine-api-key-file {file}", KEY_S):  # it may be a pipe
            api_key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fix = f"give a file that holds the key ({first_line(error)})"
        raise UserError("--engine-api-key-file", "must be readable", str(file), fix) from error
    if not api_key.isascii() or len(api_key.split()) != 1:  # never shown: it may be most of a key
        rule = "must hold a key, one word of ASCII characters"
        fix = "write the key alone"
        raise UserError("--engine-api-key-file", rule, str(file), fix)
    return api_key


def check_servers(engine: ServersConfig, facts: ModelFacts) -> None:
    """Raise `UserError` if the key cannot be read, or a running server cannot be used."""
    api_key = engine_api_key(engine)
    for url in engine.engine_url:
        check_server(url, facts, api_key)


def check_server(url: str, facts: ModelFacts, api_key: str = "") -> None:
    """Raise `UserError` if a server does not answer, refuses the key, serves another architecture or changes ids."""
    try:
        served = tuple(map(str, ask_server(url, "model_info", api_key).get("architectures") or ()))
    except (ServerRefused, ServerLost, ValueError, TypeError) as error:
        if getattr(error, "status", 0) in (401, 403):
            got = "another key" if api_key else "none"
            fix = f"give its key with --engine-api-key-file or {API_KEY_VARIABLE}"
            raise UserError("--engine-api-key-file", f"must hold the key of {url}", got, fix) from error
        raise UserError("--engine-url", "must be a running SGLang server", url, f"start it ({error})") from error
    # A server of another kind would take the weights and write nonsense.
    if served and facts.architectures and served != facts.architectures:
        fix = f"serve the checkpoint that is trained, of {', '.join(facts.architectures)}"
        raise UserError("--engine-url", "must serve the kind of network that --model is", ", ".join(served), fix)
    release = read_release(url, api_key)
    # Text alone is sent as ids by every release.
    if facts.image_token_id != NO_IMAGE_TOKEN and not release.keeps_ids:
        rule = "must keep the ids of requests with images"
        got = f"SGLang {release.version}, which decodes them"
        raise UserError("--engine-url", rule, got, f"serve with SGLang {dotted(OLDEST)} or later")


def give_routes(engine: ServersConfig) -> bool:
    """Return whether every running server says which experts each token took; those to start are told to."""
    api_key = engine_api_key(engine)
    return all(_gives_routes(url, api_key) for url in engine.engine_url)


def _gives_routes(url: str, api_key: str) -> bool:
    try:
        return ask_server(url, "server_info", api_key).get("enable_return_routed_experts") is True
    except (ServerRefused, ServerLost, ValueError, TypeError):  # a gateway
        return False


def read_release(url: str, api_key: str) -> Release:
    """Return the release of SGLang that a server names."""
    try:
        return Release.of(ask_server(url, "server_info", api_key))
    except (ServerRefused, ServerLost, ValueError, TypeError):
        return UNKNOWN


def ask_server(url: str, path: str, api_key: str) -> dict[str, Any]:
    """Return what a server answers to a question."""
    return dict(ask(url, path, api_key))


def place_servers(config: ServersConfig, learner_gpus: Sequence[int] = (), placement: Placement = "auto") -> int:
    """Return the first GPU of the first server.

    Raises:
        UserError: this host has too few GPUs for a server or, if they are to have GPUs of their own, for all.
    """
    # 0 where the servers are on other hosts, or in tests: then nothing can be checked.
    here = torch.cuda.device_count()
    tensor_parallel = config.tensor_parallel
    after = max(learner_gpus, default=-1) + 1
    if placement == "split":
        if config.first_gpu is not None:
            first_gpu = config.first_gpu
        else:
            first_gpu = after
        needed = config.num_servers
        if here and (first_gpu < after or first_gpu + needed * tensor_parallel > here):
            rule = f"must leave {needed} servers {needed * tensor_parallel} of this host's {here} GPUs besides {after}"
            fix = "give less --num-gpus, --num-servers or --tensor-parallel, or --placement colocate"
            raise UserError("--placement split", f"{rule} of the learner", f"{here - first_gpu}", fix)
        return first_gpu
    if placement == "colocate":
        return min(learner_gpus, default=0)
    first_gpu = first_server_gpu(config.first_gpu, learner_gpus, here, tensor_parallel)
    if here and not config.engine_url and first_gpu + tensor_parallel > here:
        flag, given = ("--tensor-parallel", tensor_parallel) if tensor_parallel > here else ("--first-gpu", first_gpu)
        rule = f"must leave a server its {tensor_parallel} of this host's {here} GPUs"
        raise UserError(flag, rule, given, "give less")
    return first_gpu


def first_server_gpu(given: int | None, learner_gpus: Sequence[int], num_gpus: int, tensor_parallel: int = 1) -> int:
    """Return the first GPU of the first server, which uses `tensor_parallel` GPUs.

    It is the given GPU, or else the one after the learners' GPUs, or else GPU 0, which it then shares.

    >>> first_server_gpu(None, (0, 1), num_gpus=4), first_server_gpu(None, (0, 1), num_gpus=2)
    (2, 0)
    """
    if given is not None:
        return given
    after = max(learner_gpus, default=-1) + 1
    # One that does not fit after the learner shares GPU 0, which every host has.
    if after + tensor_parallel <= num_gpus:
        return after
    return 0


def shared_gpus(engine: EngineConfig, learner_gpus: Sequence[int], here: int) -> Counter[int]:
    """Return the number of started servers on each GPU that a learner keeps; `here` is the number of GPUs of this host.

    >>> shared_gpus(EngineConfig(num_servers=3), (0,), here=2)
    Counter({0: 1})
    """
    # With split they have GPUs of their own, with colocate they free their memory.
    if engine.placement != "auto":
        return Counter()
    first = first_server_gpu(engine.first_gpu, learner_gpus, here, engine.tensor_parallel)
    places = [server_gpus(first, number, engine.tensor_parallel, here) for number in range(engine.num_servers)]
    return Counter(gpu for place in places for gpu in place if gpu in learner_gpus)


def server_settings(
    engine: ServersConfig,
    model: ModelConfig,
    model_path: Path | str,
    first_gpu: int,
    max_sessions: int,
    log_folder: Path,
    beside_learner: bool = False,
) -> SGLangSettings:
    """Return the settings to start servers with, for `max_sessions` at once together, or to connect to them."""
    return SGLangSettings(
        model_path=str(model_path),
        urls=engine.engine_url,
        num_servers=engine.num_servers,
        tensor_parallel=engine.tensor_parallel,
        first_gpu=first_gpu,
        mem_fraction=engine.memory_share(beside_learner),
        dtype=model.dtype,
        arguments=tuple(shlex.split(engine.engine_args)),
        log_folder=log_folder,
        api_key=engine_api_key(engine),
        request_timeout_s=engine.request_timeout_s,
        turn_wait_s=engine.turn_wait_s,
        max_sessions=max_sessions,
        context_length=model.context_length,
    )
