"""Claims about the SGLang engine, against servers that speak its protocol and write with a real network."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from agents.engines.sglang import SGLangEngine, SGLangSettings, launch, servers
from agents.engines.sglang.client import SGLangClient
from agents.engines.sglang.images import salted_hash
from agents.engines.sglang.payloads import collapse
from agents.engines.sglang.process import LocalProcess, ReservedPorts
from agents.engines.weight_servers import EngineDown, ServerRefused
from agents.model.architectures import ModelFacts
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import kept_ids, sampling_logprobs, stream_logprobs
from agents.rendering.renderer import Renderer
from agents.rollout.episode import ABORT, Episode, Limits
from agents.rollout.groups import GroupProblem, RolloutOptions
from agents.rollout.manager import RolloutManager, rollout_groups
from agents.types import Completion, EndReason, GenerateRequest, SamplingDistribution, SamplingParams, Trajectory
from envs.env import Env
from envs.errors import UserError
from envs.spec import EnvLimits
from tests.agents.engines.sglang_server import NEW, OLD
from tests.builders import full_logprobs, mixed_logprobs, sampling, versions_of
from tests.prompts import make_image, question, sample
from tests.servers import emulator, serving
from trainer.setup.servers import check_server

Answer = tuple[dict[str, Any], bool, dict[str, Any]]
TIME_S = 90
#: A program that starts at once, answers that it is there to those with its key, and never writes a turn.
SILENT = """
import http.server, json, sys
key = "Bearer " + json.load(open(sys.argv[sys.argv.index("--config") + 1]))["api-key"]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == key else 401)
        self.send_header("Content-Type", "application/json"); self.end_headers()
        self.wfile.write(b'{"weight_version": "0"}')
    def do_POST(self):
        __import__("time").sleep(3600)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
#: Every 8th token ends a turn, so that random networks play several.
STOP_SOON = tuple(range(0, 600, 8))


class ImageEnv(Env):
    """Shows another image after every turn, and never ends by itself."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> Answer:
        self.turns += 1
        return {"obs_str": "look", "image": make_image(96, 64, seed=self.turns)}, False, {}

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        parts = [{"type": "text", "text": observation["obs_str"]}, {"type": "image", "image": observation["image"]}]
        return {"role": "user", "content": parts}

    def reward(self, final_text: str) -> float:
        return float(len(final_text) % 3)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers here start in a moment, so nothing waits for them as long as in a run."""
    monkeypatch.setattr(servers, "POLL_S", 0.05)
    monkeypatch.setattr(servers, "WATCH_S", 0.2)
    monkeypatch.setattr("agents.engines.sglang.engine.POLL_S", 0.01)


@pytest.fixture(scope="module", params=[OLD, NEW])
def shared_server(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """One emulator of each release for all tests that leave it alive."""
    ports = ReservedPorts(1)
    (port,) = ports.numbers
    where = ("--model-path", str(checkpoint), "--port", str(port), "--release", request.param)
    process = subprocess.Popen([*emulator(), *where])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        ports.release()


@pytest.fixture
def url(shared_server: str) -> str:
    """The address of a server that is as if just started; found by `SGLangSettings(urls=(url,))`."""
    deadline = time.monotonic() + TIME_S
    while True:
        try:
            tell(shared_server, "reset", slow_s=0.0)
            return shared_server
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def tell(url: str, where: str, **body: Any) -> None:
    """Post to the emulator's own addresses."""
    request = urllib.request.Request(f"{url}/{where}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=20).close()


def misbehave(url: str, path: str, *faults: str) -> None:
    """Have the next calls of a path go wrong."""
    tell(url, "misbehave", path=path, faults=faults)


def external(*urls: str, **options: Any) -> SGLangSettings:
    return SGLangSettings(urls=urls, start_timeout_s=20, request_timeout_s=30, **options)


def settings(checkpoint: Path, folder: Path, servers: int = 1, **options: Any) -> SGLangSettings:
    slow = ("--slow-s", str(options.pop("slow_s", 0.0)))
    return SGLangSettings(
        str(checkpoint), num_servers=servers, command=emulator(), arguments=slow, log_folder=folder, **options
    )


def with_engine(
    given: SGLangSettings, renderer: Renderer, play: Callable[[SGLangEngine], Awaitable[Any]], limit_s: float = TIME_S
) -> Any:
    async def run() -> Any:
        engine = SGLangEngine(given, renderer.image_token_id)
        try:
            await engine.start()
            return await play(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), limit_s))


def episode(engine: SGLangEngine, renderer: Renderer, max_turns: int = 3) -> Episode:
    params = SamplingParams(1.0, STOP_SOON, renderer.suppressed_ids)
    return Episode(engine, renderer, Limits(max_turns, 400, EnvLimits(inline=True)), params)


async def play_groups(
    engine: SGLangEngine, renderer: Renderer, problems: int, group: int, on_episode: Callable[[Trajectory], None]
) -> list[Trajectory]:
    samples = [sample(f"Find {n}.", make_image(seed=n), id=str(n)) for n in range(problems)]
    groups = await rollout_groups(
        episode(engine, renderer),
        samples,
        lambda *_: ImageEnv(),
        None,
        group,
        seed=1,
        on_episode=on_episode,
    )
    return [trajectory for each in groups for trajectory in each.trajectories]


def wrong(network: PolicyModel, trajectory: Trajectory, suppressed_ids: Sequence[int]) -> float:
    """Return the largest difference between a trajectory's log-probs and the network's own."""
    ids = trajectory.ids_T.tolist()
    scores = stream_logprobs(
        network, ids, trajectory.images, "cpu", distribution=SamplingDistribution(1.0, suppressed_ids)
    )
    return float(np.abs(scores - trajectory.logprobs_T[1:])[trajectory.mask_T[1:]].max())


def test_two_runs_of_one_seed_use_different_ports() -> None:
    chosen = []
    for _ in range(2):
        random.seed(0)  # as a run does
        chosen.append(ReservedPorts(3))
    assert not set(chosen[0].numbers) & set(chosen[1].numbers)
    for ports in chosen:
        ports.release()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports are not held")
def test_a_port_is_chosen_once_while_its_server_starts_listens_or_starts_again() -> None:
    def is_chosen(port: int) -> bool:
        others = ReservedPorts(1, preferred=[port])
        others.release()
        return others.numbers == [port]

    ports = ReservedPorts(1)
    (port,) = ports.numbers
    for _ in range(2):
        assert not is_chosen(port)
        address = ("127.0.0.1", port)
        with socket.create_server(address), socket.create_connection(address):  # as asyncio and uvicorn make theirs
            assert not is_chosen(port)
    ports.release()
    assert is_chosen(port)


def test_placeholders_are_collapsed_to_one_per_image(renderer: Renderer) -> None:
    rendered = renderer.prompt(question("Compare.", make_image(64, 64), make_image(96, 64, seed=1)))
    short = collapse(rendered.ids, rendered.images, renderer.image_token_id)
    assert short.count(renderer.image_token_id) == 2  # type: ignore[arg-type]
    assert len(short) == len(rendered.ids) - sum(image.num_tokens - 1 for image in rendered.images)


def test_hashes_of_a_image_change_with_the_weights_and_fit_a_signed_64_bit_number(renderer: Renderer) -> None:
    image = renderer.prompt(question("?", make_image())).images[0]
    hashes = {salted_hash(image, f"run/{version}") for version in range(50)}
    assert len(hashes) == 50
    assert all(0 <= int(text, 16) < 2**63 for text in hashes)


def test_episodes_on_a_server_have_the_networks_own_logprobs_and_our_prompt_lengths(
    url: str, renderer: Renderer, model: PolicyModel
) -> None:
    async def play(engine: SGLangEngine) -> list[Trajectory]:
        loop = episode(engine, renderer)
        problem = sample("Find x.", make_image(), id="x")
        return [await loop.run(problem, ImageEnv, seed=seed) for seed in range(4)]

    trajectories = with_engine(external(url), renderer, play)
    assert any(len(t.turns) == 3 and len(t.images) == 3 for t in trajectories), trajectories
    for trajectory in trajectories:
        assert trajectory.end_reason.is_valid, trajectory
        assert wrong(model, trajectory, renderer.suppressed_ids) < 1e-4
        assert set(versions_of(trajectory)[trajectory.mask_T].tolist()) == {0}


@pytest.mark.parametrize("cuts", [{"top_k": 20, "top_p": 0.8}, {"top_k": 256}, {"top_k": 30, "min_p": 0.1}], ids=str)
def test_what_tokens_of_a_server_were_drawn_from_is_what_the_network_says(
    cuts: dict[str, Any], url: str, renderer: Renderer, model: PolicyModel
) -> None:
    params = replace(sampling(renderer), stop_ids=STOP_SOON, **cuts)

    async def play(engine: SGLangEngine) -> list[Trajectory]:
        loop = Episode(engine, renderer, Limits(3, 400, EnvLimits(inline=True)), params)
        problem = sample("Find x.", make_image(), id="x")
        return [await loop.run(problem, ImageEnv, seed=seed) for seed in range(3)]

    for trajectory in with_engine(external(url), renderer, play):
        assert trajectory.end_reason.is_valid and trajectory.kept_NK is not None, trajectory
        with torch.inference_mode():
            table = full_logprobs(model, trajectory.ids_T.tolist(), trajectory.images, params)
        places = np.flatnonzero(trajectory.mask_T)
        rows_NV = table[places - 1]
        expected_NK = kept_ids(rows_NV, params)
        assert [set(row) for row in trajectory.kept_NK.tolist()] == [set(row) for row in expected_NK.tolist()]
        own = sampling_logprobs(rows_NV, SamplingDistribution(), expected_NK)
        own_N = own.gather(-1, torch.from_numpy(trajectory.ids_T[places])[:, None])[:, 0]
        assert np.abs(own_N.numpy() - trajectory.logprobs_T[places]).max() < 1e-4


def changed(model: PolicyModel, folder: Path, renderer: Renderer) -> PolicyModel:
    """Make weights that differ in every tensor, vision tower included, and save them."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std().nan_to_num(0.0) * 0.3)
    model.save(folder, torch.float32)
    renderer.save(folder)
    return model


@pytest.mark.slow
def test_a_server_killed_in_mid_step_costs_and_doubles_no_episode_and_comes_back_with_the_current_weights(
    checkpoint: Path, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    new = changed(model, tmp_path / "new", renderer)
    rendered = renderer.prompt(question("Find x.", make_image()))
    ended: Counter[tuple[str, int]] = Counter()

    async def play(engine: SGLangEngine) -> tuple[list[Trajectory], list[Any]]:
        engine.current_weights = lambda: tmp_path / "new"
        await engine.update_from_disk(tmp_path / "new", version=1)

        async def kill() -> None:
            while engine.num_requests < 30:
                await asyncio.sleep(0.01)
            victim = engine.servers.all[0].process
            assert isinstance(victim, LocalProcess)
            os.killpg(victim.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        count = lambda t: ended.update([(t.sample_id, t.sample_index)])  # noqa: E731
        trajectories = await play_groups(engine, renderer, problems=6, group=4, on_episode=count)
        await killing
        assert engine.num_retried > 0, "the kill must have cut requests off"
        assert any("server 0 lost" in event for event in engine.servers.events)
        await until(lambda: len(engine.servers.up) == 2)
        assert [server.num_restarts for server in engine.servers.all] == [1, 0]
        return trajectories, await engine.score_everywhere(rendered.ids, rendered.images)

    trajectories, scores = with_engine(settings(checkpoint, tmp_path, servers=2, slow_s=0.05), renderer, play)
    assert len(ended) == 24
    assert set(ended.values()) == {1}
    assert {(t.sample_id, t.sample_index) for t in trajectories} == set(ended)
    assert all(t.end_reason.is_valid for t in trajectories), Counter(t.end_reason for t in trajectories)
    assert {version for t in trajectories for version in versions_of(t)[t.mask_T].tolist()} == {1}
    right = stream_logprobs(new, rendered.ids, rendered.images, "cpu")
    assert [np.abs(each - right).max() < 1e-4 for each in scores] == [True, True]


def test_a_turn_goes_on_after_a_pause_under_the_new_weights(
    url: str, checkpoint: Path, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    tell(url, "reset", slow_s=0.15)
    old = PolicyModel.load(checkpoint)
    new = changed(model, tmp_path / "new", renderer)
    request = short_turn(renderer, 40)

    async def play(engine: SGLangEngine) -> Completion:
        async with engine.session() as session:
            writing = asyncio.create_task(session.generate(request))
            await asyncio.sleep(0.5)
            await engine.pause()
            await asyncio.sleep(0.1)
            assert not writing.done()
            await engine.update_from_disk(tmp_path / "new", version=1)
            await engine.resume()
            return await writing

    completion = with_engine(external(url), renderer, play)
    (first, early), (second, late) = completion.versions
    assert (first, second, early + late) == (0, 1, 40)
    assert early > 0
    assert late > 0
    given = np.array(completion.logprobs)
    assert np.abs(written_logprobs(old, request, completion)[:early] - given[:early]).max() < 1e-4
    assert np.abs(written_logprobs(new, request, completion)[early:] - given[early:]).max() < 1e-4


@pytest.mark.parametrize("keeps", [True, False])
def test_with_its_cache_kept_a_turn_goes_on_from_what_older_weights_have_read(
    keeps: bool, checkpoint: Path, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    """Computed by Transformers alone. A session that begins after the push has nothing to do with the older weights."""
    new = changed(model, tmp_path / "new", renderer)
    rendered = renderer.prompt(question("Find x."))
    params = SamplingParams(suppressed_ids=renderer.suppressed_ids)
    request = GenerateRequest(rendered.ids, (), 40, params, seed=1)

    async def play(engine: SGLangEngine) -> tuple[Completion, Completion, Completion]:
        async with engine.session() as session:
            writing = asyncio.create_task(session.generate(request))
            await asyncio.sleep(0.5)
            await engine.pause()
            await engine.update_from_disk(tmp_path / "new", version=1)
            await engine.resume()
            done = await writing
            ids = (*request.ids, *done.ids, *request.ids)
            return done, await session.generate(replace(request, ids=ids)), await write(engine, request)

    with serving(checkpoint, "--has-cache", "--slow-s", "0.15") as url:
        done, second, later = with_engine(external(url, keeps_kv_cache=keeps), renderer, play)
    (_, early), (_, late) = done.versions
    assert early > 0
    assert late > 0
    pure = written_logprobs(new, request, later)
    assert (later.versions, later.num_cached) == (((1, 40),), 0)
    assert np.abs(pure - np.array(later.logprobs)).max() < 1e-4
    stream = (*request.ids, *done.ids, *request.ids, *second.ids)
    num_old, readers = len(request.ids) + early - 1, (checkpoint if keeps else tmp_path / "new", tmp_path / "new")
    expected = mixed_logprobs(*readers, stream, num_old, params)
    first = len(request.ids) - 1
    for start, completion, skip in ((first, done, early), (len(stream) - 41, second, 0)):
        rows = torch.arange(start + skip, start + 40)
        given = torch.tensor(completion.logprobs[skip:])
        torch.testing.assert_close(given, expected[rows, torch.tensor(completion.ids[skip:])], rtol=0, atol=1e-4)
    assert second.num_cached >= len(request.ids) + 36


def test_a_session_does_not_go_on_from_weights_that_the_run_has_left(
    checkpoint: Path, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    """The second push is of the version before, as after a restart of the learner."""
    new = changed(model, tmp_path / "new", renderer)
    request = short_turn(renderer, 12)

    async def play(engine: SGLangEngine) -> list[Completion]:
        turns = []
        async with engine.session() as session:
            for folder, version in ((checkpoint, 1), (checkpoint, 2), (tmp_path / "new", 2)):
                await engine.pause()
                await engine.update_from_disk(folder, version)
                await engine.resume()
                ids = (*request.ids, *(token for turn in turns for token in turn.ids))
                turns.append(await session.generate(replace(request, ids=ids)))
        return turns

    with serving(checkpoint, "--has-cache") as url:
        first, second, third = with_engine(external(url, keeps_kv_cache=True), renderer, play)
    assert (first.num_cached, third.num_cached) == (0, 0)
    assert second.num_cached >= len(request.ids)
    asked = replace(request, ids=(*request.ids, *first.ids, *second.ids))
    assert np.abs(written_logprobs(new, asked, third) - np.array(third.logprobs)).max() < 1e-4


def test_weights_given_as_tensors_score_a_image_that_older_weights_have_seen(
    url: str, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    new = changed(model, tmp_path / "new", renderer)
    named = [(name.removeprefix("backbone."), value.detach()) for name, value in new.named_parameters()]
    payloads = [base64.b64encode(pickle.dumps(part)).decode() for part in (named[::2], named[1::2])]
    rendered = renderer.prompt(question("Find x.", make_image()))

    async def play(engine: SGLangEngine) -> tuple[np.ndarray, np.ndarray]:
        old = await engine.score(rendered.ids, rendered.images)
        for version in (1, 2):
            await engine.update(partial(SGLangClient.update_from_tensors, payloads=payloads, version=version), version)
        return old, await engine.score(rendered.ids, rendered.images)

    old, given = with_engine(external(url), renderer, play)
    assert np.abs(old - given).max() > 0.01
    expected = stream_logprobs(new, list(rendered.ids), rendered.images, "cpu")
    assert np.abs(given - expected).max() < 1e-4


def test_cancelling_a_turn_ends_it_on_the_server_too(url: str, checkpoint: Path, renderer: Renderer) -> None:
    tell(url, "reset", slow_s=0.05)

    async def play(engine: SGLangEngine) -> float:
        async with engine.session() as session:
            endless = asyncio.create_task(session.generate(short_turn(renderer, 2000)))
            await asyncio.sleep(0.3)
            endless.cancel()
            await asyncio.gather(endless, return_exceptions=True)
        started = time.monotonic()
        await engine.update_from_disk(checkpoint, version=1)  # waits until nothing is being written
        return time.monotonic() - started

    assert with_engine(external(url), renderer, play) < 10


def test_a_server_with_other_weights_than_it_should_have_is_brought_up_to_date(
    url: str, checkpoint: Path, renderer: Renderer
) -> None:
    rendered = renderer.prompt(question("Find x.", make_image()))

    async def play(engine: SGLangEngine) -> Completion:
        engine.current_weights = lambda: checkpoint
        engine.weight_version = 4  # nobody told the server
        salt = engine.salt
        async with engine.session() as session:
            request = GenerateRequest(rendered.ids, rendered.images, 4, sampling(renderer), seed=1)
            completion = await session.generate(request)
        assert engine.salt != salt, "what the older weights encoded in between must not be found again"
        return completion

    completion = with_engine(external(url), renderer, play)
    assert completion.versions == ((4, len(completion.ids)),)


def test_a_server_that_cannot_start_is_a_users_error_with_the_end_of_its_log(
    renderer: Renderer, tmp_path: Path
) -> None:
    program = "import sys; sys.exit('no model in nowhere')"
    given = SGLangSettings(command=(sys.executable, "-c", program), log_folder=tmp_path)
    with pytest.raises(UserError, match=r"must start a server(.|\n)*nowhere"):
        with_engine(given, renderer, lambda engine: asyncio.sleep(0))


def test_a_server_that_does_not_come_up_in_time_is_named_with_its_last_answer(
    renderer: Renderer, tmp_path: Path
) -> None:
    deaf = SILENT.replace("== key", "is key")
    given = SGLangSettings(command=(sys.executable, "-c", deaf), log_folder=tmp_path, start_timeout_s=1.5)
    with pytest.raises(UserError, match=r"got no answer in 1.5 s: http://\S+/model_info: status 401"):
        with_engine(given, renderer, lambda engine: asyncio.sleep(0))


def test_an_address_where_nobody_answers_is_a_users_error(renderer: Renderer) -> None:
    given = SGLangSettings(urls=("http://127.0.0.1:9",), start_timeout_s=1.0)
    with pytest.raises(UserError, match="--engine-url"):
        with_engine(given, renderer, lambda engine: asyncio.sleep(0))


def test_when_no_server_can_be_brought_back_the_engine_says_so(renderer: Renderer, tmp_path: Path) -> None:
    given = SGLangSettings(command=(sys.executable, "-c", SILENT), log_folder=tmp_path, max_restarts=0)
    rendered = renderer.prompt(question("Find x."))

    async def play(engine: SGLangEngine) -> None:
        process = engine.servers.all[0].process
        assert isinstance(process, LocalProcess)
        os.killpg(process.pid, signal.SIGKILL)
        process.popen.wait()
        async with engine.session() as session:
            await session.generate(GenerateRequest(rendered.ids, (), 4, sampling(renderer), seed=1))

    with pytest.raises(EngineDown, match="no SGLang server is left"):
        with_engine(given, renderer, play)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_servers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    parent = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, {launch.__file__!r}, sys.executable, '-c', {child!r}], "
        "start_new_session=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child_pid = int(pid_file.read_text())
    process.kill()
    process.wait()
    while Path(f"/proc/{child_pid}").exists() and time.monotonic() < deadline:
        status = Path(f"/proc/{child_pid}/stat").read_text().split()
        if status[2] == "Z":  # ended; nobody has collected it yet
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child_pid}").exists(), "the server has outlived its trainer"


def test_prompts_spread_over_servers(url: str, renderer: Renderer) -> None:
    async def play(engine: SGLangEngine) -> list[int]:
        async with engine.session() as one, engine.session() as other:
            rendered = [renderer.prompt(question(text)) for text in ("Find x.", "Find y.")]
            requests = [GenerateRequest(each.ids, (), 2, sampling(renderer), seed=1) for each in rendered]
            await asyncio.gather(one.generate(requests[0]), other.generate(requests[1]))
            return [server.num_sessions for server in engine.servers.all]

    assert with_engine(external(url, url), renderer, play) == [1, 1]


# Servers that misbehave -----------------------------------------------------------------------------------------------


def short_turn(renderer: Renderer, max_new_tokens: int = 8) -> GenerateRequest:
    rendered = renderer.prompt(question("Find x.", make_image()))
    params = SamplingParams(suppressed_ids=renderer.suppressed_ids)
    return GenerateRequest(rendered.ids, rendered.images, max_new_tokens, params, seed=1)


def written_logprobs(network: PolicyModel, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Return the network's own log-probs of what was written to a request."""
    ids = [*request.ids, *completion.ids]
    scores = stream_logprobs(network, ids, request.images, "cpu", distribution=request.sampling.distribution)
    return scores[len(request.ids) - 1 :]


async def write(engine: SGLangEngine, request: GenerateRequest) -> Completion:
    async with engine.session() as session:
        return await session.generate(request)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "fault",
    [
        "status 500",
        "hang up",
        "not json",
        "answer without facts",
        "answer with one log-prob less",
        "answer of other weights",
        "answer aborted",
    ],
)
def test_an_answer_that_is_none_is_asked_for_again(fault: str, url: str, renderer: Renderer) -> None:
    misbehave(url, "generate", fault, fault)
    completion = with_engine(external(url), renderer, lambda engine: write(engine, short_turn(renderer)))
    assert completion.versions == ((0, 8),)
    assert (len(completion.ids), len(completion.logprobs), completion.finish) == (8, 8, "length")
    assert completion.prompt_length == len(short_turn(renderer).ids)


def end_reasons(url: str, renderer: Renderer, episodes: int) -> Counter[EndReason]:
    async def play(engine: SGLangEngine) -> Counter[EndReason]:
        loop = episode(engine, renderer, max_turns=1)
        problem = sample("Find x.", make_image(), id="x")
        runs = [loop.run(problem, ImageEnv, seed=seed) for seed in range(episodes)]
        return Counter(t.end_reason if not t.end_reason.is_valid else "valid" for t in await asyncio.gather(*runs))

    return with_engine(external(url), renderer, play)


@pytest.mark.parametrize("fault", ["answer with another count", "answer with null log-probs"])
def test_an_answer_that_breaks_the_stream_ends_its_episode_alone(fault: str, url: str, renderer: Renderer) -> None:
    misbehave(url, "generate", fault)
    assert end_reasons(url, renderer, 4) == {"valid": 3, EndReason.INVALID_STREAM: 1}


def test_a_turn_that_is_refused_ends_its_episode_alone(url: str, renderer: Renderer) -> None:
    misbehave(url, "generate", "status 400")
    assert end_reasons(url, renderer, 4) == {"valid": 3, EndReason.ABORTED: 1}


def test_servers_that_refuse_every_turn_end_the_run_and_say_why(url: str, renderer: Renderer) -> None:
    misbehave(url, "generate", *["status 400"] * 200)
    with pytest.raises(EngineDown, match="status 400: as was asked for"):
        end_reasons(url, renderer, 150)


def test_a_turn_that_found_no_server_does_not_write_while_the_engine_is_paused(
    url: str, checkpoint: Path, renderer: Renderer
) -> None:
    async def play(engine: SGLangEngine) -> Completion:
        misbehave(url, "generate", "status 500")
        misbehave(url, "model_info", *["status 500"] * 2)
        writing = asyncio.create_task(write(engine, short_turn(renderer)))
        await until(lambda: not engine.servers.up)
        await engine.pause()
        await engine.servers.pick()  # the server is back
        asked = engine.num_requests
        await asyncio.sleep(0.3)
        assert engine.num_requests == asked
        await engine.update_from_disk(checkpoint, version=1)
        await engine.resume()
        return await writing

    assert with_engine(external(url), renderer, play).versions == ((1, 8),)


def test_a_pause_also_ends_what_is_written_on_a_server_that_is_being_mended(url: str, renderer: Renderer) -> None:
    async def play(engine: SGLangEngine) -> float:
        tell(url, "reset", slow_s=0.5)
        writing = asyncio.create_task(write(engine, short_turn(renderer, 80)))
        await asyncio.sleep(0.3)
        misbehave(url, "model_info", *["status 500"] * 100)
        engine.servers.report_lost(engine.servers.all[0], "for the test")
        started = time.monotonic()
        await engine.pause()
        seconds = time.monotonic() - started
        writing.cancel()
        return seconds

    assert with_engine(external(url), renderer, play) < 2


def test_a_pause_over_a_server_that_refuses_it_waits_for_its_turns(url: str, renderer: Renderer) -> None:
    async def play(engine: SGLangEngine) -> Completion:
        tell(url, "reset", slow_s=0.1)
        writing = asyncio.create_task(write(engine, short_turn(renderer, 40)))
        await asyncio.sleep(0.3)
        misbehave(url, "abort_request", "status 400")
        await engine.pause()
        await engine.resume()
        return await writing

    assert with_engine(external(url), renderer, play).versions == ((0, 40),)


@pytest.mark.parametrize("fault", ["status 400", "status 500", "hang up"])
def test_a_server_that_does_not_take_new_weights_is_mended_and_the_other_goes_on(
    fault: str, url: str, checkpoint: Path, renderer: Renderer
) -> None:
    async def play(engine: SGLangEngine) -> Completion:
        engine.current_weights = lambda: checkpoint
        misbehave(url, "update_weights_from_disk", fault)
        await engine.pause()
        await engine.update_from_disk(checkpoint, version=1)
        await engine.resume()
        completion = await write(engine, short_turn(renderer))
        await until(lambda: len(engine.servers.up) == 2)
        return completion

    assert with_engine(external(url, url), renderer, play).versions == ((1, 8),)


def test_a_server_lost_again_while_it_is_mended_is_mended_again(url: str, checkpoint: Path, renderer: Renderer) -> None:
    async def play(engine: SGLangEngine) -> Completion:
        engine.current_weights = lambda: checkpoint
        engine.weight_version = 4  # nobody told the server
        misbehave(url, "update_weights_from_disk", "status 500", "status 400")
        return await write(engine, short_turn(renderer))

    assert with_engine(external(url), renderer, play).versions == ((4, 8),)


def test_weights_that_are_replaced_while_a_server_loads_them_do_not_cost_the_server(
    url: str, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    async def play(engine: SGLangEngine) -> tuple[Completion, list[str]]:
        def folder() -> Path:
            if engine.weight_version == 5:
                return checkpoint
            engine.weight_version = 5
            return tmp_path / "deleted"

        engine.current_weights, engine.weight_version = folder, 4
        completion = await write(engine, short_turn(renderer))
        return completion, engine.servers.events

    completion, events = with_engine(external(url), renderer, play)
    assert completion.versions == ((5, 8),)
    assert len(events) == 2 and events[-1] == "server 0 is back", events


def test_a_server_that_is_back_waits_for_a_learner_that_is_being_started_again(
    url: str, checkpoint: Path, renderer: Renderer
) -> None:
    failures = [RuntimeError("the learner is lost")] * 20

    async def play(engine: SGLangEngine) -> tuple[Completion, list[str]]:
        def folder() -> Path:
            if failures:
                raise failures.pop()
            return checkpoint

        engine.current_weights, engine.weight_version = folder, 4
        return await write(engine, short_turn(renderer)), engine.servers.events

    completion, events = with_engine(external(url), renderer, play)
    assert completion.versions == ((4, 8),)
    assert events[-2:] == ["a server that is back waits for weights: the learner is lost", "server 0 is back"]


def test_a_server_does_not_wait_forever_for_weights(
    url: str, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.engines.sglang.engine.WEIGHTS_WAIT_S", 0.1)

    async def play(engine: SGLangEngine) -> None:
        def folder() -> Path:
            raise RuntimeError("the learner is lost")

        engine.current_weights, engine.weight_version = folder, 4
        await write(engine, short_turn(renderer))

    with pytest.raises(EngineDown, match="given up: the learner is lost"):
        with_engine(external(url), renderer, play)


def test_a_server_restarted_by_others_after_it_was_given_weights_0_is_found_out(
    url: str, checkpoint: Path, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    new = changed(model, tmp_path / "new", renderer)
    request = short_turn(renderer)

    async def play(engine: SGLangEngine) -> Completion:
        engine.current_weights = lambda: tmp_path / "new"
        await engine.update_from_disk(tmp_path / "new", version=0)
        tell(url, "reset", slow_s=0.0)
        return await write(engine, request)

    completion = with_engine(external(url), renderer, play)
    assert np.abs(written_logprobs(new, request, completion) - np.array(completion.logprobs)).max() < 1e-4


def test_a_server_that_hangs_is_left_by_all_its_turns_as_soon_as_one_finds_out(
    url: str, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.engines.sglang.client.ALIVE_S", 0.3)

    async def play(engine: SGLangEngine) -> float:
        misbehave(url, "generate", "hang")
        misbehave(url, "model_info", "hang")
        started = time.monotonic()
        writing = asyncio.create_task(write(engine, short_turn(renderer)))
        await asyncio.sleep(0.2)
        engine.servers.report_lost(engine.servers.all[0], "another turn got no answer")
        assert len((await writing).ids) == 8
        return time.monotonic() - started

    assert with_engine(external(url), renderer, play) < 10


def test_an_episode_aborted_while_no_server_is_up_ends_at_once(url: str, renderer: Renderer) -> None:
    async def play(engine: SGLangEngine) -> Trajectory:
        misbehave(url, "generate", "status 500")
        misbehave(url, "model_info", *["status 500"] * 400)
        problem = sample("Find x.", make_image(), id="x")
        running = asyncio.create_task(episode(engine, renderer).run(problem, ImageEnv, seed=1))
        await until(lambda: not engine.servers.up)
        await asyncio.sleep(0.3)
        running.cancel(ABORT)
        return await asyncio.wait_for(running, 2)

    assert with_engine(external(url), renderer, play).end_reason is EndReason.ABORTED


def test_scores_are_asked_for_again_and_come_from_every_server_that_is_up(
    url: str, renderer: Renderer, model: PolicyModel
) -> None:
    rendered = renderer.prompt(question("Find x.", make_image()))

    async def play(engine: SGLangEngine) -> tuple[Any, Any]:
        both = await engine.score_everywhere(rendered.ids, rendered.images)
        misbehave(url, "generate", "status 500", "hang up")
        return both, await engine.score(rendered.ids, rendered.images)

    both, one = with_engine(external(url, url), renderer, play)
    right = stream_logprobs(model, rendered.ids, rendered.images, "cpu")
    assert len(both) == 2
    assert all(np.abs(scores - right).max() < 1e-4 for scores in (*both, one))


def test_no_name_of_a_request_begins_another(renderer: Renderer) -> None:
    """An abort on SGLang is of all requests whose names begin like the one given."""
    engine = SGLangEngine(SGLangSettings(), renderer.image_token_id)
    names = [engine.next_request_id() for _ in range(200)]
    assert not any(other.startswith(name) for name in names for other in names if other != name)


def test_tokens_of_asynchronous_steps_have_the_versions_that_wrote_them(
    url: str, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    tell(url, "reset", slow_s=0.02)
    networks, folders = [deepcopy(model)], []
    for version in (1, 2):
        folders.append(tmp_path / str(version))
        networks.append(deepcopy(changed(model, folders[-1], renderer)))

    async def play(engine: SGLangEngine) -> list[Trajectory]:
        problem = lambda n: GroupProblem(sample(f"Find {n}.", make_image(seed=n), id=str(n)), 3, n)  # noqa: E731
        options = RolloutOptions(group_size=2, oversample=2.0, stop_early=True, max_staleness=2)
        manager = RolloutManager(episode(engine, renderer), lambda *_: ImageEnv(), None, problem, options)
        played = list((await manager.collect(2)).played)
        for version, folder in enumerate(folders, 1):
            await engine.pause()
            engine.current_weights = lambda folder=folder: folder
            if version == 2:
                misbehave(url, "update_weights_from_disk", "hang up")
            await engine.update_from_disk(folder, version)
            await engine.resume()
            while not any(version in versions_of(t)[t.mask_T] for t in played):  # earlier groups come first
                played += (await manager.collect(2)).played
        left = await manager.close()
        return [*played, *(t for group in left for t in group.trajectories)]

    played = with_engine(external(url, url), renderer, play)
    assert max(Counter((t.sample_id, t.sample_index) for t in played).values()) == 1
    assert {t.end_reason for t in played if not t.end_reason.is_valid} <= {EndReason.ABORTED}
    found = [versions_of(t)[t.mask_T].tolist() for t in played]
    assert all(versions == sorted(versions) for versions in found)
    assert {version for versions in found for version in versions} == {0, 1, 2}
    assert any(len(set(versions)) > 1 for versions in found)
    for trajectory in played:
        for version in set(versions_of(trajectory)[trajectory.mask_T].tolist()):
            only = replace(trajectory, mask_T=versions_of(trajectory) == version)
            assert wrong(networks[version], only, renderer.suppressed_ids) < 1e-4


@pytest.mark.slow
def test_a_prompt_that_was_misread_before_a_pause_is_still_known_after_it(url: str, renderer: Renderer) -> None:
    tell(url, "reset", slow_s=0.15)
    request = short_turn(renderer, 40)

    async def play(engine: SGLangEngine) -> Completion:
        misbehave(url, "generate", "answer with another count")
        writing = asyncio.create_task(write(engine, request))
        await asyncio.sleep(0.5)
        await engine.pause()
        await engine.resume()
        return await writing

    completion = with_engine(external(url), renderer, play)
    assert (len(completion.ids), completion.prompt_length) == (40, len(request.ids) + 1)


def test_a_server_that_never_comes_back_ends_the_run_and_is_named(url: str, renderer: Renderer) -> None:
    given = SGLangSettings(urls=(url,), start_timeout_s=0.6)

    async def play(engine: SGLangEngine) -> None:
        misbehave(url, "generate", "status 500")
        misbehave(url, "model_info", *["status 500"] * 400)
        await write(engine, short_turn(renderer))

    with pytest.raises(EngineDown, match=f"given up: --engine-url: must answer, got {url}"):
        with_engine(given, renderer, play)


@pytest.mark.slow
def test_a_server_whose_restart_fails_is_restarted_again(renderer: Renderer, tmp_path: Path) -> None:
    second_fails = f"starts = open({str(tmp_path / 'starts')!r}, 'a'); assert starts.write('x') and starts.tell() != 2"
    program = f"{second_fails}{SILENT}"
    given = SGLangSettings(command=(sys.executable, "-c", program), log_folder=tmp_path)

    async def play(engine: SGLangEngine) -> int:
        (server,) = engine.servers.all
        assert isinstance(server.process, LocalProcess)
        server.process.popen.kill()
        server.process.popen.wait()
        engine.servers.report_lost(server, "killed")
        return (await engine.servers.pick()).num_restarts

    assert with_engine(given, renderer, play) == 2


def test_a_turn_in_flight_as_the_engine_closes_fails_and_starts_no_server(renderer: Renderer, tmp_path: Path) -> None:
    given = SGLangSettings(command=(sys.executable, "-c", SILENT), log_folder=tmp_path)

    async def play(engine: SGLangEngine) -> list[Any]:
        writing = [asyncio.create_task(write(engine, short_turn(renderer))) for _ in range(3)]
        await asyncio.sleep(0.2)
        await engine.close()
        return await asyncio.wait_for(asyncio.gather(*writing, return_exceptions=True), 20)

    results = with_engine(given, renderer, play)
    assert [type(result) for result in results] == [EngineDown] * 3
    assert (tmp_path / "sglang-0.log").read_text().count("$ ") == 1


@pytest.mark.slow
def test_started_servers_ask_for_a_random_key_that_no_process_list_shows(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    async def play(engine: SGLangEngine) -> Path:
        server = engine.servers.all[0]
        assert isinstance(server.process, LocalProcess) and server.process.key_file
        key = engine.servers.settings.api_key
        assert len(key) == 64 and await server.client.is_alive()
        assert all(key not in word for word in map(str, server.process.popen.args))  # type: ignore[union-attr]
        assert key not in server.process.log_path.read_text()
        async with aiohttp.ClientSession() as stranger:
            with pytest.raises(ServerRefused, match="status 401"):
                await SGLangClient(server.client.url, stranger).call("model_info")
        return server.process.key_file

    key_file = with_engine(settings(checkpoint, tmp_path), renderer, play)
    assert not key_file.exists()


@pytest.mark.slow
def test_a_key_in_the_arguments_is_the_one_that_is_proved(checkpoint: Path, renderer: Renderer, tmp_path: Path) -> None:
    given = settings(checkpoint, tmp_path)
    given = replace(given, arguments=(*given.arguments, "--api-key=mine"))

    async def play(engine: SGLangEngine) -> None:
        process = engine.servers.all[0].process
        assert isinstance(process, LocalProcess) and process.key_file is None
        url = engine.servers.all[0].client.url
        facts = ModelFacts.load(checkpoint)
        await asyncio.to_thread(check_server, url, facts, "mine")
        for key, got in (("", "none"), ("other", "another key")):
            with pytest.raises(UserError, match=f"--engine-api-key-file: must hold the key of {url}, got {got}"):
                await asyncio.to_thread(check_server, url, facts, key)
        other = SGLangEngine(external(url, api_key="mine"), renderer.image_token_id)
        await other.start()  # would wait in vain without the key
        await other.close()

    with_engine(given, renderer, play)


def test_no_proxy_stands_between_a_run_and_its_servers(
    url: str, checkpoint: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    check_server(url, ModelFacts.load(checkpoint))
    with_engine(external(url), renderer, lambda engine: engine.servers.pick())
