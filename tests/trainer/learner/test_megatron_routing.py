"""Claims about routes in the learner over Megatron: each token takes its own, on whatever rank, stage and pass.

The last tests run Megatron-core itself on a CPU (`tests.megatron_cpu`), where it is installed; blocks with one router
stand for its own in the others.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextTopKRouter

from agents.model import STARTER_PATH
from agents.model.policy import PolicyModel
from agents.types import RouteShape, SamplingParams
from tests.builders import fresh_model
from tests.processes import run_ranks
from tests.tiny_models import write_tiny_model
from tests.trainer.steps import random_samples, routed
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LayoutConfig, LearnerConfig, OptimConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.learner.layout import Layout
from trainer.learner.megatron.routing import Replay, Routing
from trainer.learner.megatron.thd import padding_multiple, single_rows, thd_batch, thd_row
from trainer.learner.sharding import recompute
from trainer.types import TrainingSample

CPU = torch.device("cpu")
#: That of the tiny mixture.
SHAPE = RouteShape(num_layers=3, num_experts=4, top_k=2)
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tp": 2, "sp": True},
    "pipeline": {"pp": 2},
    "context": {"cp": 2},
    "experts": {"ep": 2},
}


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    """Streams of which the last three have no routes."""
    return given(random_samples(PolicyModel.load(Path(STARTER_PATH))))


def given(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Return samples, all of which but the last group's have routes, each with a key of its own."""
    return [replace(sample, key=(0, 0, number)) for number, sample in enumerate(routed(samples, SHAPE))]


def test_a_row_has_the_routes_of_its_streams_and_none_for_the_last_token_and_padding(
    samples: list[TrainingSample],
) -> None:
    row = thd_row([samples[0], samples[-1], samples[1]], multiple=16)
    assert row.routes_TLK is not None and row.routes_TLK.shape == (len(row.ids_T), 3, 2)
    left = row.routes_TLK.copy()
    for sample, start in zip((samples[0], samples[1]), row.starts_S1[[0, 2]].tolist(), strict=True):
        assert sample.routes_RLK is not None
        end = start + len(sample.ids_T) - 1
        assert np.array_equal(left[start:end], sample.routes_RLK)
        left[start:end] = -1
    assert (left == -1).all()
    assert thd_row(samples[-3:]).routes_TLK is None


@pytest.mark.parametrize("layout", [Layout(), Layout(context=2), Layout(tensor=2, context=2, sequence=True)])
def test_ranks_route_each_token_once_by_its_own_route(samples: list[TrainingSample], layout: Layout) -> None:
    rows = single_rows(samples[:4], padding_multiple(layout))
    parts = layout.tensor if layout.sequence else 1
    whole = thd_row(samples[:4], padding_multiple(layout))
    seen: list[int] = []
    for context in range(layout.context):
        for part in range(parts):
            rank = (context, layout.context), (part, parts)
            batch = thd_batch(rows, padding_multiple(layout), rank[0], CPU, rank[1])
            own_M = whole.routed(*rank)
            assert batch.routes_MLK is not None and whole.routes_TLK is not None
            assert np.array_equal(batch.routes_MLK.numpy(), whole.routes_TLK[own_M])
            seen += own_M.tolist()
    assert sorted(seen) == list(range(len(whole.ids_T)))


def test_sequence_parallel_ranks_route_the_tokens_of_their_context_parallel_rank_in_its_order() -> None:
    ids_T = np.arange(8)
    positions_3T = np.tile(ids_T, (3, 1))
    mask_T = ids_T > 6
    stream = TrainingSample(ids_T, mask_T, mask_T * 1, np.zeros(8, np.float32), positions_3T, (), 1, 0, 1.0, 0.5)
    row = thd_row([stream])
    assert row.split(2)[1].tolist() == [2, 3, 4, 5]
    assert row.routed((1, 2), (0, 2)).tolist() == [2, 3] and row.routed((1, 2), (1, 2)).tolist() == [4, 5]
    assert row.routed((0, 2), (1, 2)).tolist() == [6, 7]


def test_probabilities_of_given_and_of_free_experts_are_those_of_transformers() -> None:
    """Megatron's router asks for the logits of the experts, and takes their softmax."""
    config = Qwen3VLMoeTextConfig(num_experts=8, num_experts_per_tok=3, hidden_size=5)
    gate: Any = Qwen3VLMoeTextTopKRouter(config)
    nn.init.normal_(gate.weight)
    hidden_MH = torch.randn(6, 5)
    logits_ME, scores_MK, free_MK = gate(hidden_MH)

    given_MK = torch.rand(6, 8).argsort(-1)[:, :3]
    replay = Replay()
    for routes_MK, expected_MK in ((free_MK, free_MK), (given_MK, given_MK), (torch.full((6, 3), -1), free_MK)):
        replay.routes_MK = routes_MK.to(torch.int16)
        chosen_MK, indices_MK = replay.get_replay_topk(logits_ME, 3, None, None, _top)
        assert torch.equal(indices_MK, expected_MK)
        probs_MK = logits_ME.softmax(-1).gather(1, expected_MK)
        torch.testing.assert_close(chosen_MK.softmax(-1), probs_MK / probs_MK.sum(-1, keepdim=True))
    torch.testing.assert_close(chosen_MK.softmax(-1), scores_MK)


class Block(nn.Module):
    """A block of one layer: experts that scale a token by their number."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.mlp = Namespace(router=Namespace(router_replay=None))
        self.gate = nn.Parameter(torch.randn(4, 4))
        self.computed: list[Tensor] = []

    def forward(self, hidden_MH: Tensor, scale: float = 1.0) -> Tensor:
        replay = self.mlp.router.router_replay
        logits_MK, experts_MK = replay.get_replay_topk(hidden_MH @ self.gate, 2, None, None, _top)
        self.computed.append(experts_MK)
        return hidden_MH * (logits_MK.softmax(-1) * (1 + experts_MK)).sum(-1, keepdim=True) * scale


def _top(scores_ME: Tensor, topk: int, *_: object) -> tuple[Tensor, Tensor]:
    values_MK, indices_MK = scores_ME.topk(topk)
    return values_MK, indices_MK


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_recomputed_block_gets_the_routes_of_its_own_micro_batch(share: float) -> None:
    """Three micro-batches are begun before the first goes backward, as in a pipeline; the second is free."""
    torch.manual_seed(0)
    blocks = [Block(number) for number in (1, 2)]
    hidden_BMH = torch.randn(3, 5, 4)
    routes = [torch.rand(5, 2, 4).argsort(-1)[..., :2].to(torch.int16) for _ in range(3)]
    ours = Routing()
    ours.receive(blocks)
    recompute(blocks, share)
    ours.give(blocks)

    losses = []
    for number in range(3):
        ours.routes_MLK = None if number == 1 else routes[number]
        hidden_MH = hidden_BMH[number]
        for block in blocks:
            hidden_MH = block(hidden_MH, scale=0.5)
        losses.append(hidden_MH.square().sum())
    for layer, block in enumerate(blocks):
        assert torch.equal(block.computed[0], routes[0][:, layer].long())
        assert not torch.equal(block.computed[1], routes[1][:, layer].long())
        assert torch.equal(block.computed[2], routes[2][:, layer].long())
    for loss in losses:
        loss.backward()
    num_recomputed = [len(block.computed) - 3 for block in blocks]
    assert sum(num_recomputed) == 3 * 2 * share
    for block, count in zip(blocks, num_recomputed, strict=True):
        assert all(torch.equal(*pair) for pair in zip(block.computed[3:], block.computed[:count], strict=True))


OPTIM = OptimConfig(lr=1e-3, warmup_steps=0)
PARAMS = SamplingParams(temperature=0.7)
RECOMPUTED = LearnerConfig(recompute=1.0, max_tokens_per_microbatch=128)  # several micro-batches
PENALTY = AlgorithmConfig(kl_coef=0.1)


def rank_main(rank: int, folder: Path, out: Path) -> None:
    """Take a step under each layout; rank 0 keeps its statistics, and log-probs of all ranks."""
    from tests.megatron_cpu import on_cpu, with_layout

    samples = given(random_samples(PolicyModel.load(folder)))
    on_cpu()
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    from trainer.learner.megatron.learner import MegatronLearner

    for name, flags in LAYOUTS.items():
        learner = MegatronLearner(
            folder,
            PARAMS,
            5,
            OPTIM,
            PENALTY,
            RECOMPUTED,
            backend=LayoutConfig(backend="megatron", **flags),
            device="cpu",
            dtype=torch.float32,
            changed=with_layout(flags),
        )
        shares = learner.layout.data_parallel(2)
        stats = learner.step([samples[learner.layout.data_rank(rank, 2) :: shares]])
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, dict(stats.logprobs))
        logprobs = {key: value for part in gathered for key, value in part.items()}
        if rank == 0:
            torch.save(replace(stats, logprobs=logprobs), out / f"{name}.pt")
        parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("megatron", reason="needs Megatron")
    out = tmp_path_factory.mktemp("routes")
    write_tiny_model(out / "model", "qwen3_vl_moe")
    run_ranks(rank_main, 2, out / "store", out / "model", out)
    return out


@pytest.fixture(scope="module")
def expected(done: Path) -> dict[str, Any]:
    """The statistics of the other backend's step, with routes and without."""
    folder = done / "model"
    steps = {}
    for name, samples in (("given", given), ("free", list)):
        model = fresh_model(folder)
        learner = FSDPLearner(model, PARAMS, 5, OPTIM, PENALTY, LearnerConfig(), path=folder)
        keyed = [replace(s, key=(0, 0, number)) for number, s in enumerate(samples(random_samples(model)))]
        steps[name] = learner.step([keyed])
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_with_given_routes_is_that_of_the_other_backend(expected: dict[str, Any], done: Path, name: str) -> None:
    stats = expected["given"]
    got = torch.load(done / f"{name}.pt", weights_only=False)
    gaps = [np.abs(got.logprobs[key] - value).max() for key, value in stats.logprobs.items()]
    moved = [np.abs(expected["free"].logprobs[key] - value).max() for key, value in stats.logprobs.items()]
    assert max(gaps) < 1e-4
    assert sorted(gap > 0.1 for gap in moved) == [False] * 3 + [True] * 9  # three streams have no routes
    for field in ("loss", "grad_norm", "entropy", "rollout_train_kl"):
        assert getattr(got, field) == pytest.approx(getattr(stats, field), rel=1e-4), field
    assert got.objective == pytest.approx(dict(stats.objective), rel=1e-4)  # the reference's KL: its tokens are free
