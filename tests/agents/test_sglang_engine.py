"""Claims about the SGLang engine, against servers that speak its protocol and write with a real network."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.client import collapse, salted_hash
from agents.engines.sglang.servers import EngineDown
from agents.episode import Episode, Limits
from agents.logprobs import stream_logprobs
from agents.model import PolicyModel
from agents.renderer import Renderer
from agents.rollout import rollout_groups
from agents.types import Completion, GenerateRequest, SamplingParams, Trajectory
from envs.env import Env
from envs.errors import UserError
from envs.runner import EnvLimits
from tests.builders import picture, question, sample, sampling

Answer = tuple[dict[str, Any], bool, dict[str, Any]]
EMULATOR = (sys.executable, "-m", "tests.agents.sglang_server")
TIME_S = 90
#: Every 8th token ends a turn, so that random networks play several.
STOP_SOON = tuple(range(0, 600, 8))


class PictureEnv(Env):
    """Shows another picture after every turn, and never ends by itself."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> Answer:
        self.turns += 1
        return {"obs_str": "look", "image": picture(96, 64, seed=self.turns)}, False, {}

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        parts = [{"type": "text", "text": observation["obs_str"]}, {"type": "image", "image": observation["image"]}]
        return {"role": "user", "content": parts}

    def reward(self, final_text: str) -> float:
        return float(len(final_text) % 3)


def settings(checkpoint: Path, folder: Path, servers: int = 1, **options: Any) -> SGLangSettings:
    slow = ("--slow-s", str(options.pop("slow_s", 0.0)))
    return SGLangSettings(
        str(checkpoint), num_servers=servers, command=EMULATOR, arguments=slow, log_folder=folder, **options
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
    samples = [sample(f"Find {n}.", picture(seed=n), id=str(n)) for n in range(problems)]
    groups = await rollout_groups(
        episode(engine, renderer),
        samples,
        lambda *_: PictureEnv(),
        None,
        group,
        seed=1,
        on_episode=on_episode,
    )
    return [trajectory for each in groups for trajectory in each.trajectories]


def wrong(network: PolicyModel, trajectory: Trajectory, suppressed_ids: Sequence[int]) -> float:
    """Return the largest difference between a trajectory's log-probs and the network's own."""
    ids = trajectory.ids_T.tolist()
    scores = stream_logprobs(network, ids, trajectory.images, "cpu", suppressed_ids=suppressed_ids)
    return float(np.abs(scores - trajectory.logprobs_T[1:])[trajectory.mask_T[1:]].max())


def test_placeholders_are_collapsed_to_one_per_picture(renderer: Renderer) -> None:
    rendered = renderer.prompt(question("Compare.", picture(64, 64), picture(96, 64, seed=1)))
    short = collapse(rendered.ids, rendered.images, renderer.image_token_id)
    assert short.count(renderer.image_token_id) == 2  # type: ignore[arg-type]
    assert len(short) == len(rendered.ids) - sum(image.num_tokens - 1 for image in rendered.images)


def test_hashes_of_a_picture_change_with_the_weights_and_fit_a_signed_64_bit_number(renderer: Renderer) -> None:
    image = renderer.prompt(question("?", picture())).images[0]
    hashes = {salted_hash(image, f"run/{version}") for version in range(50)}
    assert len(hashes) == 50
    assert all(0 <= int(text, 16) < 2**63 for text in hashes)


def test_episodes_on_a_server_have_the_networks_own_logprobs_and_our_prompt_lengths(
    checkpoint: Path, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    async def play(engine: SGLangEngine) -> list[Trajectory]:
        loop = episode(engine, renderer)
        problem = sample("Find x.", picture(), id="x")
        return [await loop.run(problem, PictureEnv, seed=seed) for seed in range(4)]

    trajectories = with_engine(settings(checkpoint, tmp_path), renderer, play)
    assert any(len(t.turns) == 3 and len(t.images) == 3 for t in trajectories), trajectories
    for trajectory in trajectories:
        assert trajectory.end_reason.is_valid, trajectory
        assert wrong(model, trajectory, renderer.suppressed_ids) < 1e-4
        assert set(trajectory.versions_T[trajectory.mask_T].tolist()) == {0}


def test_a_server_killed_in_mid_step_loses_no_episode_and_doubles_none(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    ended: Counter[tuple[str, int]] = Counter()

    async def play(engine: SGLangEngine) -> list[Trajectory]:
        async def kill() -> None:
            while engine.num_asked < 30:
                await asyncio.sleep(0.01)
            victim = engine.servers.all[0].process
            assert victim is not None
            os.killpg(victim.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        count = lambda t: ended.update([(t.sample_id, t.sample_index)])  # noqa: E731
        trajectories = await play_groups(engine, renderer, problems=6, group=4, on_episode=count)
        await killing
        assert engine.num_retried > 0, "the kill must have cut requests off"
        assert any("server 0 lost" in event for event in engine.servers.events)
        return trajectories

    trajectories = with_engine(settings(checkpoint, tmp_path, servers=2, slow_s=0.05), renderer, play)
    assert len(ended) == 24
    assert set(ended.values()) == {1}
    assert {(t.sample_id, t.sample_index) for t in trajectories} == set(ended)
    assert all(t.end_reason.is_valid for t in trajectories), Counter(t.end_reason for t in trajectories)


def changed(model: PolicyModel, folder: Path, renderer: Renderer) -> PolicyModel:
    """Make weights that differ in every tensor, vision tower included, and save them."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std().nan_to_num(0.0) * 0.3)
    model.save(folder, torch.float32)
    renderer.save(folder)
    return model


def test_the_only_server_is_restarted_with_the_current_weights(
    checkpoint: Path, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    new = changed(model, tmp_path / "new", renderer)
    rendered = renderer.prompt(question("Find x.", picture()))

    async def play(engine: SGLangEngine) -> tuple[Any, Any, Completion]:
        before = await engine.score(rendered.ids, rendered.images)
        engine.current_weights = lambda: tmp_path / "new"
        await engine.update_from_disk(tmp_path / "new", version=1)
        process = engine.servers.all[0].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        request = GenerateRequest(rendered.ids, rendered.images, 8, sampling(renderer), seed=1)
        async with engine.session() as session:
            completion = await session.generate(request)
        assert engine.servers.all[0].num_restarts == 1
        return before, await engine.score(rendered.ids, rendered.images), completion

    before, after, completion = with_engine(settings(checkpoint, tmp_path), renderer, play)
    assert np.abs(after - stream_logprobs(new, rendered.ids, rendered.images, "cpu")).max() < 1e-4
    assert np.abs(after - before).mean() > 0.1
    assert completion.versions == ((1, len(completion.ids)),)


def test_a_turn_goes_on_after_a_pause_under_the_new_weights(
    checkpoint: Path, renderer: Renderer, model: PolicyModel, tmp_path: Path
) -> None:
    old = PolicyModel.load(checkpoint)
    new = changed(model, tmp_path / "new", renderer)
    rendered = renderer.prompt(question("Find x.", picture()))
    params = SamplingParams()
    request = GenerateRequest(rendered.ids, rendered.images, 40, params, seed=1)

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

    completion = with_engine(settings(checkpoint, tmp_path, slow_s=0.1), renderer, play)
    (first, early), (second, late) = completion.versions
    assert (first, second, early + late) == (0, 1, 40)
    assert early > 0
    assert late > 0
    ids = [*rendered.ids, *completion.ids]
    start, middle = len(rendered.ids), len(rendered.ids) + early
    given = np.array(completion.logprobs)
    assert (
        np.abs(stream_logprobs(old, ids, rendered.images, "cpu")[start - 1 : middle - 1] - given[:early]).max() < 1e-4
    )
    assert np.abs(stream_logprobs(new, ids, rendered.images, "cpu")[middle - 1 :] - given[early:]).max() < 1e-4


def test_cancelling_a_turn_ends_it_on_the_server_too(checkpoint: Path, renderer: Renderer, tmp_path: Path) -> None:
    rendered = renderer.prompt(question("Find x.", picture()))
    params = SamplingParams()

    async def play(engine: SGLangEngine) -> float:
        async with engine.session() as session:
            endless = asyncio.create_task(
                session.generate(GenerateRequest(rendered.ids, rendered.images, 2000, params, seed=1))
            )
            await asyncio.sleep(0.3)
            endless.cancel()
            await asyncio.gather(endless, return_exceptions=True)
        started = time.monotonic()
        await engine.update_from_disk(checkpoint, version=1)  # waits until nothing is being written
        return time.monotonic() - started

    assert with_engine(settings(checkpoint, tmp_path, slow_s=0.05), renderer, play) < 10


def test_a_server_with_other_weights_than_it_should_have_is_brought_up_to_date(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    rendered = renderer.prompt(question("Find x.", picture()))

    async def play(engine: SGLangEngine) -> Completion:
        engine.current_weights = lambda: checkpoint
        engine.weight_version = 4  # nobody told the server
        async with engine.session() as session:
            return await session.generate(GenerateRequest(rendered.ids, rendered.images, 4, sampling(renderer), seed=1))

    completion = with_engine(settings(checkpoint, tmp_path), renderer, play)
    assert completion.versions == ((4, len(completion.ids)),)


def test_a_server_that_cannot_start_is_a_users_error_with_the_end_of_its_log(
    renderer: Renderer, tmp_path: Path
) -> None:
    given = settings(tmp_path / "nowhere", tmp_path)
    with pytest.raises(UserError, match=r"must start a server(.|\n)*nowhere"):
        with_engine(given, renderer, lambda engine: asyncio.sleep(0))


def test_an_address_where_nobody_answers_is_a_users_error(renderer: Renderer) -> None:
    given = SGLangSettings(urls=("http://127.0.0.1:9",), start_timeout_s=1.0)
    with pytest.raises(UserError, match="--engine-url"):
        with_engine(given, renderer, lambda engine: asyncio.sleep(0))


def test_when_no_server_can_be_brought_back_the_engine_says_so(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    rendered = renderer.prompt(question("Find x."))

    async def play(engine: SGLangEngine) -> None:
        process = engine.servers.all[0].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        async with engine.session() as session:
            await session.generate(GenerateRequest(rendered.ids, (), 4, sampling(renderer), seed=1))

    with pytest.raises(EngineDown, match="no SGLang server is left"):
        with_engine(settings(checkpoint, tmp_path, max_restarts=0), renderer, play)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_servers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    parent = (
        "import subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-m', 'agents.engines.sglang.launch', sys.executable, '-c', {child!r}], "
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


def test_samples_spread_over_servers(checkpoint: Path, renderer: Renderer, tmp_path: Path) -> None:
    async def play(engine: SGLangEngine) -> list[int]:
        async with engine.session() as one, engine.session() as other:
            rendered = renderer.prompt(question("Find x."))
            request = GenerateRequest(rendered.ids, (), 2, sampling(renderer), seed=1)
            await asyncio.gather(one.generate(request), other.generate(request))
            return [server.num_sessions for server in engine.servers.all]

    assert with_engine(settings(checkpoint, tmp_path, servers=2), renderer, play) == [1, 1]
