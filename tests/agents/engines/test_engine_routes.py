"""Claims about the routes that the embedded engine gives: those of one plain forward over the whole stream.

The expected experts are chosen by the gates of a plain network of Transformers.

Legend: R tokens with routes, L layers, K experts of a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agents.engines.decode_step import DecodeStep
from agents.engines.hf import HFEngine
from agents.engines.hf_batch import BatchCache, BatchTurn, CachedPrefix
from agents.model.policy import PolicyModel
from agents.types import Completion, GenerateRequest, SamplingParams
from tests.mixtures import NUM_LAYERS, TOP_K, routes_of_transformers, stream
from tests.tiny_models import write_tiny_model

Played = list[tuple[GenerateRequest, Completion]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    write_tiny_model(path, "qwen3_vl_moe")
    return path


@pytest.fixture
def model(folder: Path) -> PolicyModel:
    return PolicyModel.load(folder)


@pytest.fixture
def network(model: PolicyModel, folder: Path) -> Any:
    """The same weights, as Transformers reads them."""
    return model.architecture.read(folder, dtype=torch.float32, attn_implementation="eager").eval()


def law(model: PolicyModel) -> SamplingParams:
    return SamplingParams(suppressed_ids=(model.image_token_id, model.config.video_token_id))


async def episode(engine: HFEngine, group: int, number: int) -> Played:
    """Play three turns with an image before each; episodes of one group have one prompt."""
    turns: Played = []
    said = stream(engine.model, 12 + 5 * group, seed=group)
    ids = said.ids
    images = said.images
    num_routed = 0
    async with engine.session() as session:
        for turn in range(3):
            budget = 2 + (3 * turn + number) % 5
            request = GenerateRequest(ids, images, budget, law(engine.model), seed=7 * number + turn)
            done = await session.generate(replace(request, num_routed=num_routed))
            turns.append((request, done))
            said = stream(engine.model, 6 + number, seed=100 * turn + number)
            num_routed = len(ids) + len(done.ids) - 1
            ids = request.ids + done.ids + said.ids
            images = images + said.images
    return turns


def joined(turns: Sequence[tuple[GenerateRequest, Completion]]) -> np.ndarray:
    routes = [done.routes_RLK for _, done in turns]
    assert all(each is not None and each.dtype == np.uint8 for each in routes)
    return np.concatenate([each for each in routes if each is not None])


def assert_those_of_transformers(network: Any, turns: Played) -> None:
    request, done = turns[-1]
    expected = routes_of_transformers(network, (request.ids + done.ids)[:-1], request.images)
    got = joined(turns)
    assert got.shape == (len(request.ids) + len(done.ids) - 1, NUM_LAYERS, TOP_K)
    assert np.array_equal(got, expected.numpy())


def test_over_turns_with_images_the_routes_are_those_of_one_forward_over_the_stream(
    model: PolicyModel, network: Any
) -> None:
    """Two groups read their prompts once, sessions end one by one, and rows are padded."""
    engine = HFEngine(model)
    assert engine.capabilities.gives_routes

    async def everything() -> list[Played]:
        plans = [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4)]
        return list(await asyncio.gather(*(episode(engine, group, number) for group, number in plans)))

    played = asyncio.run(everything())
    assert any(done.num_cached for turns in played for _, done in turns)
    for turns in played:
        assert_those_of_transformers(network, turns)


def test_a_turn_that_asks_for_no_routes_gets_none(model: PolicyModel) -> None:
    said = stream(model, 12, seed=0)

    async def once() -> Completion:
        async with HFEngine(model).session() as session:
            return await session.generate(GenerateRequest(said.ids, said.images, 4, law(model), seed=0))

    assert asyncio.run(once()).routes_RLK is None


def test_scoring_while_turns_are_written_leaves_their_routes_as_they_are(model: PolicyModel, network: Any) -> None:
    engine = HFEngine(model)
    said = stream(model, 40, seed=9)

    async def both() -> Played:
        playing = asyncio.create_task(episode(engine, 0, 4))
        while not playing.done():
            await engine.score(said.ids, said.images)
        return await playing

    for _ in range(5):
        assert_those_of_transformers(network, asyncio.run(both()))


class PausesAfter(HFEngine):
    """Pauses by itself after so many decode steps."""

    steps_left = 4

    def _next(self, cache: BatchCache, ids_B: Tensor, positions_B: Tensor, real: Sequence[bool]) -> Tensor:
        self.steps_left -= 1
        self._paused = self.steps_left == 0
        return super()._next(cache, ids_B, positions_B, real)


@pytest.mark.parametrize("is_changed", [False, True], ids=["the same weights", "new weights"])
def test_after_a_pause_tokens_keep_the_routes_of_the_weights_that_wrote_them(
    model: PolicyModel, network: Any, is_changed: bool
) -> None:
    engine = PausesAfter(model)
    said = stream(model, 14, seed=3)
    request = GenerateRequest(said.ids, said.images, 12, law(model), seed=1, num_routed=5)
    turn = BatchTurn(request, CachedPrefix(), asyncio.new_event_loop().create_future())
    engine.write([turn])
    num_before = len(turn.ids)
    assert 0 < num_before < 12
    before = routes_of_transformers(network, turn.stream[:-1], said.images)[5:]
    if is_changed:
        gate = "model.language_model.layers.1.mlp.gate.weight"
        weights = {name: weight.detach().clone() for name, weight in engine.weights().items()}
        weights[f"backbone.{gate}"] *= -1
        network.get_parameter(gate).data.mul_(-1)
        engine.load_weights(weights, version=1)
        turn.prefix = CachedPrefix()  # as for every turn that waits
    engine._paused = False
    engine.write([turn])
    after = routes_of_transformers(network, turn.stream[:-1], said.images)[5:]
    expected = torch.cat([before, after[len(before) :]])
    got = turn.completion().routes_RLK
    assert got is not None and np.array_equal(got, expected.numpy())
    assert torch.equal(expected, after) is not is_changed


@torch.no_grad()
def test_a_decode_step_at_fixed_places_keeps_the_routes_of_each_row(model: PolicyModel, network: Any) -> None:
    """On a GPU such a step is a graph; its arithmetic is the same here."""
    engine = HFEngine(model)
    streams = [stream(model, 12, seed=0), stream(model, 20, seed=1)]
    turns = [
        BatchTurn(GenerateRequest(s.ids, s.images, 8, law(model), seed=0), CachedPrefix(), None)  # type: ignore[arg-type]
        for s in streams
    ]
    cache = BatchCache([CachedPrefix(), CachedPrefix()], max(len(s.ids) for s in streams) + 3, engine.device)
    engine._prefill(turns, [len(s.ids) for s in streams], cache)
    positions_B = torch.tensor([int(model.positions(s.ids, s.images).max()) + 1 for s in streams])
    step = DecodeStep(model, cache, 2, engine.device)
    for number in range(3):
        cache.begin(torch.ones(2, 1, dtype=torch.bool))
        step.next_logits(torch.tensor([30 + number, 40 + number]), positions_B + number)
        cache.advance()
    for row, each in enumerate(streams):
        ids = (*each.ids, *(10 * row + 30 + number for number in range(3)))
        kept = cache.routes_of(row)
        assert kept is not None
        assert torch.equal(kept.long(), routes_of_transformers(network, ids, each.images))
