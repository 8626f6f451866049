"""Claims about a step on a mixture with the engine's routes: its statistics, its reference network, and its KL.

That the step itself is right, however it is cut and sharded, is in `test_invariance.py`.

Legend: N model tokens of one sample, T tokens of one stream, L layers, K experts of a token.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.engines.hf import HFEngine
from agents.model.policy import PolicyModel
from agents.types import GenerateRequest, SamplingParams
from tests.builders import fresh_model, group, trajectory
from tests.mixtures import NUM_EXPERTS, NUM_LAYERS, routes_of_transformers, stream
from tests.processes import run_ranks
from tests.trainer.steps import Case, samples_of, split
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.types import StepStats, TrainingSample


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.write(tmp_path_factory.mktemp("mixture"), "qwen3_vl_moe")


def step(case: Case, samples: list[TrainingSample], **options: Any) -> StepStats:
    learner = FSDPLearner(fresh_model(case.checkpoint), case.params, 1, path=case.checkpoint, **options)
    return learner.step([samples])


def free(samples: list[TrainingSample]) -> list[TrainingSample]:
    return [replace(sample, routes_RLK=None) for sample in samples]


def assert_close(got: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert got.keys() == expected.keys()
    assert all(got[name] == pytest.approx(value, rel=1e-5) for name, value in expected.items()), (got, expected)


def test_statistics_are_those_of_the_plain_networks_choice(case: Case) -> None:
    samples = [sample for sample in case.samples if sample.images and sample.routes_RLK is not None]
    model = fresh_model(case.checkpoint)
    network = model.architecture.read(case.checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    others_L, num_tokens = np.zeros(NUM_LAYERS), 0
    load_LE = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    prompts = set()
    for sample in samples:
        chosen = routes_of_transformers(network, sample.ids_T.tolist(), sample.images).numpy()
        # A prompt that several samples share is computed, and counted, once.
        first = sample.prefix_length if sample.prompt_key in prompts else 0
        prompts.add(sample.prompt_key)
        assert sample.routes_RLK is not None
        for number in range(first, len(sample.routes_RLK)):
            num_tokens += 1
            for layer in range(NUM_LAYERS):
                given = set(sample.routes_RLK[number, layer].tolist())
                others_L[layer] += given != set(chosen[number, layer].tolist())
                load_LE[layer, list(given)] += 1
    share_LE = load_LE / load_LE.sum(1, keepdims=True)
    entropy = -sum(p * math.log(p) for p in share_LE.flatten() if p) / NUM_LAYERS
    got = step(case, samples)
    expected = {
        "other_experts": others_L.mean() / num_tokens,
        "kl_free": step(case, free(samples)).rollout_train_kl,
        "load_max": share_LE.max(1).mean() * NUM_EXPERTS,
        "entropy": entropy,
    } | {f"other_experts/layer_{n}": others_L[n] / num_tokens for n in range(NUM_LAYERS)}
    assert_close(got.routing, expected)
    assert got.row()["routing/other_experts/layer_1"] == got.routing["other_experts/layer_1"]
    assert abs(got.rollout_train_kl - got.routing["kl_free"]) > 0.01


def test_without_routes_there_are_no_statistics(case: Case) -> None:
    assert step(case, free(case.samples)).routing == {}


def test_of_a_large_step_they_are_those_of_the_first_micro_batch(case: Case) -> None:
    whole, part = (step(case, case.samples, config=LearnerConfig(max_tokens_per_microbatch=n)) for n in (10**6, 200))
    assert part.routing.keys() == whole.routing.keys() and part.routing != whole.routing
    assert part.loss == pytest.approx(whole.loss, rel=1e-5)


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["a network of its own", "adapters switched off"])
def test_the_reference_network_routes_freely(case: Case, lora_rank: int) -> None:
    """Before the first update it is the policy, so the KL of a step with routes is that to free routing."""
    if lora_rank:
        pytest.importorskip("peft")
    config = LearnerConfig(lora_rank=lora_rank)
    samples = [sample for sample in case.samples if sample.routes_RLK is not None]
    kl = AlgorithmConfig(kl_coef=0.1)
    routed, unrouted = (step(case, some, algorithm=kl, config=config) for some in (samples, free(samples)))
    assert unrouted.objective["ref_kl"] == pytest.approx(0, abs=1e-9)
    assert routed.objective["ref_kl"] > 0.01


def rank_main(rank: int, case: Case, out: Path) -> None:
    # The samples of one rank have routes, those of the other have none at all.
    shares = split(case.samples, 2)
    shares[1] = free(list(shares[1]))
    together = [sample for share in shares for sample in share]
    config = LearnerConfig(max_tokens_per_microbatch=10**6)
    stats = step(case, list(shares[rank]), config=config)
    torch.save((stats, together), out / f"{rank}.pt")


def test_ranks_with_and_without_routes_take_one_step_with_the_statistics_of_one_rank(
    case: Case, tmp_path: Path
) -> None:
    run_ranks(rank_main, 2, tmp_path / "store", case, tmp_path)
    (first, together), (second, _) = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert first.routing == second.routing
    alone = step(case, together)
    assert_close(
        {name: value for name, value in first.routing.items() if name != "kl_free"},
        {name: value for name, value in alone.routing.items() if name != "kl_free"},
    )
    assert first.loss == pytest.approx(alone.loss, rel=1e-5)
    assert first.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


async def played(engine: HFEngine, number: int, params: SamplingParams) -> TrainingSample:
    """Play two turns with an image before each; return them as a sample."""
    first, second = (stream(engine.model, length, seed=number + length) for length in (20, 10))
    async with engine.session() as session:
        asked = GenerateRequest(first.ids, first.images, 24, params, seed=number, num_routed=0)
        one = await session.generate(asked)
        ids = first.ids + one.ids + second.ids
        num_routed = len(first.ids + one.ids) - 1
        two = await session.generate(
            replace(asked, ids=ids, images=first.images + second.images, num_routed=num_routed)
        )
    assert one.routes_RLK is not None and two.routes_RLK is not None
    mask = [0] * len(first.ids) + [1] * 24 + [0] * len(second.ids) + [1] * 24
    logprobs = [0.0] * len(first.ids) + [*one.logprobs] + [0.0] * len(second.ids) + [*two.logprobs]
    episode = trajectory([*ids, *two.ids], mask, logprobs, [*first.images, *second.images], reward=0.0)
    # Two of them, because a group of one teaches nothing.
    sample, _ = samples_of([group(episode, episode)], engine.model.image_token_id, engine.model.merge_size)
    return replace(sample, routes_RLK=np.concatenate([one.routes_RLK, two.routes_RLK]), advantage=1.0)


def test_in_bfloat16_the_routes_of_the_engine_take_most_of_the_kl_away(case: Case, tmp_path: Path) -> None:
    # Scores of experts that are close: rounding decides between many of them.
    model = fresh_model(case.checkpoint)
    for layer in model.architecture.decoder(model.backbone).layers:
        layer.mlp.gate.weight.data.mul_(0.05)
    model.save(tmp_path, torch.float32)
    close = replace(case, checkpoint=tmp_path)
    engine = HFEngine(PolicyModel.load(tmp_path, torch.bfloat16))

    async def everything() -> list[TrainingSample]:
        return list(await asyncio.gather(*(played(engine, number, close.params) for number in range(16))))

    stats = step(close, asyncio.run(everything()), dtype=torch.bfloat16)
    assert stats.num_tokens == 16 * 2 * 24
    assert 0 < stats.routing["other_experts"] < 0.3
    assert stats.rollout_train_kl < 0.1 * stats.routing["kl_free"]
