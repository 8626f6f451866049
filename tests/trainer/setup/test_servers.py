"""Claims about the servers that a configuration starts."""

from __future__ import annotations

import http.server
import json
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.engines.sglang import SGLangEngine
from agents.model.architectures import ModelFacts
from agents.rendering.renderer import Renderer
from agents.types import RouteShape
from envs.errors import UserError
from trainer.config.inputs import ModelConfig
from trainer.config.learner import ClusterConfig
from trainer.config.rollout import EngineConfig, RolloutConfig, ServersConfig
from trainer.config.run import RunConfig
from trainer.setup.engines import run_engine
from trainer.setup.model_source import OpenedModel
from trainer.setup.servers import check_server, engine_api_key, give_routes, server_settings


@pytest.mark.parametrize(
    ("options", "num_evaluated", "sessions"),
    [
        ({}, 0, 64),
        ({"oversample": 1.6}, 0, 13 * 8),
        ({}, 256, 256),
        ({"max_concurrent": 50}, 256, 50),
        ({"problems_per_step": 128, "group_size": 16}, 256, 1024),
    ],
)
def test_servers_are_started_for_the_episodes_that_run_at_once(
    options: dict[str, float], num_evaluated: int, sessions: int
) -> None:
    assert RolloutConfig(**options).max_sessions(num_evaluated) == sessions  # type: ignore[arg-type]


def test_what_the_run_asks_of_its_servers_reaches_their_settings(tmp_path: Path) -> None:
    config = ServersConfig(num_servers=2, mem_fraction=0.6, engine_args="--disable-cuda-graph --page-size=16")
    model = ModelConfig(dtype="bfloat16", context_length=1000)
    settings = server_settings(config, model, tmp_path, first_gpu=1, max_sessions=96, log_folder=tmp_path / "logs")
    assert (settings.num_servers, settings.mem_fraction, settings.first_gpu) == (2, 0.6, 1)
    assert (settings.dtype, settings.context_length, settings.max_sessions) == ("bfloat16", 1000, 96)
    assert settings.arguments == ("--disable-cuda-graph", "--page-size=16")


def opened(checkpoint: Path, renderer: Renderer) -> OpenedModel:
    return OpenedModel(str(checkpoint), ModelFacts.load(checkpoint), renderer)


@pytest.mark.parametrize(
    ("flags", "here", "share"),
    [
        ({}, 2, 0.8),  # on the GPU after the learner's
        ({}, 1, 0.4),
        ({"num_servers": 2}, 2, 0.4),  # the second one is on the learner's GPU
        ({"first_gpu": 0}, 2, 0.4),
        ({"placement": "colocate"}, 2, 0.4),
        ({"placement": "split"}, 2, 0.8),
        ({"mem_fraction": 0.55}, 1, 0.55),
    ],
)
def test_servers_take_more_of_a_gpu_that_no_learner_is_on(
    flags: dict[str, Any],
    here: int,
    share: float,
    checkpoint: Path,
    renderer: Renderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: here)
    config = RunConfig(engine=EngineConfig(engine="sglang", **flags), cluster=ClusterConfig(num_gpus=1))
    with ExitStack() as cleanup:
        engine = run_engine(config, opened(checkpoint, renderer), tmp_path, None, cleanup)
    assert isinstance(engine, SGLangEngine)
    assert engine.settings.mem_fraction == share


def test_started_servers_are_told_to_keep_their_cache(checkpoint: Path, renderer: Renderer, tmp_path: Path) -> None:
    ahead = RolloutConfig(max_staleness=1, keep_kv_cache=True)
    config = RunConfig(engine=EngineConfig(engine="sglang"), rollout=ahead)
    with ExitStack() as cleanup:
        engine = run_engine(config, opened(checkpoint, renderer), tmp_path, None, cleanup)
    assert isinstance(engine, SGLangEngine)
    assert engine.settings.keeps_kv_cache


@pytest.mark.parametrize(("flags", "is_told"), [({}, True), ({"routing": "free"}, False)], ids=["replay", "free"])
def test_started_servers_of_a_mixture_are_told_to_give_experts(
    flags: dict[str, Any], is_told: bool, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    config = RunConfig(engine=EngineConfig(engine="sglang"), rollout=RolloutConfig(**flags))
    source = opened(checkpoint, renderer)
    for shape in (None, RouteShape(3, 4, 2)):
        mixture = replace(source, facts=replace(source.facts, routes=shape))
        with ExitStack() as cleanup:
            engine = run_engine(config, mixture, tmp_path, None, cleanup)
        assert isinstance(engine, SGLangEngine)
        assert engine.settings.routes == (shape if is_told else None)
        assert engine.capabilities.gives_routes == (is_told and shape is not None)


@pytest.mark.parametrize(
    "info", [{"enable_return_routed_experts": True}, {"enable_return_routed_experts": False}, {}, 404]
)
def test_a_running_server_gives_experts_if_it_says_so(info: Any) -> None:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if isinstance(info, dict) else info)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(info).encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        config = ServersConfig(engine_url=(f"http://127.0.0.1:{server.server_port}",))
        assert give_routes(config) is (info == {"enable_return_routed_experts": True})
        server.shutdown()


@pytest.mark.parametrize("served", [[["x\x1b[2J"]], {"x": 1}, 5, "x"])
def test_a_server_that_names_no_list_of_networks_is_one_error(served: Any) -> None:
    facts = ModelFacts("qwen3", ("Qwen3ForCausalLM",), -1, 1, 4096, True)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/model_info" else 404)
            self.end_headers()
            if self.path == "/model_info":
                self.wfile.write(json.dumps({"architectures": served}).encode())

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(UserError, match="--engine-url: must"):
            check_server(f"http://127.0.0.1:{server.server_port}", facts)
        server.shutdown()


def test_a_key_may_come_from_a_pipe_which_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "key"
    os.mkfifo(pipe)
    config = ServersConfig(engine_api_key_file=pipe)
    threading.Thread(target=pipe.write_text, args=("secret\n",), daemon=True).start()
    assert engine_api_key(config) == "secret"
    monkeypatch.setattr("trainer.setup.servers.KEY_S", 0.2)
    with pytest.raises(UserError, match=r"--engine-api-key-file: must be readable, .* took longer than 0\.2 s"):
        engine_api_key(config)
