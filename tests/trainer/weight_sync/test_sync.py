"""Claims about how new weights reach an engine, and about the probe that proves it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import io
import pickle
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from agents.engines.hf import HFEngine
from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.client import SGLangClient
from agents.engines.sglang.process import LocalProcess
from agents.engines.sglang.servers import Server
from agents.model.architectures import ModelFacts
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.rendering.renderer import Renderer
from agents.types import Completion, GenerateRequest
from tests.builders import fresh_model, sampling
from tests.prompts import make_image, question
from trainer.learner.buckets import buckets
from trainer.learner.cuda_ipc import COUNTER_PLACES, DEVICE_PLACE, Counters, WeightHandles, handles, share_weights
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.weight_sync.sync import SyncError, WeightSync
from trainer.weight_sync.transports import InProcessTransport, IpcTransport, ServersTransport

PROMPT = question("Find x.", make_image())


def learner_of(checkpoint: Path, renderer: Renderer) -> FSDPLearner:
    return FSDPLearner(fresh_model(checkpoint), sampling(renderer), num_steps=10)


def move(learner: FSDPLearner, scale: float = 0.3) -> None:
    """Change every weight, as an optimizer step of a very high rate would."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            local = parameter.to_local()  # type: ignore[operator]
            local.add_(torch.randn_like(local) * scale * local.std().nan_to_num(0.0))
    learner.steps_done += 1


def sync_of(learner: FSDPLearner, engine: HFEngine | SGLangEngine, renderer: Renderer, folder: Path) -> WeightSync:
    rendered = renderer.prompt(PROMPT)
    transport = (
        InProcessTransport(learner, engine)
        if isinstance(engine, HFEngine)
        else ServersTransport(learner, engine, folder)
    )
    image_token_id = learner.model.image_token_id
    return WeightSync(learner, transport, rendered.ids, rendered.images, image_token_id, tolerance=0.01)


def test_the_embedded_engine_runs_the_learners_weights_after_a_push(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner, engine = learner_of(checkpoint, renderer), HFEngine(fresh_model(checkpoint))
    sync = sync_of(learner, engine, renderer, tmp_path)

    async def play() -> None:
        assert await sync.start() < 1e-5
        for version in (1, 2):
            move(learner)
            gap = (await sync.push(version)).probe_gap
            assert gap is not None
            assert gap < 1e-5
            assert engine.weight_version == version

    asyncio.run(play())


def test_a_push_that_does_not_arrive_is_found_out(checkpoint: Path, renderer: Renderer, tmp_path: Path) -> None:
    learner, engine = learner_of(checkpoint, renderer), HFEngine(fresh_model(checkpoint))
    sync = sync_of(learner, engine, renderer, tmp_path)
    engine.load_weights = lambda weights, version: None  # type: ignore[method-assign]

    async def play() -> None:
        await sync.start()
        move(learner)
        with pytest.raises(SyncError, match="does not run the learner's weights"):
            await sync.push(version=1)

    asyncio.run(play())


def test_an_engine_that_starts_with_other_weights_is_found_out(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner, engine = learner_of(checkpoint, renderer), HFEngine(fresh_model(checkpoint))
    move(learner)
    with pytest.raises(SyncError, match="log-probs of a stream"):
        asyncio.run(sync_of(learner, engine, renderer, tmp_path).start())


def test_an_engine_whose_log_probs_are_nan_is_found_out(checkpoint: Path, renderer: Renderer, tmp_path: Path) -> None:
    learner, engine = learner_of(checkpoint, renderer), HFEngine(fresh_model(checkpoint))
    sync = sync_of(learner, engine, renderer, tmp_path)

    async def score(ids: Any, images: Any) -> np.ndarray:
        return np.full(len(ids) - 1, np.nan, dtype=np.float32)

    engine.score = score  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="differ by inf nats"):
        asyncio.run(sync.start())


def silent_engine(renderer: Renderer) -> SGLangEngine:
    """An engine whose servers are never started."""
    engine = SGLangEngine(SGLangSettings(), renderer.image_token_id)
    engine._idle.set()
    return engine


def test_a_folder_with_older_weights_is_there_until_all_servers_have_the_new_ones(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner, engine, seen = learner_of(checkpoint, renderer), silent_engine(renderer), []
    transport = ServersTransport(learner, engine, tmp_path)

    async def update(folder: Path, version: int) -> None:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))

    async def play() -> None:
        engine.update_from_disk = update  # type: ignore[method-assign]
        for learner.steps_done in range(3):
            await transport.push(learner.steps_done)

    asyncio.run(play())
    assert seen == [["version-0"], ["version-0", "version-1"], ["version-1", "version-2"]]
    assert [path.name for path in tmp_path.iterdir()] == ["version-2"]


def test_weights_for_a_server_that_comes_back_wait_for_the_learners_step_and_are_written_once(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner, saved = learner_of(checkpoint, renderer), []
    transport = ServersTransport(learner, silent_engine(renderer), tmp_path)
    save = learner.save

    def noted(folder: Path, dtype: torch.dtype) -> None:
        saved.append((folder.name, learner.steps_done))
        save(folder, dtype)

    learner.save = noted  # type: ignore[method-assign]
    threads = [threading.Thread(target=transport.save) for _ in range(2)]

    def slow_step(minibatches: Any) -> Any:
        for thread in threads:
            thread.start()
            thread.join(0.3)
            assert thread.is_alive(), "the weights were read in the middle of a step"
        learner.steps_done += 1

    learner._step = slow_step  # type: ignore[method-assign]
    learner.step([[]])
    for thread in threads:
        thread.join()
    assert saved == [("version-1", 1)]


def test_weights_in_several_messages_get_their_name_with_the_last_one() -> None:
    """Else a server that is lost between two of them would come back as one that has them all."""
    bodies: list[dict[str, Any]] = []

    async def call(path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        if path.startswith("flush_cache?"):  # waits until the server is idle
            return {}
        assert timeout_s is not None and timeout_s >= 600, "loading weights takes longer than a turn may"
        bodies.append(body)
        return {"success": True, "message": ""}

    async def play() -> None:
        client = SGLangClient("http://nowhere", None, timeout_s=5)  # type: ignore[arg-type]
        client.call = call  # type: ignore[method-assign, assignment]
        await client.update_from_tensors(["payload"] * 3, version=4)

    asyncio.run(play())
    assert [(body.get("weight_version"), body["flush_cache"]) for body in bodies] == [
        (None, False),
        (None, False),
        ("4", True),
    ]


@pytest.mark.slow
def test_servers_are_given_weights_from_disk_in_full_precision_and_again_after_a_restart(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)
    command = (sys.executable, "-m", "tests.agents.engines.sglang_server")
    settings = SGLangSettings(str(checkpoint), command=command, log_folder=tmp_path, dtype="float32")
    engine = SGLangEngine(settings, renderer.image_token_id)
    sync = sync_of(learner, engine, renderer, tmp_path / "sync")
    rendered = renderer.prompt(PROMPT)

    async def play() -> np.ndarray:
        try:
            await sync.start()
            move(learner)
            gap = (await sync.push(version=1)).probe_gap
            assert gap is not None
            assert gap < 1e-5
            process = engine.servers.all[0].process
            assert isinstance(process, LocalProcess)
            process.popen.kill()
            process.popen.wait()
            engine.servers.report_lost(engine.servers.all[0], "killed")
            await engine.servers.pick()
            return await engine.score(rendered.ids, rendered.images)
        finally:
            await engine.close()

    score = asyncio.run(asyncio.wait_for(play(), 120))
    sync.close()
    assert np.abs(score - learner.score(rendered.ids, rendered.images)).max() < 1e-4
    assert not (tmp_path / "sync").exists()


# Freed weights come back without their values, and a server that writes without memory ends.
@pytest.mark.slow
def test_a_server_on_the_learners_gpu_has_no_memory_while_it_trains_and_goes_on_with_the_new_weights(
    checkpoint: Path, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(checkpoint, renderer)
    settings = SGLangSettings(
        str(checkpoint),
        command=(sys.executable, "-m", "tests.agents.engines.sglang_server"),
        arguments=("--enable-memory-saver", "--slow-s", "0.05"),
        log_folder=tmp_path,
        dtype="float32",
        frees_memory=True,
    )
    engine = SGLangEngine(settings, renderer.image_token_id)
    lacking: list[tuple[str, ...]] = []  # what the server lacks each time that the learner returns memory
    monkeypatch.setattr(learner, "free_memory", lambda: lacking.append(engine.servers.all[0].freed))
    sync = sync_of(learner, engine, renderer, tmp_path / "sync")
    ids = renderer.prompt(PROMPT).ids
    endless = replace(sampling(renderer), stop_ids=())
    request = GenerateRequest(ids, renderer.prompt(PROMPT).images, 40, endless, seed=1)

    async def turn() -> Completion:
        async with engine.session() as session:
            return await session.generate(request)

    async def train(version: int, kill: bool = False) -> None:
        await sync.begin_training()
        (server,) = engine.servers.all
        assert set(server.freed) == {"kv_cache", "weights"} and engine.is_paused
        if kill:
            assert isinstance(server.process, LocalProcess)
            server.process.popen.kill()
            server.process.popen.wait()
            engine.servers.report_lost(server, "killed")
            await asyncio.sleep(1.0)
            assert server.process.ended(), "a server must not start while the learner has its memory"
        move(learner)
        await sync.push(version)

    async def play() -> Completion:
        try:
            await sync.start()
            assert not any("keeps its memory" in event for event in engine.servers.events)
            writing = asyncio.create_task(turn())
            while not engine.num_requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            await train(version=1)
            assert engine.servers.all[0].freed == () and engine.servers.all[0].num_restarts == 0
            assert lacking == [("kv_cache", "weights"), ("kv_cache",)]
            completion = await writing
            await train(version=2, kill=True)
            later = await turn()
            assert later.versions == ((2, 40),) and engine.servers.all[0].num_restarts == 1
            return completion
        finally:
            await engine.close()

    completion = asyncio.run(asyncio.wait_for(play(), 120))
    assert [version for version, _ in completion.versions] == [0, 1]


def test_the_learners_checkpoint_is_its_weights(checkpoint: Path, renderer: Renderer, tmp_path: Path) -> None:
    learner = learner_of(checkpoint, renderer)
    move(learner)
    learner.save(tmp_path / "saved", torch.float32)
    rendered = renderer.prompt(PROMPT)
    saved = stream_logprobs(PolicyModel.load(tmp_path / "saved"), rendered.ids, rendered.images, "cpu")
    assert np.abs(saved - learner.score(rendered.ids, rendered.images)).max() < 1e-5


def test_buckets_hold_every_weight_once_under_its_name_in_the_checkpoint(checkpoint: Path, renderer: Renderer) -> None:
    learner = learner_of(checkpoint, renderer)
    weights = learner.weights()
    cut = list(buckets(learner.stream(), 100_000))
    assert len(cut) > 1 and all(bucket.flat.numel() <= 100_000 for bucket in cut if len(bucket.named) > 1)
    named = [pair for bucket in cut for pair in bucket.named]
    assert [name for name, _ in named] == [name.removeprefix("backbone.") for name in weights]
    assert all(torch.equal(given, weights["backbone." + name]) for name, given in named)
    assert [(name, tuple(given.shape)) for name, given in named] == learner.shapes()
    assert all(torch.equal(bucket.flat, torch.cat([w.flatten() for _, w in bucket.named])) for bucket in cut)


def test_handles_are_a_pickle_of_names_and_tensors() -> None:
    tensor = torch.arange(4.0)
    ((name, given),) = pickle.load(io.BytesIO(base64.b64decode(handles([("a", tensor)], Counters()))))
    assert name == "a"
    assert torch.equal(given, tensor)


def test_lent_weights_go_to_every_gpu_of_every_server_and_are_held_until_all_have_them(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner, seen = learner_of(checkpoint, renderer), []
    engine = SGLangEngine(SGLangSettings(tensor_parallel=2), renderer.image_token_id)
    engine._idle.set()
    is_open: list[bool] = []
    given: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def shared_once() -> Iterator[WeightHandles]:
        is_open.append(True)
        with share_weights(learner) as shared:
            yield shared
        is_open.clear()

    async def call(path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        if path.startswith("flush_cache?"):  # waits until the server is idle
            return {}
        assert is_open and path == "update_weights_from_tensor"
        payload, other = body["serialized_named_tensors"]
        assert payload == other and body["weight_version"] == "1"
        seen.append(payload)
        if len(seen) == 1:  # handles of tensors on a CPU can be taken once
            given.update(pickle.load(io.BytesIO(base64.b64decode(payload))))
        return {"success": True, "message": ""}

    async def play() -> None:
        client = SGLangClient("http://nowhere", None, timeout_s=5)  # type: ignore[arg-type]
        client.call = call  # type: ignore[method-assign, assignment]
        engine.servers.all = [Server(client.url, number, is_up=True) for number in range(2)]
        for server in engine.servers.all:
            server.client = client
        await IpcTransport(learner, engine, tmp_path, shared_once).push(version=1)

    asyncio.run(play())
    assert not is_open and len(seen) == 2 and seen[0] == seen[1]
    assert all(torch.equal(given[name.removeprefix("backbone.")], w) for name, w in learner.weights().items())


LENT, READ = "update_weights_from_tensor", "update_weights_from_disk"


@pytest.mark.parametrize(
    ("nodes", "lenders", "paths"),
    [(("a", "b"), "a", [LENT, READ]), (("b",), "a", [READ]), (("b", "a"), "ab", [LENT, READ])],
    ids=["one is near", "none is near", "the lender has moved"],
)
def test_servers_on_other_nodes_than_the_lender_read_the_folder(
    nodes: tuple[str, ...], lenders: str, paths: list[str], checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner, loans = learner_of(checkpoint, renderer), []
    engine = SGLangEngine(SGLangSettings(), renderer.image_token_id)
    engine._idle.set()
    seen: dict[str, tuple[str, dict[str, Any]]] = {}

    @contextlib.contextmanager
    def share_weights() -> Iterator[WeightHandles]:
        loans.append(WeightHandles(("handles",), 7))
        yield loans[-1]

    def server(number: int, node: str) -> Server:
        async def call(path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
            seen[node] = path, body
            return {"success": True, "message": ""}

        found = Server("http://nowhere", number, is_up=True)
        found.client = SGLangClient("http://nowhere", None, timeout_s=5)  # type: ignore[arg-type]
        found.client.node, found.client.call = node, call  # type: ignore[method-assign, assignment]
        return found

    async def play() -> None:
        engine.servers.all = [server(number, node) for number, node in enumerate(nodes)]
        node_of_rank_0 = list(lenders)
        transport = IpcTransport(learner, engine, tmp_path, share_weights, node=lambda: node_of_rank_0[0])
        for version in range(len(lenders)):
            await transport.push(version)
            node_of_rank_0.pop(0)

    asyncio.run(play())
    assert [seen[node][0] for node in nodes] == paths
    assert len(loans) == sum(node in nodes for node in lenders)
    folder = Path(seen[nodes[-1]][1]["model_path"])
    loaded = dict(PolicyModel.load(folder).named_parameters())
    assert all(torch.equal(loaded[name], weight) for name, weight in learner.weights().items())


def test_torch_takes_the_device_of_a_handle_where_its_gpu_is_named() -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[DEVICE_PLACE] == "storage_device"
    assert names[COUNTER_PLACES] == ["ref_counter_handle", "ref_counter_offset"]


@pytest.mark.skipif(sys.platform != "linux", reason="where shared memory has files")
def test_what_was_lent_is_free_whatever_its_receivers_did() -> None:
    """A storage in the shared memory of torch's allocator, as it keeps its counters of lent tensors in."""
    storage = torch.UntypedStorage._new_using_filename_cpu(8 * 100)
    _, name, _ = storage._share_filename_cpu_()  # type: ignore[attr-defined]
    words = torch.tensor([], dtype=torch.int64).set_(storage, 0, (100,))  # type: ignore[call-overload]
    words.fill_(1)
    counters = Counters()
    for number in (0, 3, 7, 99):
        counters.add(name, number)
    assert counters.are_new()
    words[3], words[7], words[99] = 0, -1, 2  # one receiver has let go, two have, one has died
    assert not counters.are_new()
    counters.clear()
    assert words[[0, 3, 7, 99]].tolist() == [0] * 4 and int(words.sum()) == 96
    beyond, gone = Counters(), Counters()
    beyond.add(name, 100)
    gone.add(b"/torch_that_is_gone", 1)
    assert not beyond.are_new() and not gone.are_new()
    gone.clear()


def test_the_facts_of_a_model_are_those_of_its_network(checkpoint: Path, model: PolicyModel) -> None:
    facts = ModelFacts.load(checkpoint)
    assert (facts.model_type, list(facts.architectures)) == (model.config.model_type, model.config.architectures)
    assert (facts.image_token_id, facts.merge_size) == (model.image_token_id, model.merge_size)
    assert facts.max_positions == model.config.get_text_config().max_position_embeddings


def test_scoring_leaves_the_learners_own_weights_in_full_precision(checkpoint: Path, renderer: Renderer) -> None:
    rendered = renderer.prompt(PROMPT)
    model = fresh_model(checkpoint)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learner = FSDPLearner(model, sampling(renderer), num_steps=1, dtype=torch.bfloat16)
    learner.score(rendered.ids, rendered.images)
    after = learner.weights()
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert all(torch.equal(after[name], before[name]) for name in before)
