"""Claims about where the servers of a run are: on any node of a Ray cluster, apart from the learner or on its GPUs."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.model.architectures import ModelFacts
from agents.rendering.renderer import Renderer
from agents.types import Completion, GenerateRequest
from envs.errors import UserError
from tests.builders import sampling
from tests.environments import LUCKY, environment, lucky_lengths, write_rows
from tests.paths import ROOT
from tests.processes import kill_listener
from tests.prompts import question
from tests.recordings import lines_of
from trainer.config.rollout import ServersConfig
from trainer.run import run
from trainer.setup.servers import check_server, place_servers

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group  # noqa: E402

from trainer.learner.ray_worker import Place  # noqa: E402
from trainer.learner.reservation import wait_for  # noqa: E402
from trainer.setup.ray_servers import RayLauncher, Shared, shared_place  # noqa: E402

SERVER = (sys.executable, "-m", "tests.agents.engines.sglang_server")
TIME_S = 240.0


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster without nodes, whose `sglang.launch_server` is the server of the tests."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text("from tests.agents.engines.sglang_server import main\nmain()\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def flags(checkpoint: Path, tmp_path: Path) -> Iterator[list[str]]:
    """Flags of a small run on servers, in an environment whose rewards differ."""
    with lucky_lengths(tmp_path, "lucky_placement", "float(len(text) % 3)", 6) as flags:
        small = ["--group-size", "4", "--max-new-tokens", "24", "--problems-per-step", "3", "--steps", "2"]
        small += ["--eval-size", "0", "--tracker=", "--save-every", "0", "--entropy-coef", "0.05", "--doctor", "off"]
        yield [*flags, *small, "--model", str(checkpoint), "--out", str(tmp_path / "runs")]


def assert_same_in_one_process(folder: Path, flags: list[str], max_staleness: int) -> None:
    """Learn from a run's recording in this process, and compare the metrics of every step."""
    assert run([*flags, "--replay-rollouts", str(folder), "--name", f"{folder.name}-again", "--engine", "auto"]) == 0
    played, again = (lines_of(each / "metrics.jsonl") for each in (folder, folder.with_name(f"{folder.name}-again")))
    assert len(played) == len(again) == 2 and played[0]["grad_norm"] > 0
    for ours, theirs in zip(played, again, strict=True):
        for key in ("reward", "num_tokens", "loss", "grad_norm", "entropy"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4), key
        assert ours["staleness/max"] <= max_staleness
        if not ours["staleness/max"]:
            assert ours["rollout_train_kl"] < 1e-7  # the servers had the weights


# A server beside the two learners on the first node, one on the other. Then both servers on the learners' CPUs.
@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("placement", ["split", "colocate"])
def test_a_run_with_learners_and_servers_on_two_nodes_learns_what_one_process_learns(
    placement: str, max_staleness: int, cluster: Cluster, flags: list[str], tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=3 if placement == "split" else 1)
    cluster.add_node(num_cpus=1)
    far = ["--num-servers", "2", "--num-learners", "2", "--ray-address", cluster.address, "--placement", placement]
    far += ["--engine-args=--enable-memory-saver", "--max-staleness", str(max_staleness)]
    assert run([*flags, "--engine", "sglang", "--name", "far", *far]) == 0
    logs = [file.read_text() for file in sorted((tmp_path / "runs/far/servers").glob("sglang-*.log"))]
    assert len(logs) == 2 and all("--host 127.0.0.1" not in log for log in logs)
    freed = 2 if placement == "colocate" else 0  # in each step
    assert [log.count("freed kv_cache weights") for log in logs] == [freed] * 2
    assert_same_in_one_process(tmp_path / "runs" / "far", flags, max_staleness)


@pytest.mark.slow
def test_a_run_whose_environments_are_on_a_node_of_the_cluster_is_that_with_local_ones(
    cluster: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2)
    data = write_rows(tmp_path / "rows.jsonl", *({"problem": f"Say {n}.", "answer": str(n)} for n in range(4)))
    small = ["--group-size", "2", "--max-new-tokens", "16", "--problems-per-step", "2", "--steps", "1", "--tracker="]
    small += ["--data", data, "--eval-size", "0", "--save-every", "0", "--doctor", "off", "--model", str(checkpoint)]
    rows = []
    for workers, more in (("local", []), ("ray", ["--num-learners", "1", "--ray-address", cluster.address])):
        source = LUCKY.format(reward="float(len(text) % 3)")
        with environment(tmp_path, f"lucky_{workers}", source, isolation="process", workers=workers) as flags:
            concurrent = ["--max-concurrent", "1"]  # a CPU for the learner, and one for an environment
            assert run([*flags, *small, *more, *concurrent, "--out", str(tmp_path), "--name", workers]) == 0
        rows += lines_of(tmp_path / workers / "metrics.jsonl")
    assert [rows[1][key] for key in ("reward", "num_tokens")] == [rows[0][key] for key in ("reward", "num_tokens")]
    assert rows[1]["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_cluster_that_is_too_small_for_learner_and_servers_is_one_line_before_anything_loads(
    cluster: Cluster, flags: list[str], tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=2)
    cluster.add_node(num_cpus=1)
    far = ["--num-learners", "2", "--ray-address", cluster.address, "--placement", "split", "--engine", "sglang"]
    rule = "--num-learners: must leave 2 servers their 2 of the 3 CPUs of the cluster, got 2; give 1 or less"
    with pytest.raises(UserError, match=rule):
        run([*flags, *far, "--num-servers", "2"])
    with pytest.raises(UserError, match="--tensor-parallel: must be at most the 2 CPUs of the cluster's largest node"):
        run([*flags, *far, "--tensor-parallel", "3"])
    assert not (tmp_path / "runs").exists()


def play_on(launcher: RayLauncher, given: SGLangSettings, play: Callable[[SGLangEngine], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        engine = SGLangEngine(given, None, launcher=launcher)
        try:
            await engine.start()
            return await play(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(whole(), TIME_S))


# The node that takes the server joins only after the run has reserved its own.
@pytest.mark.slow
def test_a_killed_server_is_restarted_and_one_whose_node_is_gone_moves_to_another(
    cluster: Cluster, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    first, second = cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False)
    reserved = placement_group([{"CPU": 1}] * 2)
    wait_for([reserved])
    cluster.add_node(num_cpus=1)
    given = SGLangSettings(
        str(checkpoint), num_servers=2, command=SERVER, log_folder=tmp_path / "servers", dtype="float32"
    )

    async def turn(engine: SGLangEngine, seed: int) -> Completion:
        greedy = sampling(renderer, temperature=0.0)
        request = GenerateRequest(renderer.prompt(question(f"Find {seed}.")).ids, (), 8, greedy, seed)
        async with engine.session() as session:
            return await session.generate(request)

    async def back(engine: SGLangEngine) -> None:
        while len(engine.servers.up) < 2:
            assert not any("given up" in event for event in engine.servers.events), engine.servers.events
            await turn(engine, 0)  # the other goes on
            await asyncio.sleep(0.2)

    async def play(engine: SGLangEngine) -> None:
        on_node = {server.client.node: server for server in engine.servers.all}
        assert on_node.keys() == {first.node_id, second.node_id}
        with pytest.raises(UserError, match="--engine-api-key-file: must hold the key of"):
            await asyncio.to_thread(check_server, on_node[second.node_id].url, ModelFacts.load(checkpoint))
        expected = [await turn(engine, seed) for seed in range(4)]
        victim = on_node[second.node_id]
        kill_listener(victim.url)
        while victim.is_up:
            await asyncio.sleep(0.1)  # nobody asks it for anything
        await back(engine)
        assert (victim.num_restarts, victim.client.node) == (1, second.node_id)
        cluster.remove_node(second, allow_graceful=False)
        while victim.is_up:
            await asyncio.sleep(0.1)
        await back(engine)
        assert victim.num_restarts >= 2 and victim.client.node not in on_node
        assert [(await turn(engine, seed)).ids for seed in range(4)] == [completion.ids for completion in expected]

    play_on(RayLauncher(reserved, on_gpu=False), given, play)


# Nothing computes here: the server writes down what it may use.
@pytest.mark.slow
def test_a_tensor_parallel_server_sees_the_gpus_that_ray_gives_it_first_and_listens_on_its_nodes_address(
    cluster: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1, num_gpus=1)
    cluster.add_node(num_cpus=1, num_gpus=2)
    ray.init(cluster.address, log_to_driver=False)
    reserved = placement_group([{"GPU": 2}])
    note = "import os, runpy, sys; print('sees', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); "
    note += "runpy.run_module('tests.agents.engines.sglang_server', run_name='__main__')"
    given = SGLangSettings(
        str(checkpoint), tensor_parallel=2, command=(sys.executable, "-c", note), log_folder=tmp_path, dtype="float32"
    )

    async def play(engine: SGLangEngine) -> str:
        return engine.servers.all[0].url

    url = play_on(RayLauncher(reserved, on_gpu=True), given, play)
    log = (tmp_path / "sglang-0.log").read_text()
    assert re.search(r"^sees 0,1", log, re.MULTILINE) and "--tp-size 2" in log and "--base-gpu-id 0" in log
    assert f"--host {url.split('//')[1].split(':')[0]} " in log


@pytest.mark.slow
def test_a_server_on_the_learners_gpus_waits_while_the_learner_is_started_again(
    cluster: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False)
    node = ray.get_runtime_context().get_node_id()
    learners = [Place("gone", "gone", 1, ())]
    given = SGLangSettings(str(checkpoint), command=("sleep", "60"), log_folder=tmp_path, api_key="key")
    process = RayLauncher(None, on_gpu=False, learners=lambda: learners).launch(given, 0, 0)
    for places in (learners, []):
        learners[:] = places
        assert (process.ended(), process.url) == ("", "") and "waits for the learner" in process.log()
    learners[:] = [Place(node, "here", 1, ())]
    while not process.url:
        assert process.ended() == ""
        time.sleep(0.1)
    assert process.node == node
    process.stop()


def test_servers_on_the_learners_gpus_take_those_of_one_node_in_the_order_of_the_ranks() -> None:
    def placed(num_servers: int, tensor_parallel: int) -> list[Shared]:
        places: list[Shared] = []
        for _ in range(num_servers):
            places.append(shared_place(ranks, places, num_servers, tensor_parallel))
        return places

    ranks = [Place(node, node, 1, (gpu,)) for node, gpu in (("a", "0"), ("a", "1"), ("b", "0"), ("b", "3"))]
    assert placed(2, 2) == [Shared("a", ("0", "1")), Shared("b", ("0", "3"))]
    assert placed(4, 1) == [Shared("a", ("0",)), Shared("a", ("1",)), Shared("b", ("0",)), Shared("b", ("3",))]
    with pytest.raises(UserError, match="--num-servers: must be at most 4, the servers that fit, got 5"):
        placed(5, 1)
    with pytest.raises(UserError, match="--tensor-parallel: must be at most the 2 learners of one node, got 3"):
        placed(1, 3)


def test_a_server_that_starts_again_takes_gpus_that_no_other_has_where_ranks_have_moved() -> None:
    ranks = [Place(node, node, 1, ("0",)) for node in ("a", "c")]  # b is gone, and had the second server
    assert shared_place(ranks, [Shared("a", ("0",))], 2, 1) == Shared("c", ("0",))
    assert shared_place(ranks[::-1], [Shared("a", ("0",))], 2, 1) == Shared("c", ("0",))


@pytest.mark.parametrize(
    ("placement", "num_servers", "learners", "first"),
    [("auto", 1, (0, 1), 2), ("split", 2, (0, 1), 2), ("colocate", 2, (0, 1), 0), ("colocate", 1, (1,), 1)],
)
def test_servers_of_this_host_are_apart_from_the_learner_or_on_its_gpus(
    placement: Any, num_servers: int, learners: tuple[int, ...], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert place_servers(ServersConfig(num_servers=num_servers), learners, placement) == first
    with pytest.raises(UserError, match="--placement split: must leave 3 servers 3 of this host's 4 GPUs besides 2"):
        place_servers(ServersConfig(num_servers=3), (0, 1), "split")


def test_servers_of_a_cluster_never_listen_without_a_key() -> None:
    launcher = RayLauncher(None, on_gpu=False)
    with pytest.raises(UserError, match="--engine-args: must come with the key"):
        launcher.check(SGLangSettings(arguments=("--config", "mine.yaml")))
    for given in (SGLangSettings(), SGLangSettings(arguments=("--config", "mine.yaml"), api_key="theirs")):
        launcher.check(given)
        assert given.with_key().api_key


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--placement", "split", "--engine", "hf"], "--engine sglang"),
        (["--placement", "colocate", "--engine", "sglang", "--engine-url", "http://gpu1:30000"], "--engine-url"),
        (["--placement", "colocate", "--engine", "sglang", "--first-gpu", "1"], "--first-gpu"),
        (["--placement", "colocate", "--engine", "sglang", "--sync", "nccl"], "--sync nccl"),
    ],
)
def test_a_placement_that_the_servers_cannot_have_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=f"--placement: .*{words}"):
        run(argv)
