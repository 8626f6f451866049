"""Claims about servers that get the adapter alone. They add it to the network themselves, not with peft's layers."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import pickle
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from agents.engines.sglang import SGLangEngine, SGLangSettings
from agents.engines.sglang.process import LocalProcess
from agents.engines.sglang.server_arguments import choose_arguments, launch_command
from agents.engines.sglang.server_facts import Host
from agents.engines.sglang.settings import ServerPlace
from agents.model.policy import PolicyModel
from agents.model.stream_logprobs import stream_logprobs
from agents.rendering.renderer import Renderer
from agents.types import Completion, GenerateRequest
from envs.errors import UserError
from tests.agents.engines.sglang_server import NEW, OLD, AdaptedLinear, LoadedAdapter
from tests.builders import fresh_model, sampling
from tests.prompts import make_image, question
from tests.servers import TAKES_ADAPTERS, serving
from trainer.config.learner import LearnerConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.lora import is_adapter
from trainer.learner.sharding import reshard
from trainer.setup.engines import adapters_alone
from trainer.weight_sync.sync import SyncError, WeightSync
from trainer.weight_sync.transports import AdapterTransport, ServersTransport, Transport

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")

PROMPT = question("Find x.", make_image())
SERVER = (sys.executable, "-m", "tests.agents.engines.sglang_server")


def learner_of(
    checkpoint: Path, renderer: Renderer, *targets: str, rank: int = 4, dtype: torch.dtype = torch.float32
) -> FSDPLearner:
    config = LearnerConfig(lora_rank=rank, lora_alpha=6.0, lora_targets=targets)
    network = PolicyModel.load(checkpoint, dtype)
    return FSDPLearner(network, sampling(renderer), num_steps=10, config=config, dtype=dtype, path=checkpoint)


def move(learner: FSDPLearner, seed: int = 3, scale: float = 0.3) -> None:
    """Change every adapter, as an optimizer step of a very high rate would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if is_adapter(name):
                local = parameter.to_local()  # type: ignore[operator]
                local.add_(torch.randn(local.shape, generator=generator) * scale)
    learner.steps_done += 1


def sync_of(learner: FSDPLearner, transport: Transport, renderer: Renderer) -> WeightSync:
    rendered = renderer.prompt(PROMPT)
    return WeightSync(learner, transport, rendered.ids, rendered.images, learner.model.image_token_id, tolerance=0.01)


def play_with(
    settings: SGLangSettings,
    learner: FSDPLearner,
    renderer: Renderer,
    folder: Path,
    play: Callable[[WeightSync, SGLangEngine], Awaitable[Any]],
    sync: str = "auto",
) -> Any:
    """Run `play` with servers that get the learner's adapters as a run's do."""

    async def run() -> Any:
        engine = SGLangEngine(settings, renderer.image_token_id)
        transport = adapters_alone(ServersTransport(learner, engine, folder / "sync"), sync, trains_adapters=True)
        try:
            return await play(sync_of(learner, transport, renderer), engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def started(checkpoint: Path, folder: Path) -> SGLangSettings:
    return SGLangSettings(str(checkpoint), command=SERVER, log_folder=folder, dtype="float32")


def external(url: str, checkpoint: Path) -> SGLangSettings:
    return SGLangSettings(str(checkpoint), urls=(url,), start_timeout_s=60)


@pytest.fixture(
    scope="module",
    params=[pytest.param((OLD, 1), marks=pytest.mark.slow), (NEW, 2)],
    ids=["old", "new, two GPUs"],
)
def adapting_server(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    release, num_gpus = request.param
    with serving(checkpoint, *TAKES_ADAPTERS, "--release", release, "--tp-size", str(num_gpus)) as url:
        yield url


@pytest.fixture
def url(adapting_server: str) -> str:
    """The address of a running server that takes adapters, as if just started."""
    tell(adapting_server, "reset", slow_s=0.0)
    return adapting_server


def tell(url: str, where: str, **body: Any) -> Any:
    """Post to a server and return its answer."""
    request = urllib.request.Request(f"{url}/{where}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def held(url: str) -> dict[str, Any]:
    """Return the names of a server's adapters, and the number of its encoded images."""
    with urllib.request.urlopen(f"{url}/held", timeout=20) as answer:
        return json.load(answer)


async def turn(engine: SGLangEngine, renderer: Renderer, num_tokens: int = 8) -> Completion:
    rendered = renderer.prompt(PROMPT)
    async with engine.session() as session:
        request = GenerateRequest(tuple(rendered.ids), rendered.images, num_tokens, sampling(renderer), seed=7)
        return await session.generate(request)


def own_logprobs(learner: FSDPLearner, renderer: Renderer, completion: Completion) -> np.ndarray:
    """Return the learner's log-probs of a turn, under the distribution that it was drawn by."""
    rendered = renderer.prompt(PROMPT)
    ids, distribution = [*rendered.ids, *completion.ids], sampling(renderer).distribution
    logprobs = stream_logprobs(learner.model, ids, rendered.images, "cpu", distribution=distribution)[
        -len(completion.ids) :
    ]
    reshard(learner.model)
    return logprobs


@pytest.mark.slow
def test_servers_with_the_adapter_have_the_learners_logprobs_also_after_a_restart(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)

    async def play(sync: WeightSync, engine: SGLangEngine) -> None:
        assert isinstance(sync.transport, AdapterTransport)
        assert await sync.start() < 1e-5
        move(learner)
        push = await sync.push(version=1)
        assert push.probe_gap is not None and push.probe_gap < 1e-5
        numbers = [p.numel() for name, p in learner.model.named_parameters() if is_adapter(name)]
        assert push.num_bytes == 4 * sum(numbers) < 0.2 * sum(w.nbytes for w in learner.weights().values())
        process = engine.servers.all[0].process
        assert isinstance(process, LocalProcess)
        process.popen.kill()
        process.popen.wait()
        completion = await turn(engine, renderer)
        assert engine.servers.all[0].num_restarts == 1 and completion.versions == ((1, len(completion.ids)),)
        assert np.abs(own_logprobs(learner, renderer, completion) - completion.logprobs).max() < 1e-4

    play_with(started(checkpoint, tmp_path), learner, renderer, tmp_path, play)
    assert not (tmp_path / "sync").exists()  # nothing went over disk


def test_each_turn_is_written_by_the_newest_adapter_and_names_it(
    url: str, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)

    async def play(sync: WeightSync, engine: SGLangEngine) -> list[Completion]:
        await sync.start()
        completions = []
        for version in (1, 2):
            move(learner, seed=version)
            await sync.push(version)
            completions.append(await turn(engine, renderer))
            assert np.abs(own_logprobs(learner, renderer, completions[-1]) - completions[-1].logprobs).max() < 1e-4
            assert held(url)["adapters"] == [engine.adapter_name]  # older ones are forgotten
        return completions

    one, two = play_with(external(url, checkpoint), learner, renderer, tmp_path, play)
    assert (one.versions, two.versions) == (((1, len(one.ids)),), ((2, len(two.ids)),))
    assert one.logprobs != two.logprobs
    assert held(url)["adapters"] == []  # the run has ended


@pytest.mark.parametrize(
    ("fault", "message"), [("scale twice", "does not run the learner's"), ("keep the adapter", "does not run")]
)
def test_an_adapter_that_is_scaled_wrongly_or_older_than_its_name_is_found_out(
    url: str, checkpoint: Path, renderer: Renderer, tmp_path: Path, fault: str, message: str
) -> None:
    learner = learner_of(checkpoint, renderer)

    async def play(sync: WeightSync, engine: SGLangEngine) -> None:
        await sync.start()
        move(learner)
        tell(url, "misbehave", path="load_lora_adapter_from_tensors", faults=[fault])
        with pytest.raises(SyncError, match=message):
            await sync.push(version=1)

    play_with(external(url, checkpoint), learner, renderer, tmp_path, play)


def test_a_running_server_with_other_weights_gets_the_checkpoint_below_the_adapter(
    url: str, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner, other = learner_of(checkpoint, renderer), learner_of(checkpoint, renderer)
    move(other)
    other.save(tmp_path / "other", torch.float32)
    tell(url, "update_weights_from_disk", model_path=str(tmp_path / "other"), weight_version="7")

    async def play(sync: WeightSync, engine: SGLangEngine) -> float:
        return await sync.start()

    assert play_with(external(url, checkpoint), learner, renderer, tmp_path, play) < 1e-5


def test_a_running_server_that_was_restarted_unnoticed_gets_the_adapter_and_no_turn_is_lost(
    url: str, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)

    async def play(sync: WeightSync, engine: SGLangEngine) -> Completion:
        await sync.start()
        move(learner)
        await sync.push(version=1)
        await asyncio.to_thread(tell, url, "reset", slow_s=0.0)
        return await turn(engine, renderer)

    completion = play_with(external(url, checkpoint), learner, renderer, tmp_path, play)
    assert completion.finish != "abort"
    assert np.abs(own_logprobs(learner, renderer, completion) - completion.logprobs).max() < 1e-4


def test_images_are_encoded_once_for_all_adapters(
    url: str, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    """The learner trains no part of the vision tower, so an encoding stays right; the server holds it by its hash."""
    learner = learner_of(checkpoint, renderer)
    assert not any("visual" in layer for layer in learner.adapter().layers)

    async def play(sync: WeightSync, engine: SGLangEngine) -> None:
        await sync.start()
        for version in (1, 2):
            move(learner, seed=version)
            await sync.push(version)
            assert await sync.probe() < 1e-5

    play_with(external(url, checkpoint), learner, renderer, tmp_path, play)
    assert held(url)["num_images"] == 1


def test_an_adapter_whose_requests_were_aborted_in_the_queue_is_not_waited_for(
    url: str, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)
    tell(url, "reset", slow_s=0.05)

    async def play(sync: WeightSync, engine: SGLangEngine) -> tuple[float, Completion, list[str]]:
        await sync.start()
        names = [engine.adapter_name]
        tell(url, "misbehave", path="generate", faults=["answer aborted"])  # as one that had not begun
        writing = asyncio.create_task(turn(engine, renderer, 40))
        await asyncio.sleep(0.3)
        await engine.pause()
        move(learner)
        push = await asyncio.wait_for(sync.push(version=1), 20)
        await engine.resume()
        return push.seconds, await writing, [*names, engine.adapter_name]

    seconds, completion, names = play_with(external(url, checkpoint), learner, renderer, tmp_path, play)
    assert seconds < 10 and completion.versions[-1][0] == 1
    assert held(url)["adapters"] == names[:1]  # the older one is kept


@pytest.mark.slow
def test_a_server_that_takes_no_adapters_gets_merged_weights_and_the_run_says_so_once(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)

    async def play(sync: WeightSync, engine: SGLangEngine) -> list[str]:
        assert await sync.start() < 1e-5
        move(learner)
        push = await sync.push(version=1)
        assert push.probe_gap is not None and push.probe_gap < 1e-5
        assert push.num_bytes > sum(w.nbytes for w in learner.weights().values())  # and the headers of the file
        completion = await turn(engine, renderer)
        assert np.abs(own_logprobs(learner, renderer, completion) - completion.logprobs).max() < 1e-4
        return list(sync.transport.events)

    async def refuse(sync: WeightSync, engine: SGLangEngine) -> None:
        with pytest.raises(UserError, match=r"--sync adapter: needs servers.*LoRA is not enabled.*--enable-lora"):
            await sync.start()

    with serving(checkpoint) as url:
        events = play_with(external(url, checkpoint), learner, renderer, tmp_path, play)
        assert len(events) == 1
        assert "merged weights, not the adapter alone" in events[0] and "LoRA is not enabled" in events[0]
        play_with(external(url, checkpoint), learner, renderer, tmp_path, refuse, sync="adapter")


def test_a_server_that_fails_at_its_first_adapter_gets_merged_weights(
    url: str, checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer)
    tell(url, "misbehave", path="load_lora_adapter_from_tensors", faults=["status 500"])

    async def play(sync: WeightSync, engine: SGLangEngine) -> tuple[float, list[str]]:
        await sync.start()
        move(learner)
        push = await sync.push(version=1)
        assert push.probe_gap is not None
        return push.probe_gap, list(sync.transport.events)

    gap, events = play_with(external(url, checkpoint), learner, renderer, tmp_path, play)
    assert gap < 1e-5 and len(events) == 1 and "status 500" in events[0]


def command_of(engine: SGLangEngine) -> list[str]:
    """Return the command that starts the first server."""
    settings = engine.servers.settings
    return launch_command(settings, choose_arguments(settings, ServerPlace(30000), Host()))


def test_layers_that_servers_cannot_adapt_are_known_before_the_start(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer, "up_proj")
    engine = SGLangEngine(SGLangSettings(str(checkpoint)), renderer.image_token_id)
    merged = ServersTransport(learner, engine, tmp_path)
    assert adapters_alone(merged, "auto", trains_adapters=True) is merged
    assert engine.servers.events == [
        "servers get merged weights, not the adapter alone: servers adapt up_proj only together with gate_proj"
    ]
    with pytest.raises(UserError, match=r"--sync adapter: needs servers that take the adapter.*up_proj only together"):
        adapters_alone(merged, "adapter", trains_adapters=True)
    with pytest.raises(UserError, match=r"--sync adapter: needs adapters.*give --lora-rank"):
        adapters_alone(merged, "adapter", trains_adapters=False)
    assert "--enable-lora" not in command_of(engine)


def test_started_servers_are_told_the_rank_and_the_layers_of_the_adapters(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    learner = learner_of(checkpoint, renderer, "q_proj", "v_proj", rank=3)
    settings = SGLangSettings(str(checkpoint), arguments=("--max-loras-per-batch", "4"))
    engine = SGLangEngine(settings, renderer.image_token_id)
    merged = ServersTransport(learner, engine, tmp_path)
    assert adapters_alone(merged, "disk", trains_adapters=True) is merged
    assert "--enable-lora" not in command_of(engine)
    adapters_alone(merged, "auto", trains_adapters=True)
    words = command_of(engine)
    first = words.index("--enable-lora")
    given = ["--enable-lora", "--max-lora-rank", "3", "--lora-target-modules", "q_proj", "v_proj"]
    assert words[first : first + 6] == given
    assert words.count("--max-loras-per-batch") == 1  # the user's own


def test_an_adapter_has_pefts_names_and_the_learners_dtype(
    checkpoint: Path, renderer: Renderer, tmp_path: Path
) -> None:
    """peft itself reads it: what it adds to the checkpoint is what the learner computes."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    learner = learner_of(checkpoint, renderer)
    move(learner)
    adapter = learner.adapter()
    tensors = pickle.loads(base64.b64decode(adapter.tensors))
    base: Any = fresh_model(checkpoint)
    options = {key: adapter.config[key] for key in ("r", "lora_alpha", "bias")}
    network = get_peft_model(base.backbone, LoraConfig(target_modules=list(adapter.layers), **options))
    found: Any = set_peft_model_state_dict(network, tensors)
    assert not found.unexpected_keys
    base.backbone = network.base_model.model
    rendered = renderer.prompt(PROMPT)
    scores = stream_logprobs(base, rendered.ids, rendered.images, "cpu")
    assert np.abs(scores - learner.score(rendered.ids, rendered.images)).max() < 1e-5
    learner.dtype = torch.bfloat16
    assert learner.adapter().num_bytes == adapter.num_bytes // 2


def test_in_bfloat16_the_adapter_alone_computes_the_learners_forward_and_merged_weights_do_not(
    checkpoint: Path, renderer: Renderer
) -> None:
    """Small updates, as those of first steps, vanish where they are rounded together with the weights."""
    rendered, dtype = renderer.prompt(PROMPT), torch.bfloat16
    learner = learner_of(checkpoint, renderer, dtype=dtype)
    move(learner, scale=1e-3)
    own = learner.score(rendered.ids, rendered.images)

    def gap(network: PolicyModel) -> float:
        return float(np.abs(stream_logprobs(network, rendered.ids, rendered.images, "cpu", dtype) - own).mean())

    merged, adapted = PolicyModel.load(checkpoint, dtype), PolicyModel.load(checkpoint, dtype)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(learner.weights()[name])
    adapter = learner.adapter()
    read = LoadedAdapter.read(adapter.tensors, adapter.config, dtype)
    for name, module in adapted.backbone.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = AdaptedLinear
            module.use(read, name)
    assert gap(adapted) < gap(merged) / 4
