"""Claims about Megatron's packed rows: every stream whole, hidden padding, and a loss that ranks add up to the same."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents.model import STARTER_PATH, linear_logprobs
from agents.model.policy import PolicyModel
from agents.types import SamplingDistribution
from tests.trainer.steps import random_samples
from trainer.algorithms.objective import objective
from trainer.config.algorithm import AlgorithmConfig
from trainer.data.packing import collate, pack_rows
from trainer.learner.layout import Layout
from trainer.learner.megatron.thd import padding_multiple, single_rows, thd_batch, thd_row, zigzag
from trainer.learner.megatron.vocab_scores import VocabShard, vocab_scores
from trainer.types import ModelTokens, TokenBatch, TrainingSample

CPU = torch.device("cpu")
LAW = SamplingDistribution(temperature=0.7, suppressed_ids=(3,))


@pytest.fixture(scope="module")
def model() -> PolicyModel:
    return PolicyModel.load(Path(STARTER_PATH))


@pytest.fixture(scope="module")
def samples(model: PolicyModel) -> list[TrainingSample]:
    return random_samples(model)


@pytest.mark.parametrize("multiple", [1, 4, 16])
def test_every_stream_lies_whole_in_the_row_with_its_own_positions(
    samples: list[TrainingSample], multiple: int
) -> None:
    row = thd_row(samples, multiple)
    assert not np.any(row.starts_S1 % multiple) and row.starts_S1[-1] == len(row.ids_T) == row.positions_3T.shape[1]
    for sample, start in zip(samples, row.starts_S1.tolist(), strict=False):
        end = start + len(sample.ids_T)
        assert np.array_equal(row.ids_T[start:end], sample.ids_T)
        assert np.array_equal(row.positions_3T[:, start:end], sample.positions_3T)
    assert np.array_equal(row.ids_T[row.before_N + 1], row.targets_N)
    assert [image.digest for image in row.images] == [image.digest for s in samples for image in s.images]


def test_padding_holds_no_model_token_and_counts_positions_on() -> None:
    row = thd_row([_stream(5, mask=[0, 0, 1, 1, 1]), _stream(2, mask=[0, 1])], multiple=4)
    assert row.starts_S1.tolist() == [0, 8, 12]
    assert row.ids_T.tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 0, 0]
    assert row.positions_3T[0].tolist() == [*range(8), *range(4)]
    assert row.before_N.tolist() == [1, 2, 3, 8] and row.targets_N.tolist() == [3, 4, 5, 2]
    assert row.longest == 8


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4))
def test_context_parallel_ranks_hold_each_token_once_and_as_many_each(chunks: list[int], context: int) -> None:
    starts = np.cumsum([0, *(2 * context * count for count in chunks)]).astype(np.int32)
    split = zigzag(starts, context)
    assert sorted(np.concatenate(split).tolist()) == list(range(starts[-1]))
    assert len({len(mine) for mine in split}) == 1


@pytest.mark.parametrize("context", [1, 2, 4])
def test_each_model_token_is_scored_by_one_context_parallel_rank_at_the_token_before_it(
    samples: list[TrainingSample], context: int
) -> None:
    row, seen = thd_row(samples, 2 * context), []
    for rank, mine_P in enumerate(row.split(context)):
        chosen, local = row.places(context, rank)
        assert np.array_equal(mine_P[local], row.before_N[chosen])
        seen += chosen.tolist()
    assert sorted(seen) == list(range(len(row.targets_N)))


@pytest.mark.parametrize("correction", ["tis", "mis"])
@pytest.mark.parametrize(("context", "max_tokens"), [(1, 100_000), (2, 400), (4, 64)])
def test_the_loss_over_rows_and_context_parallel_ranks_is_that_of_the_other_backend(
    model: PolicyModel, samples: list[TrainingSample], context: int, max_tokens: int, correction: str
) -> None:
    config = AlgorithmConfig(correction=correction, correction_cap=1.3)
    table_V = torch.randn(model.config.text_config.vocab_size, generator=torch.Generator().manual_seed(0))
    whole = collate(pack_rows(samples, 100_000), model.image_token_id, "cpu")
    expected = _loss(whole, table_V[whole.packed.targets_N], config)

    rows = single_rows(samples, padding_multiple(Layout(context=context)))
    total, number = 0.0, 0
    while number < len(rows):
        chosen = [rows[number]]
        number += 1
        while number < len(rows) and sum(row.num_tokens for row in chosen) + rows[number].num_tokens <= max_tokens:
            chosen.append(rows[number])
            number += 1
        ranks = [thd_batch(chosen, 2 * context, (rank, context), CPU) for rank in range(context)]
        logprobs_N = torch.full((len(ranks[0].targets_N),), torch.nan)
        for batch in ranks:  # what `join_context` adds up over the ranks
            logprobs_N[batch.places[0]] = table_V[batch.targets_N[batch.places[0]]]
        total += _loss(ranks[0], logprobs_N, config)
    assert abs(expected) > 0.01
    assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_share_of_the_vocabulary_gives_the_log_probs_entropies_and_gradients_of_log_softmax(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    linear_logprobs._compiled.cache_clear()
    hidden_NH, weight_VH, targets_N = torch.randn(7, 5), torch.randn(12, 5), torch.tensor([0, 11, 4, 5, 9, 2, 1])
    hidden_NH.requires_grad_()
    weight_VH.requires_grad_()
    logits_NV = hidden_NH @ weight_VH.T / LAW.temperature
    logits_NV = logits_NV.masked_fill(torch.arange(12) == 3, -torch.inf)
    table_NV = logits_NV.log_softmax(-1)
    logprobs_N = table_NV.gather(-1, targets_N[:, None])[:, 0]
    entropy_N = -(table_NV.exp() * table_NV.masked_fill(torch.arange(12) == 3, 0.0)).sum(-1)
    weights_N = torch.arange(1.0, 8.0)
    expected = torch.autograd.grad((weights_N * (logprobs_N + 0.3 * entropy_N)).sum(), (hidden_NH, weight_VH))

    padded_VH = torch.cat([weight_VH.detach(), torch.full((4, 5), 9.0)]).requires_grad_()  # four rows of no id
    got = vocab_scores(hidden_NH, padded_VH, targets_N, LAW, VocabShard(0, 12), compiled)
    gradients = torch.autograd.grad((weights_N * (got[0] + 0.3 * got[1])).sum(), (hidden_NH, padded_VH))
    torch.testing.assert_close(got, (logprobs_N, entropy_N))
    torch.testing.assert_close(gradients[0], expected[0])
    torch.testing.assert_close(gradients[1][:12], expected[1])
    assert not gradients[1][12:].any()
    assert linear_logprobs._compiled.cache_info().currsize == 2 * compiled
    linear_logprobs._compiled.cache_clear()


def _loss(batch: TokenBatch, logprobs_N: torch.Tensor, config: AlgorithmConfig) -> float:
    tokens = ModelTokens(
        logprobs_N=logprobs_N,
        entropy_N=torch.zeros_like(logprobs_N),
        old_logprobs_N=logprobs_N,
        rollout_logprobs_N=logprobs_N + 0.05 * (batch.rollout_logprobs_N + 7),  # above and below
        ref_logprobs_N=None,
        advantages_N=batch.advantages_N,
        weights_N=batch.weights_N,
        sample_N=batch.sample_N,
        num_samples=len(batch.samples),
    )
    return objective(tokens, config).loss.item()


def _stream(length: int, mask: list[int]) -> TrainingSample:
    ids_T, mask_T = np.arange(1, length + 1), np.array(mask, dtype=np.bool_)
    positions = np.tile(np.arange(length), (3, 1))
    zeros_T = np.zeros(length, dtype=np.float32)
    return replace(
        TrainingSample(ids_T, mask_T, mask_T.astype(np.int64), zeros_T, positions, (), 1, 0, 1.0, 0.5),
        key=(0, 0, length),
    )
