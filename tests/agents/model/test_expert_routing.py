"""Claims about the routes of a mixture: given experts compute what Transformers computes if its gates choose them.

The expected values are those of a plain network of Transformers whose top-k function the test replaces.

Legend: T tokens of one stream, L layers, K experts of a token, E experts.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from agents.model.packed import PackedStreams
from agents.model.policy import PolicyModel
from agents.types import RouteShape, SamplingDistribution
from tests.mixtures import NUM_EXPERTS, NUM_LAYERS, TOP_K, Stream, logits_of_transformers, packed, random_routes, stream
from tests.tiny_models import write_tiny_model
from trainer.learner.sharding import recompute


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    write_tiny_model(path, "qwen3_vl_moe")
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> PolicyModel:
    return PolicyModel.load(folder)


@pytest.fixture
def model(loaded: PolicyModel) -> PolicyModel:
    return copy.deepcopy(loaded)


@pytest.fixture
def network(loaded: PolicyModel, folder: Path) -> Any:
    """The same weights, as Transformers reads them."""
    return loaded.architecture.read(folder, dtype=torch.float32, attn_implementation="eager")


def own_routes(model: PolicyModel, streams: Sequence[Stream]) -> Tensor:
    """Return what a forward over the streams chooses freely."""
    with torch.no_grad():
        model.token_scores(packed(model, streams), SamplingDistribution(), keeps_chosen=True)
    return model.routing.chosen()


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    found = {n.removeprefix("backbone."): p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def scored(model: PolicyModel, batch: PackedStreams) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the log-probs of a batch, and the gradients of the sum of their squares."""
    logprobs_N, _ = model.token_scores(batch, SamplingDistribution())
    logprobs_N.square().sum().backward()
    return logprobs_N.detach(), gradients(model)


def scored_by_transformers(
    network: Any, each: Stream, routes_TLK: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the same of one stream by Transformers, whose gates take the given experts, or the best of rows of -1."""
    topk = torch.topk
    remaining = list(routes_TLK.long().unbind(1))

    def given(probs_TE: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
        free_TK = topk(probs_TE, k, dim=dim).indices
        chosen_TK = remaining.pop(0)
        chosen_TK = torch.where(chosen_TK < 0, free_TK, chosen_TK)
        return torch.stack([probs_TE[torch.arange(len(probs_TE)), e] for e in chosen_TK.T], dim=1), chosen_TK

    monkeypatch.setattr(torch, "topk", given)
    ids_1T = torch.tensor([each.ids])
    logits_TV = logits_of_transformers(network, each.ids, each.images)
    monkeypatch.undo()
    assert not remaining, "every layer has asked once"
    logprobs_N = logits_TV.log_softmax(-1)[:-1].gather(-1, ids_1T[0, 1:, None])[:, 0]
    logprobs_N.square().sum().backward()
    return logprobs_N.detach(), gradients(network)


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() <= bound * gradient.norm() + 1e-7, name


def test_routes_that_the_network_chose_itself_change_no_bit_of_values_and_gradients(model: PolicyModel) -> None:
    streams = [stream(model, 30, seed=0), stream(model, 18, seed=1)]
    routes_TLK = own_routes(model, streams)
    assert routes_TLK.shape == (sum(len(s.ids) for s in streams), NUM_LAYERS, TOP_K)
    free, free_gradients = scored(model, packed(model, streams))
    given, given_gradients = scored(model, packed(model, streams, routes_TLK))
    assert torch.equal(free, given)
    assert all(torch.equal(given_gradients[name], gradient) for name, gradient in free_gradients.items())


def test_free_choice_is_that_of_transformers(model: PolicyModel, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    each = stream(model, 30, seed=0)
    nowhere = torch.full((len(each.ids), NUM_LAYERS, TOP_K), -1)
    got, got_gradients = scored(model, packed(model, [each]))
    expected, expected_gradients = scored_by_transformers(network, each, nowhere, monkeypatch)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    assert_close(got_gradients, expected_gradients)


@pytest.mark.parametrize("share_given", [1.0, 0.6], ids=["all tokens", "some tokens"])
def test_given_experts_compute_what_transformers_computes_with_them(
    model: PolicyModel, network: Any, monkeypatch: pytest.MonkeyPatch, share_given: float
) -> None:
    streams = [stream(model, 30, seed=0), stream(model, 18, seed=1)]
    lengths = [len(each.ids) for each in streams]
    routes_TLK = random_routes(sum(lengths), seed=2)
    routes_TLK[torch.from_numpy(np.random.default_rng(3).random(sum(lengths)) >= share_given)] = -1
    got, got_gradients = scored(model, packed(model, streams, routes_TLK))
    free, _ = scored(model, packed(model, streams))
    assert (got - free).abs().max() > 0.1  # other experts are another network
    parts = [
        scored_by_transformers(network, each, routes, monkeypatch)
        for each, routes in zip(streams, routes_TLK.split(lengths), strict=True)
    ]
    torch.testing.assert_close(got, torch.cat([logprobs for logprobs, _ in parts]), rtol=0, atol=2e-5)
    total = {name: parts[0][1][name] + parts[1][1][name] for name in parts[0][1]}
    assert_close(got_gradients, total)
    assert all(total[f"model.language_model.layers.{n}.mlp.gate.weight"].norm() > 0 for n in range(NUM_LAYERS))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_recomputed_blocks_take_the_same_routes_and_the_next_batch_its_own(model: PolicyModel, share: float) -> None:
    streams = [stream(model, 30, seed=0), stream(model, 24, seed=1)]
    batches = [packed(model, [s], random_routes(len(s.ids), seed)) for seed, s in enumerate(streams)]
    expected = [scored(model, batch) for batch in batches]
    recompute(model.blocks, share)
    for batch, (logprobs_N, its_gradients) in zip(batches, expected, strict=True):
        got, got_gradients = scored(model, batch)
        assert torch.equal(got, logprobs_N)
        assert all(torch.equal(got_gradients[name], gradient) for name, gradient in its_gradients.items())


@pytest.mark.slow
def test_compiled_blocks_take_each_batchs_routes_from_one_form(model: PolicyModel) -> None:
    streams = [stream(model, length, seed) for seed, length in enumerate((30, 24, 41))]
    batches = [packed(model, [s], random_routes(len(s.ids), seed)) for seed, s in enumerate(streams)]
    expected = [scored(model, batch) for batch in batches]
    torch._dynamo.reset()
    counters.clear()
    for layer in model.architecture.decoder(model.backbone).layers:
        # As `trainer.learner.sharding` compiles them, but without kernels of their own.
        plain = inspect.unwrap(type(layer).forward)
        layer.forward = functools.partial(torch.compile(plain, dynamic=True, backend="aot_eager"), layer)
    recompute(model.blocks, 1.0)
    for batch, (logprobs_N, its_gradients) in zip(batches, expected, strict=True):
        got, got_gradients = scored(model, batch)
        assert torch.equal(got, logprobs_N)
        assert all(torch.equal(got_gradients[name], gradient) for name, gradient in its_gradients.items())
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_rows_of_a_dense_layer_say_nothing(loaded: PolicyModel) -> None:
    config = copy.deepcopy(loaded.config)
    config.text_config.mlp_only_layers = [1]
    torch.manual_seed(0)
    model = PolicyModel.from_config(config)
    assert model.routing.layers == [0, 2] and model.routing.shape == RouteShape(NUM_LAYERS, NUM_EXPERTS, TOP_K)
    streams = [stream(model, 30, seed=0)]
    routes_TLK = own_routes(model, streams)
    assert not routes_TLK[:, 1].any() and routes_TLK[:, 2].any()
    free, _ = scored(model, packed(model, streams))
    routes_TLK[:, 1] = 3
    given, _ = scored(model, packed(model, streams, routes_TLK))
    assert torch.equal(free, given)


def test_a_dense_network_has_no_routes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "dense", "qwen3_vl")
    assert PolicyModel.load(tmp_path / "dense").routing.shape is None
