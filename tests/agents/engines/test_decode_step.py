"""Claims about the decode step of the embedded engine on a GPU. Its arithmetic runs on any device, without a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agents.engines import decode_step
from agents.engines.decode_step import DecodeStep
from agents.engines.hf_batch import BatchCache, CachedPrefix, KeysAndValues, LayerStates
from agents.model.policy import PolicyModel
from tests.tiny_models import write_tiny_model

CPU = torch.device("cpu")
PROMPTS = ([12, 13, 14, 15, 16], [20, 21])
NEXT = torch.tensor([[30, 31], [32, 33], [34, 35], [36, 37], [38, 39]])


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    """A tiny network that has attention alone, and one whose layers have states."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, request.param)
    return PolicyModel.load(folder)


def prefixes(network: PolicyModel) -> list[CachedPrefix]:
    """Return what the network keeps of each prompt, read alone."""
    found = []
    for ids in PROMPTS:
        cache = BatchCache([CachedPrefix()], len(ids), CPU)
        positions_T = torch.arange(len(ids))
        seen_TT = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        last = (torch.tensor([0]), torch.tensor([len(ids) - 1]))
        cache.begin(torch.ones(1, len(ids), dtype=torch.bool))
        network(torch.tensor([ids]), positions_T.expand(3, 1, -1), seen_TT[None, None], last, None, cache)
        cache.advance()
        found.append(CachedPrefix(tuple(ids), cache.row(0, is_last=True)))
    return found


def expected_logits(network: PolicyModel, row: int, count: int) -> Tensor:
    """Return the logits after so many new tokens of a row, by one forward without a cache."""
    ids = torch.tensor([[*PROMPTS[row], *NEXT[:count, row].tolist()]])
    length = ids.shape[1]
    seen_TT = torch.ones(length, length, dtype=torch.bool).tril()
    last = (torch.tensor([0]), torch.tensor([length - 1]))
    return network(ids, torch.arange(length).expand(3, 1, -1), seen_TT[None, None], last)[0]


@torch.no_grad()
def test_a_step_at_fixed_places_gives_the_logits_of_a_forward_also_where_its_columns_end(
    network: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_step, "COLUMNS_AHEAD", 2)  # five tokens need three steps
    cache = BatchCache(prefixes(network), len(NEXT), CPU)
    positions_B = torch.tensor([len(ids) for ids in PROMPTS])
    num_steps = 1
    step = DecodeStep(network, cache, 2, CPU)
    for count, ids_B in enumerate(NEXT, start=1):
        if not step.fits(cache, 2):
            step = DecodeStep(network, cache, 2, CPU)
            num_steps += 1
        cache.begin(torch.ones(2, 1, dtype=torch.bool))
        logits_BV = step.next_logits(ids_B, positions_B)
        cache.advance()
        positions_B = positions_B + 1
        for row in range(2):
            torch.testing.assert_close(logits_BV[row], expected_logits(network, row, count), rtol=0, atol=1e-4)
    assert num_steps == 3


@torch.no_grad()
def test_what_lies_in_columns_that_are_not_written_yet_reaches_no_logits(network: PolicyModel) -> None:
    cache = BatchCache(prefixes(network), len(NEXT), CPU)
    for layer in cache.layers:
        if isinstance(layer, KeysAndValues):
            layer.store[:, :, :, cache.length :] = float("nan")
    step = DecodeStep(network, cache, 2, CPU)
    cache.begin(torch.ones(2, 1, dtype=torch.bool))
    assert step.next_logits(NEXT[0], torch.tensor([len(ids) for ids in PROMPTS])).isfinite().all()


@torch.no_grad()
def test_a_step_changes_the_states_of_rows_with_a_new_token_alone_and_none_when_it_is_captured(
    network: PolicyModel,
) -> None:
    cache = BatchCache(prefixes(network), len(NEXT), CPU)
    step = DecodeStep(network, cache, 2, CPU)
    before = states(cache)
    step._run()  # what a capture runs
    torch.testing.assert_close(states(cache), before, rtol=0, atol=0)
    cache.begin(torch.tensor([[True], [False]]))
    logits_BV = step.next_logits(NEXT[0], torch.tensor([len(ids) for ids in PROMPTS]))
    torch.testing.assert_close(logits_BV[0], expected_logits(network, 0, 1), rtol=0, atol=1e-4)
    for one, other in zip(states(cache), before, strict=True):
        assert not one[0].equal(other[0])
        assert one[1].equal(other[1])


def states(cache: BatchCache) -> list[Tensor]:
    """Return a copy of all states, (B, ...) each."""
    kept = [layer.states for layer in cache.layers if isinstance(layer, LayerStates)]
    return [part.clone() for each in kept for part in (each.conv_SCW, each.recurrent_SHKV)]


@torch.no_grad()
def test_a_step_fits_its_own_batch_alone(network: PolicyModel) -> None:
    cache = BatchCache(prefixes(network), len(NEXT), CPU)
    step = DecodeStep(network, cache, 2, CPU)
    assert step.fits(cache, 2)
    assert not step.fits(cache, 1)
    assert not step.fits(BatchCache(prefixes(network), len(NEXT), CPU), 2)
