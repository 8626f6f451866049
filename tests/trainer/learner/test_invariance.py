"""Claims about what does not change a step (how samples are cut, ordered and spread, how the network lies in memory),
for every kind of architecture; and about what does: the terms of the loss, held against formulas written out by hand.

Legend: N model tokens of one sample, T tokens of one stream.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from agents.model.policy import PolicyModel
from tests.builders import fresh_model, full_logprobs
from tests.by_architecture import TEXT_TYPES, VISION_TYPES, OnDemand, all_but_two_slow
from tests.tiny_models import MODEL_TYPES
from tests.trainer.steps import (
    VARIANTS,
    Case,
    Difference,
    OpenLearner,
    Stepped,
    Variant,
    adapters_and_merged,
    relative,
    steps_on_ranks,
    take_variant,
)
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.data.packing import collate, pack_rows
from trainer.types import TrainingSample

#: Far enough that some ratios of a second update are clipped.
FAST = OptimConfig(lr=3e-3, warmup_steps=0)
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return OnDemand(lambda name: Case.write(tmp_path_factory.mktemp(name), name))


@pytest.fixture(scope="module")
def one_batch(cases: dict[str, Case]) -> dict[str, Stepped]:
    return OnDemand(lambda name: take_variant(cases[name], Variant()))


@pytest.fixture(scope="module")
def case(cases: dict[str, Case]) -> Case:
    return cases["qwen3"]


def assert_same_step(got: Stepped, expected: Stepped) -> None:
    difference = Difference.between(got, expected)
    # The norm behind a state layer divides by what may be small, so that its rounding is the largest.
    assert difference.loss < 1e-5 and difference.gradient < 2e-5 and difference.worst_gradient < 1e-4, difference
    for field in ("grad_norm", "rollout_train_kl", "logprob_gap_mean", "entropy"):
        assert getattr(got.stats, field) == pytest.approx(getattr(expected.stats, field), rel=1e-4), field
    assert got.stats.num_tokens == expected.stats.num_tokens
    assert got.stats.objective == pytest.approx(dict(expected.stats.objective), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("model_type", all_but_two_slow())
def test_the_streams_have_what_could_go_wrong(
    cases: dict[str, Case], one_batch: dict[str, Stepped], model_type: str
) -> None:
    samples = cases[model_type].samples
    assert len(samples) == 12 and {int(s.turns_T.max()) for s in samples} == {1, 2, 3}
    assert {s.advantage > 0 for s in samples} == {True, False} and any(s.advantage == 0 for s in samples)
    if model_type in VISION_TYPES:
        assert {s.num_prefix_images for s in samples} == {0, 1, 2}
        assert {len(s.images) - s.num_prefix_images for s in samples} == {0, 1}
    rows = pack_rows(samples, 100_000)
    assert len(rows) == 4 and len(pack_rows(samples, 1)) == 12
    assert 1 < len(pack_rows(samples, 150)) < 12 or model_type in TEXT_TYPES
    apart = VARIANTS["packing", "prompts apart"].rearranged(samples)
    assert len(pack_rows(apart, 100_000)) == 12
    figures = one_batch[model_type].stats.objective
    assert 0.05 < figures["correction_clipped_frac"] < 0.95
    assert all(gradient.any() for gradient in one_batch[model_type].gradients.values())


@pytest.mark.parametrize("variant", VARIANTS, ids=": ".join)
@pytest.mark.parametrize("model_type", all_but_two_slow())
def test_a_step_is_the_same(
    cases: dict[str, Case], one_batch: dict[str, Stepped], model_type: str, variant: tuple[str, str]
) -> None:
    assert_same_step(take_variant(cases[model_type], VARIANTS[variant]), one_batch[model_type])


#: By the number of ranks, which are started once: as they come, and with everything that sharding can do.
RANKS = {1: LearnerConfig(), 2: LearnerConfig(reshard="never"), 4: LearnerConfig(recompute=0.5, offload="all")}


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(
    request: pytest.FixtureRequest, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Stepped]:
    every = {name: cases[name] for name in MODEL_TYPES}
    return steps_on_ranks(every, request.param, tmp_path_factory.mktemp("ranks"), RANKS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_ranks_with_uneven_shares_take_the_same_step(
    ranks: dict[str, Stepped], one_batch: dict[str, Stepped], model_type: str
) -> None:
    assert_same_step(ranks[model_type], one_batch[model_type])


@needs_peft
@pytest.mark.parametrize("model_type", all_but_two_slow())
def test_adapters_have_the_gradients_of_the_merged_network(cases: dict[str, Case], model_type: str) -> None:
    difference = Difference.between(*adapters_and_merged(cases[model_type]))
    assert difference.loss < 1e-5 and difference.gradient < 2e-5 and difference.worst_gradient < 1e-4, difference


@pytest.mark.parametrize("model_type", all_but_two_slow())
def test_the_second_of_two_minibatches_is_the_same_however_both_are_cut(
    cases: dict[str, Case], one_batch: dict[str, Stepped], model_type: str
) -> None:
    # A small rate: where a gradient is rounding noise, Adam's first update goes either way by the full rate.
    optim = OptimConfig(lr=1e-5, warmup_steps=0)
    both = [Variant(), Variant(max_tokens=150), Variant(max_tokens=1, config=LearnerConfig(offload="all"))]
    expected, *others = [take_variant(cases[model_type], v, optim=optim, num_minibatches=2) for v in both]
    assert expected.stats.num_updates == 2
    assert Difference.between(expected, one_batch[model_type]).gradient > 0.1  # a minibatch is not the whole step
    for other in others:
        assert_same_step(other, expected)


def test_two_updates_with_the_optimizer_on_the_host_give_the_same_weights_bit_for_bit(case: Case) -> None:
    kept, moved = (
        take_variant(case, Variant(config=LearnerConfig(offload=offload)), optim=FAST, num_minibatches=2)
        for offload in ("none", "optimizer")
    )
    assert all(torch.equal(moved.weights[name], weight) for name, weight in kept.weights.items())


@pytest.mark.parametrize("model_type", VISION_TYPES)
def test_packed_tokens_stand_where_transformers_puts_them_in_their_own_streams(
    cases: dict[str, Case], model_type: str
) -> None:
    """Of every sample: the positions that `get_rope_index` gives its whole stream, read back from the packed batch."""
    case = cases[model_type]
    model = fresh_model(case.checkpoint)
    rows = pack_rows(case.samples, 400)
    packed = collate(rows, model.image_token_id, "cpu").packed
    start = 0
    for row in rows:
        begin, end = start, start + row.prefix_length
        for sample in row.samples:
            own = len(sample.ids_T) - row.prefix_length
            places = [*range(begin, begin + row.prefix_length), *range(end, end + own)]
            end += own
            ids_1T = torch.from_numpy(sample.ids_T)[None]
            assert torch.equal(packed.ids_T[places], ids_1T[0])
            expected, _ = model.backbone.model.get_rope_index(  # type: ignore[operator, union-attr]
                ids_1T,
                mm_token_type_ids=(ids_1T == model.image_token_id).int(),
                image_grid_thw=torch.tensor([image.grid_thw for image in sample.images]) if sample.images else None,
            )
            assert torch.equal(packed.positions_3T[:, places], expected[:, 0])
        start = end
    assert start == len(packed.ids_T)


def network(case: Case, weights: Mapping[str, Tensor] | None = None) -> PolicyModel:
    """Return the plain network, with the checkpoint's weights or these."""
    model = fresh_model(case.checkpoint)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights is not None:
                parameter.copy_(weights[name])
    return model


def by_sample(case: Case, model: PolicyModel, samples: Sequence[TrainingSample]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log-probs of the model tokens and entropies where they were drawn, from a forward over each stream."""
    for sample in samples:
        table = full_logprobs(model, sample.ids_T.tolist(), sample.images, case.params)[sample.mask_T[1:]]
        chosen_N = table.gather(-1, torch.from_numpy(sample.ids_T[sample.mask_T])[:, None])[:, 0]
        finite = table.clamp(min=-1e4)  # a suppressed token has probability 0 and counts 0
        yield chosen_N, -(table.exp() * finite).sum(-1)


def logprobs_before(case: Case, weights: Mapping[str, Tensor] | None = None) -> dict[TrainingSample, Tensor]:
    """Return the log-probs of every sample under some weights."""
    with torch.no_grad():
        found = [logprobs_N for logprobs_N, _ in by_sample(case, network(case, weights), case.samples)]
    return dict(zip(case.samples, found, strict=True))


def by_hand(
    case: Case,
    weights: Mapping[str, Tensor],
    samples: Sequence[TrainingSample],
    old: Mapping[TrainingSample, Tensor],
    reference: Mapping[TrainingSample, Tensor] | None = None,
    kl_coef: float = 0.0,
) -> tuple[float, dict[str, Tensor], int]:
    """Return the loss, its gradients, and how many tokens were clipped, from the formula with its default bounds."""
    model, loss, clipped = network(case, weights), torch.zeros(()), 0
    for sample, (logprobs_N, _) in zip(samples, by_sample(case, model, samples), strict=True):
        correction_N = (old[sample] - torch.from_numpy(sample.logprobs_T[sample.mask_T])).exp().clamp(max=2.0)
        for place, ratio in enumerate((logprobs_N - old[sample]).exp()):
            free, bounded = -ratio * sample.advantage, -ratio.clamp(0.8, 1.28) * sample.advantage
            clipped += bool(bounded > free)
            term = correction_N[place] * torch.maximum(free, bounded)
            if reference is not None:
                gap = logprobs_N[place] - reference[sample][place]
                term = term + kl_coef * ((-gap).exp() - 1 + gap)
            loss = loss + sample.weight * term
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, clipped


@pytest.mark.parametrize(("minibatches", "epochs"), [(2, 1), (1, 2), (2, 2)])
def test_later_updates_hold_their_ratio_to_the_weights_before_the_first(
    case: Case, minibatches: int, epochs: int
) -> None:
    optim = FAST.model_copy(update={"epochs": epochs})
    learner = OpenLearner(fresh_model(case.checkpoint), case.params, 1, optim)
    parts = [case.samples[number::minibatches] for number in range(minibatches)]
    stats = learner.step(parts)
    assert stats.num_updates == len(learner.updates) == minibatches * epochs
    old, losses, clipped = logprobs_before(case), [], []
    for number, (update, part) in enumerate(zip(learner.updates, itertools.cycle(parts), strict=False)):
        loss, gradients, count = by_hand(case, update.weights, part, old)
        assert relative(update.gradients, gradients) < 1e-5, number
        losses.append(loss)
        clipped.append(count)
    assert clipped[0] == 0 < clipped[-1]
    assert stats.loss == pytest.approx(np.mean(losses), rel=1e-5)
    tokens = epochs * sum(int(s.mask_T.sum()) for s in case.samples)
    assert stats.objective["clip_frac"] == pytest.approx(sum(clipped) / tokens)
    # With the log-probs of now as the old ones, as in a step of one update, the ratio would be 1.
    now = logprobs_before(case, learner.updates[-1].weights)
    _, unclipped, _ = by_hand(case, learner.updates[-1].weights, parts[-1], now)
    assert relative(learner.updates[-1].gradients, unclipped) > 0.05


@pytest.mark.parametrize("empty", [False, True], ids=["network with weights", "empty network"])
def test_the_kl_to_the_reference_is_zero_at_first_and_the_formula_later(case: Case, empty: bool) -> None:
    from trainer.learner.weights_io import empty_model

    model = empty_model(case.checkpoint) if empty else fresh_model(case.checkpoint)
    algorithm = AlgorithmConfig(kl_coef=0.5)
    learner = OpenLearner(model, case.params, 2, FAST, algorithm, path=case.checkpoint)
    first, second = learner.step([case.samples]), learner.step([case.samples])
    reference = logprobs_before(case)
    assert first.objective["ref_kl"] == 0.0
    before, later = learner.updates
    _, without, _ = by_hand(case, before.weights, case.samples, reference)
    assert relative(before.gradients, without) < 1e-5
    now = logprobs_before(case, later.weights)
    loss, gradients, _ = by_hand(case, later.weights, case.samples, now, reference, kl_coef=0.5)
    assert second.loss == pytest.approx(loss, rel=1e-5)
    assert relative(later.gradients, gradients) < 1e-5
    gaps = torch.cat([now[sample] - reference[sample] for sample in case.samples])
    assert second.objective["ref_kl"] == pytest.approx(float(((-gaps).exp() - 1 + gaps).mean()), rel=1e-4)
    _, without, _ = by_hand(case, later.weights, case.samples, now)
    assert relative(later.gradients, without) > 0.01


@needs_peft
def test_with_adapters_the_reference_is_the_network_without_them(case: Case) -> None:
    config, algorithm = LearnerConfig(lora_rank=4, lora_alpha=8.0), AlgorithmConfig(kl_coef=0.5)
    learner = OpenLearner(fresh_model(case.checkpoint), case.params, 2, FAST, algorithm, config)
    assert learner.step([case.samples]).objective["ref_kl"] == 0.0
    merged = {name: weight.clone() for name, weight in learner.weights().items()}
    stats = learner.step([case.samples])
    reference, now = logprobs_before(case), logprobs_before(case, merged)
    loss, dense, _ = by_hand(case, merged, case.samples, now, reference, kl_coef=0.5)
    assert stats.objective["ref_kl"] > 1e-4
    assert stats.loss == pytest.approx(loss, rel=1e-5)
    update = learner.updates[-1]
    layer = "backbone.model.layers.1.self_attn.v_proj"
    a_RH, b_OR = (update.weights[f"{layer}.lora_{side}.default.weight"] for side in "AB")
    expected = {"A": 2 * b_OR.T @ dense[f"{layer}.weight"], "B": 2 * dense[f"{layer}.weight"] @ a_RH.T}
    got = {side: update.gradients[f"{layer}.lora_{side}.default.weight"] for side in "AB"}
    assert relative(got, expected) < 1e-4


def test_an_entropy_bonus_changes_the_gradient_as_finite_differences_say(case: Case) -> None:
    plain, bonus = (
        take_variant(case, Variant(), algorithm=AlgorithmConfig(entropy_coef=coefficient)) for coefficient in (0.0, 2.0)
    )
    change = {name: bonus.gradients[name] - gradient for name, gradient in plain.gradients.items()}
    norm = sum(float(part.double().square().sum()) for part in change.values()) ** 0.5
    start = {name: p.detach().clone() for name, p in network(case).named_parameters()}

    def total(step: float) -> float:
        """Return the weighted entropy a step along the change of the gradient."""
        moved = network(case, {name: weight + step / norm * change[name] for name, weight in start.items()})
        with torch.no_grad():
            entropies = [entropy_N for _, entropy_N in by_sample(case, moved, case.samples)]
        return sum(s.weight * float(e.double().sum()) for s, e in zip(case.samples, entropies, strict=True))

    slope = (total(2e-3) - total(-2e-3)) / 4e-3
    assert norm > 0.01
    assert -2.0 * slope == pytest.approx(norm, rel=1e-2)
    assert bonus.stats.loss == pytest.approx(plain.stats.loss - 2.0 * total(0.0), rel=1e-5)
