"""Claims about environments on the nodes of a Ray cluster: they fail as those of this host, and outlive their nodes."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.contract import EnvFault, HostLost
from envs.execution.load import load_env
from envs.execution.runner import EnvRunner
from envs.registry import get_spec
from envs.spec import EnvLimits, EnvSpec
from envs.types import Sample
from envs.workers.worker import WorkerDied, WorkerError, WorkerTimeout
from tests.environments import environment
from tests.paths import ROOT

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from envs.workers.ray_worker import RayWorker  # noqa: E402

pytestmark = pytest.mark.slow

#: Says on which node it runs, and hangs, ends or waits when it is told to.
HEAVY = """
import os, time
from envs.env import Env
class Heavy(Env):
    def reset(self): return {"pid": os.getpid(), "parent": os.getppid()}, {}
    def step(self, text):
        if text == "wait": time.sleep(3600)
        if text == "end": os._exit(3)
        return {}, True, {}
    def format_observation(self, observation): return {"role": "user", "content": str(os.getpid())}
    def reward(self, text): return float(len(text))
def build_env(sample=None, args=None, **_): return Heavy()
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster()
    cluster.add_node(num_cpus=0)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_calls_on_a_node_return_raise_end_and_run_out_of_time_as_those_of_this_host(cluster: Cluster) -> None:
    cluster.add_node(num_cpus=2)
    worker = RayWorker({"num_cpus": 1})
    assert worker.call(math.sqrt, 4.0) == 2.0 and worker.call(os.getpid) != os.getpid() and worker.is_idle
    with pytest.raises(WorkerError, match="must be real number"):
        worker.call(math.sqrt, "x")
    assert worker.is_alive
    with pytest.raises(WorkerDied, match="signal SIGSEGV"):
        worker.call(signal.raise_signal, 11)
    assert not worker.is_alive and not worker.is_idle
    other = RayWorker({})
    pid = other.call(os.getpid)
    with pytest.raises(WorkerTimeout):
        other.call(time.sleep, 60, timeout_s=0.5)
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_for_which_no_node_has_room_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.workers.ray_worker.PLACE_S", 0.5)
    worker = RayWorker({"num_cpus": 1, "browsers": 2})
    with pytest.raises(WorkerTimeout, match=r"in 1.5 s: does a node have room for .*'browsers': 2"):
        worker.call(math.sqrt, 4.0, timeout_s=1.0)
    assert not worker.is_alive


def runner_of(spec: EnvSpec) -> EnvRunner:
    make = functools.partial(load_env(spec), Sample(id="1", prompt=(), label="", metadata={}), spec.args())
    return EnvRunner(make, EnvLimits.of(spec))


async def play(spec: EnvSpec, text: str) -> float:
    runner = runner_of(spec)
    try:
        await runner.open()
        await runner.step(text)
        return await runner.reward(text)
    finally:
        await runner.close()


def test_an_episode_whose_node_is_gone_is_lost_and_the_next_one_runs_on_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    node = cluster.add_node(num_cpus=1)
    entry = {"isolation": "process", "workers": "ray", "worker_resources": {"num_cpus": 1}, "step_timeout_s": 60.0}
    with environment(tmp_path, "heavy_env", HEAVY, **entry):
        spec = get_spec("heavy_env", tmp_path / "registry.yaml")

        async def lose_the_node() -> None:
            runner = runner_of(spec)
            await runner.open()
            step = asyncio.create_task(runner.step("wait"))
            await asyncio.sleep(1.0)
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            with pytest.raises(HostLost, match="host is gone"):
                await step
            await runner.close()

        assert asyncio.run(play(spec, "ab")) == 2.0
        with pytest.raises(EnvFault, match="exit code 3"):
            asyncio.run(play(spec, "end"))
        asyncio.run(lose_the_node())
        cluster.add_node(num_cpus=1)
        assert asyncio.run(play(spec, "abc")) == 3.0
