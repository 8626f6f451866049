"""Claims about weights that servers receive over a process group. It is a real one of gloo; GPUs have NCCL there."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.client import SGLangClient
from agents.engines.sglang.process import LocalProcess
from agents.engines.sglang.servers import Server
from agents.engines.weight_servers import GroupAddress, ServerLost, ServerRefused, WeightMessage
from agents.rendering.renderer import Renderer
from envs.errors import UserError
from tests.agents.engines.sglang_server import digests
from tests.builders import fresh_model, sampling
from tests.listening import listening, open_to_others
from tests.prompts import make_image, question
from tests.recordings import episodes_in, lines_of
from tests.servers import serving
from tests.trainer.test_run import train
from tests.trainer.weight_sync.test_sync import move
from trainer.learner import weight_group
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.weight_group import GroupBroken, WeightGroup, cancel, own_address
from trainer.learner.weight_sender import RankSender
from trainer.run import run
from trainer.weight_sync import group_transport
from trainer.weight_sync.group_transport import GroupTransport
from trainer.weight_sync.sync import WeightSync

PROMPT = question("Find x.", make_image())
SERVER = (sys.executable, "-m", "tests.agents.engines.sglang_server")
#: Values of a bucket, so that the tiny network has several.
SMALL = 100_000


def learner_of(checkpoint: Path, renderer: Renderer, dtype: torch.dtype = torch.float32) -> FSDPLearner:
    return FSDPLearner(fresh_model(checkpoint), sampling(renderer), num_steps=10, dtype=dtype)


def play_with(
    settings: SGLangSettings,
    learner: FSDPLearner,
    renderer: Renderer,
    folder: Path,
    play: Callable[[WeightSync, SGLangEngine], Awaitable[Any]],
    is_required: bool = True,
) -> Any:
    """Run `play` with servers that get the learner's weights over a group, in several messages."""

    async def run() -> Any:
        engine = SGLangEngine(settings, renderer.image_token_id)
        sender = RankSender(learner, SMALL)
        transport = GroupTransport(learner, engine, folder / "sync", sender, is_required)
        rendered = renderer.prompt(PROMPT)
        ids = learner.model.image_token_id
        sync = WeightSync(learner, transport, rendered.ids, rendered.images, ids, tolerance=0.01)
        try:
            return await play(sync, engine)
        finally:
            await engine.close()
            sync.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def started(checkpoint: Path, folder: Path, **more: Any) -> SGLangSettings:
    return SGLangSettings(str(checkpoint), command=SERVER, log_folder=folder, dtype="float32", **more)


async def served(engine: SGLangEngine) -> list[dict[str, str]]:
    """Return the digests of the tensors that each server serves."""
    return [await server.client.call("digests") for server in engine.servers.up]


@pytest.mark.slow
def test_two_servers_one_of_two_gpus_get_every_tensor_to_the_bit_and_leave_when_the_run_ends(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer, torch.bfloat16)
    kind = ("--dtype", "bfloat16")
    with serving(checkpoint, "--tp-size", "2", *kind) as one, serving(checkpoint, *kind) as other:

        async def play(sync: WeightSync, engine: SGLangEngine) -> list[str]:
            sync.tolerance = 0.1  # the learner computes in bfloat16, these servers do not
            await sync.start()
            for version in (1, 2):
                move(learner)
                push = await sync.push(version)
                assert push.num_bytes == sum(2 * weight.numel() for weight in learner.weights().values())
                assert set(push.parts) == {"gather_s", "send_s"}
                own = {name: w.to(torch.bfloat16).float() for name, w in learner.weights().items()}
                assert await served(engine) == [digests(own)] * 2
                names = [await server.client.weight_version() for server in engine.servers.up]
                assert names == [str(version)] * 2
            return engine.servers.events

        settings = SGLangSettings(str(checkpoint), urls=(one, other), start_timeout_s=60)
        events = play_with(settings, learner, renderer, tmp_path, play)
        assert not any("over disk" in event for event in events)
        assert not (tmp_path / "sync").exists()  # nothing went over disk


@pytest.mark.slow
def test_a_server_that_dies_between_pushes_is_left_out_and_joins_again(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)

    async def play(sync: WeightSync, engine: SGLangEngine) -> None:
        await sync.start()
        process = engine.servers.all[0].process
        assert isinstance(process, LocalProcess)
        process.popen.kill()
        process.popen.wait()
        move(learner)
        push = await sync.push(1)
        assert push.num_bytes and push.seconds < 60
        await back(engine)
        assert await served(engine) == [digests(learner.weights())] * 2
        assert not any("over disk" in event for event in engine.servers.events)
        move(learner)
        await sync.push(2)  # over a group of both
        assert await served(engine) == [digests(learner.weights())] * 2
        assert engine.servers.all[0].num_restarts == 1

    play_with(started(checkpoint, tmp_path, num_servers=2), learner, renderer, tmp_path, play)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_server_that_dies_or_hangs_in_a_push_breaks_the_group_and_all_have_the_weights_soon_after(
    checkpoint: Path, renderer: Renderer, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(checkpoint, renderer)
    monkeypatch.setattr(weight_group, "SEND_S", 5.0)
    monkeypatch.setattr(WeightGroup.__init__, "__defaults__", (5.0,))
    monkeypatch.setattr(group_transport, "STUCK_S", 1.0)

    async def play(sync: WeightSync, engine: SGLangEngine) -> None:
        await sync.start()
        first = engine.servers.all[0].client
        # The first of the messages is answered.
        await first.call("misbehave", {"path": "update_weights_from_distributed", "faults": ["", fault]})
        move(learner)
        push = await sync.push(1)
        assert push.seconds < 60 and 0 < push.num_bytes < sum(weight.nbytes for weight in learner.weights().values())
        assert any("go over disk to servers that were lost" in event for event in engine.servers.events)
        await back(engine)
        assert await served(engine) == [digests(learner.weights())] * 2
        move(learner)
        await sync.push(2)
        assert await served(engine) == [digests(learner.weights())] * 2
        assert sum("over disk" in event for event in engine.servers.events) == 1

    play_with(started(checkpoint, tmp_path, num_servers=2), learner, renderer, tmp_path, play)


@pytest.mark.slow
def test_a_group_that_cannot_be_formed_is_an_error_where_it_is_required_and_else_weights_go_over_disk(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)
    with serving(checkpoint) as url:
        settings = SGLangSettings(str(checkpoint), urls=(url,), start_timeout_s=60)

        async def play(sync: WeightSync, engine: SGLangEngine) -> None:
            await engine.start()
            client = engine.servers.all[0].client
            refusals = ["status 400"] * group_transport.MAX_TRIES
            await client.call("misbehave", {"path": "init_weights_update_group", "faults": refusals})
            await sync.start()
            move(learner)
            await sync.push(1)
            assert await served(engine) == [digests(learner.weights())]

        with pytest.raises(UserError, match=r"--sync nccl: needs servers that can form a process group"):
            play_with(settings, learner, renderer, tmp_path, play)
        play_with(settings, learner, renderer, tmp_path, play, is_required=False)


async def back(engine: SGLangEngine) -> None:
    """Wait until every server is up."""
    while len(engine.servers.up) < len(engine.servers.all):
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--num-learners", "2")], ids=["one learner", "two learners"])
def test_a_run_over_a_group_is_one_over_disk(checkpoint: Path, tmp_path: Path, flags: Sequence[str]) -> None:
    if flags:
        pytest.importorskip("ray")
    flags = (*flags, "--entropy-coef", "0.05", "--warmup-steps", "0", "--lr", "1e-3")  # every step changes the weights
    with serving(checkpoint) as url:
        for sync in ("nccl", "disk"):
            urllib.request.urlopen(urllib.request.Request(f"{url}/reset", b'{"slow_s": 0}'), timeout=20).close()
            train(checkpoint, tmp_path / sync, "--engine-url", url, "--sync", sync, *flags, eval_size=0)
    over_group, over_disk = (tmp_path / sync for sync in ("nccl", "disk"))
    one, other = lines_of(over_group / "metrics.jsonl"), lines_of(over_disk / "metrics.jsonl")
    assert [row["loss"] for row in one] == [row["loss"] for row in other] and one[0]["grad_norm"] > 0
    assert all(row["rollout_train_kl"] < 1e-8 and row["sync_gb_per_s"] > 0 for row in one)
    streams = [[e["ids"] for e in episodes_in(run)] for run in (over_group, over_disk)]
    assert streams[0] == streams[1] and len(streams[0]) == 8
    weights = [load_file(run / "model" / "model.safetensors") for run in (over_group, over_disk)]
    assert digests(weights[0]) == digests(weights[1])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_run_sends_merged_adapters_over_a_group_also_when_it_is_resumed(checkpoint: Path, tmp_path: Path) -> None:
    adapters = ("--lora-rank", "2", "--sync", "nccl", "--entropy-coef", "0.01", "--warmup-steps", "0", "--lr", "1e-2")
    with serving(checkpoint) as url:
        train(checkpoint, tmp_path / "run", "--engine-url", url, *adapters, steps=1, eval_size=0)
        assert run(["--resume", str(tmp_path / "run"), "--steps", "2"]) == 0
    rows = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and all(row["rollout_train_kl"] < 1e-8 for row in rows)
    assert all(row["probe_gap"] < 1e-5 for row in rows)
    assert not (tmp_path / "run" / "sync").exists()


def test_a_group_on_cuda_keeps_to_the_gpu_of_the_thread_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert WeightGroup("cuda", 1, torch.device("cuda"), "127.0.0.1").device == torch.device("cuda", 3)
    assert WeightGroup("cuda", 1, torch.device("cuda", 1), "127.0.0.1").device == torch.device("cuda", 1)


def test_a_group_waits_no_longer_than_its_limit_and_ends_when_it_is_cancelled() -> None:
    alone = WeightGroup("alone", 1, torch.device("cpu"), "127.0.0.1", limit_s=0.5)
    began = time.monotonic()
    with pytest.raises(GroupBroken, match=r"waited (0\.5 s )?for the servers to join"):
        alone.join()
    assert time.monotonic() - began < 5
    cancelled = WeightGroup("cancelled", 1, torch.device("cpu"), "127.0.0.1", limit_s=20)
    threading.Timer(0.3, cancel, ("127.0.0.1", cancelled.port)).start()
    began = time.monotonic()
    with pytest.raises(GroupBroken, match="a server is gone"):
        cancelled.join()
    assert time.monotonic() - began < 5
    cancel("127.0.0.1", 1)  # a store that is gone


def test_a_group_listens_at_the_one_address_that_its_servers_are_told() -> None:
    before = listening()
    group = WeightGroup("one", 1, torch.device("cpu"), "127.0.0.2")
    joining = threading.Thread(target=group.join)
    joining.start()
    store = TCPStore("127.0.0.2", group.port, is_master=False)
    keys = PrefixStore("cpu/", PrefixStore("one/", PrefixStore("one", store)))
    gloo: Any = dist.ProcessGroupGloo  # its types leave these options out
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.2")]
    other = gloo(keys, 1, 2, options)
    joining.join(20)
    own = listening() - before
    assert {port for _, address, port in own if address == "127.0.0.2"} > {group.port}  # the store, and gloo's pairs
    assert not open_to_others(own)
    group.close()
    other.abort()


def idle_transport(folder: Path, num_servers: int = 1, is_required: bool = False) -> GroupTransport:
    """A transport whose servers and sender do nothing but answer that all is well."""
    engine = SGLangEngine(SGLangSettings(), None)
    engine._idle.set()
    given: dict[str, Any] = {"weight_version": "0"}
    sender: Any = SimpleNamespace(
        process=1,
        messages=lambda: (WeightMessage(("norm.weight",), "float32", ((8,),)),),
        open_group=lambda name, hosts, count: GroupAddress(name, "127.0.0.1", 1, count + 1, "gloo"),
        join_group=lambda: "",
        close_group=lambda: None,
    )

    async def call(path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> dict[str, Any]:
        given.update(body or {})
        return {"success": True, "weight_version": given["weight_version"], "tp_size": 1}

    for number in range(num_servers):
        server = Server(f"http://server-{number}", number, is_up=True)
        server.client = SGLangClient(server.url, None)  # type: ignore[arg-type]
        server.client.call = call  # type: ignore[method-assign, assignment]
        engine.servers.all.append(server)
    learner: Any = SimpleNamespace(steps_done=0)
    return GroupTransport(learner, engine, folder, sender, is_required)


def test_a_group_that_forms_at_the_last_try_is_used(tmp_path: Path) -> None:
    async def play() -> None:
        transport = idle_transport(tmp_path)
        join, faults = transport._join, ["the first fault", "the second fault"]

        async def joined(servers: Sequence[Server]) -> tuple[GroupAddress, str]:
            address, fault = await join(servers)
            return address, faults.pop(0) if faults else fault

        transport._join = joined  # type: ignore[method-assign]
        group = await transport._joined()
        assert group is not None and group is transport._group and not faults

    asyncio.run(play())


def test_a_group_whose_servers_change_with_every_try_is_left_and_the_fault_says_so(tmp_path: Path) -> None:
    async def play() -> None:
        transport = idle_transport(tmp_path, num_servers=2)
        join = transport._join

        async def joined(servers: Sequence[Server]) -> tuple[GroupAddress, str]:
            other = transport.engine.servers.all[1]
            other.is_up = not other.is_up
            return await join(servers)

        transport._join = joined  # type: ignore[method-assign]
        with pytest.raises(GroupBroken, match="lost or came back in every try"):
            await transport._joined()
        assert transport._group is None

    asyncio.run(play())


@pytest.mark.parametrize("error", [ServerLost, ServerRefused])
def test_a_server_that_does_not_say_how_many_gpus_it_has_ends_no_run(tmp_path: Path, error: type[Exception]) -> None:
    """One whose scheduler hangs still says which weights it has, and a gateway may refuse to say more."""

    async def play() -> None:
        transport = idle_transport(tmp_path, num_servers=2)
        servers, num_tries = transport.engine.servers, 0

        async def num_gpus() -> int:
            nonlocal num_tries
            num_tries += 1
            raise error("no answer")

        servers.all[0].client.num_gpus = num_gpus  # type: ignore[method-assign]
        lost: list[Server] = []

        def report_lost(server: Server, reason: str, must_restart: bool = False) -> None:
            lost.append(server)
            server.is_up = False

        servers.report_lost = report_lost  # type: ignore[method-assign]
        if error is ServerRefused:
            with pytest.raises(GroupBroken, match="no answer"):
                await transport._joined()
            assert not lost and num_tries == group_transport.MAX_TRIES
        else:
            assert await transport._joined() is not None
            assert lost == [servers.all[0]] and num_tries == 1

    asyncio.run(play())


def test_a_server_that_restarts_while_the_others_join_is_not_taken_for_a_member(tmp_path: Path) -> None:
    async def play() -> None:
        transport = idle_transport(tmp_path, num_servers=2)
        joins, join = list[int](), transport._join

        async def joined(servers: Sequence[Server]) -> tuple[GroupAddress, str]:
            address, fault = await join(servers)
            if not joins:
                servers[1].num_restarts += 1
            joins.append(len(servers))
            return address, fault

        transport._join = joined  # type: ignore[method-assign]
        await transport._joined()
        assert joins == [2, 2]

    asyncio.run(play())


def test_the_address_for_servers_is_one_that_they_can_reach() -> None:
    assert own_address(["127.0.0.1", "localhost"]) == "127.0.0.1"
    assert own_address(["127.0.0.1", "127.0.0.9"]) == "127.0.0.1"  # the way to it begins there
