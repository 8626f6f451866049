"""Claims about one optimizer step: the same gradient however samples are split, and statistics that tell the truth."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.engines.hf import HFEngine
from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.rollout.episode import Episode, Limits
from agents.rollout.manager import rollout_groups
from agents.types import EndReason, GenerateRequest, SamplingParams, Trajectory
from envs.env import Env
from envs.types import Message, Sample
from tests.builders import fresh_model, full_logprobs, group, play, request, sampling, trajectory
from tests.processes import run_ranks
from tests.prompts import make_image, question
from tests.trainer.steps import Stepped, rank_main, relative, samples_of, take_step
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.data.packing import collate
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.types import TrainingSample

OPTIM = OptimConfig(lr=1e-3, warmup_steps=0, weight_decay=0.1)
#: A low cap, so that some of the weights below are clamped.
TIS = AlgorithmConfig(correction_cap=1.3)
PROMPTS = (
    question("Find x."),
    question("Find the area.", make_image(64, 64, seed=1)),
    question("What is the perimeter of the triangle?", make_image(96, 64, seed=2), make_image(64, 64, seed=1)),
    question("y?", make_image(64, 96, seed=3)),
)


def as_trajectory(asked: GenerateRequest, ids: Sequence[int], logprobs: Sequence[float], reward: float) -> Trajectory:
    prompt = len(asked.ids)
    return trajectory(
        ids=[*asked.ids, *ids],
        mask=[0] * prompt + [1] * len(ids),
        logprobs=[0.0] * prompt + list(logprobs),
        images=asked.images,
        reward=reward,
    )


@pytest.fixture(scope="module")
def on_policy(checkpoint: Path, renderer: Renderer) -> list[TrainingSample]:
    """Four groups of three streams with zero to two images, sampled by the engine from the checkpoint's weights."""
    model = fresh_model(checkpoint)
    params = sampling(renderer, temperature=0.7)
    requests = [
        request(renderer.prompt(prompt), params, max_new_tokens=5 + 4 * copy, seed=10 * number + copy)
        for number, prompt in enumerate(PROMPTS)
        for copy in range(3)
    ]
    completions = asyncio.run(play(HFEngine(model), requests))
    streams = [
        as_trajectory(asked, done.ids, done.logprobs, reward=float(index % 3 == 0))
        for index, (asked, done) in enumerate(zip(requests, completions, strict=True))
    ]
    groups = [group(*streams[start : start + 3]) for start in range(0, len(streams), 3)]
    return samples_of(groups, model.image_token_id, model.merge_size)


@pytest.fixture(scope="module")
def samples(on_policy: list[TrainingSample]) -> list[TrainingSample]:
    """The same streams as if the rollout's weights had been a little different, so that some ratios are clipped."""
    rng = np.random.default_rng(0)
    return [
        replace(s, logprobs_T=np.where(s.mask_T, s.logprobs_T + rng.normal(0, 0.3, len(s.ids_T)), 0).astype(np.float32))
        for s in on_policy
    ]


@pytest.fixture(scope="module")
def params(renderer: Renderer) -> SamplingParams:
    return sampling(renderer, temperature=0.7)


@pytest.fixture(scope="module")
def one_batch(checkpoint: Path, samples: list[TrainingSample], params: SamplingParams) -> Stepped:
    return take_step(checkpoint, samples, params, OPTIM, algorithm=TIS)


def assert_same_step(got: Stepped, expected: Stepped) -> None:
    assert relative(got.gradients, expected.gradients) < 1e-5
    assert relative(got.weights, expected.weights) < 1e-5
    for field in (
        "loss",
        "grad_norm",
        "rollout_train_kl",
        "logprob_gap_mean",
        "logprob_gap_max",
        "entropy",
    ):
        assert getattr(got.stats, field) == pytest.approx(getattr(expected.stats, field), rel=1e-4, abs=1e-7), field
    assert got.stats.objective == pytest.approx(dict(expected.stats.objective), rel=1e-4, abs=1e-7)
    assert got.stats.num_tokens == expected.stats.num_tokens
    assert got.stats.kl_by_turn == pytest.approx(expected.stats.kl_by_turn, rel=1e-4, abs=1e-7)
    assert got.stats.logprob_gap_p99 == pytest.approx(expected.stats.logprob_gap_p99, rel=0.03)  # a bin more or less


@pytest.mark.parametrize("max_tokens", [1, 60, 150])
def test_a_step_is_the_same_however_samples_are_cut_into_microbatches(
    checkpoint: Path, samples: list[TrainingSample], params: SamplingParams, one_batch: Stepped, max_tokens: int
) -> None:
    assert_same_step(take_step(checkpoint, samples, params, OPTIM, max_tokens, TIS), one_batch)


def test_a_step_is_the_same_in_any_order_of_samples(
    checkpoint: Path, samples: list[TrainingSample], params: SamplingParams, one_batch: Stepped
) -> None:
    assert_same_step(take_step(checkpoint, samples[::-1], params, OPTIM, max_tokens=150, algorithm=TIS), one_batch)


def test_a_step_equals_the_formula_written_out_stream_by_stream(
    checkpoint: Path, samples: list[TrainingSample], params: SamplingParams, one_batch: Stepped
) -> None:
    model = fresh_model(checkpoint)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    total = sum(int(s.mask_T.sum()) for s in samples)
    loss, clipped = torch.zeros(()), 0
    for s in samples:
        table = full_logprobs(model, s.ids_T.tolist(), s.images, params)
        for place in np.flatnonzero(s.mask_T):
            logprob = table[place - 1, s.ids_T[place]]
            correction = (logprob.detach() - float(s.logprobs_T[place])).exp()
            clipped += int(correction > 1.3)
            # The first update's ratio is 1, and has the log-prob's gradient.
            loss = loss - correction.clamp(max=1.3) * (logprob - logprob.detach()).exp() * s.advantage / total
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert 0.05 < clipped / total < 0.95
    assert one_batch.stats.loss == pytest.approx(loss.item(), rel=1e-5)
    assert one_batch.stats.objective["correction_clipped_frac"] == clipped / total
    assert one_batch.stats.objective["clip_frac"] == 0.0
    assert relative(one_batch.gradients, gradients) < 1e-5
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    assert one_batch.stats.grad_norm == pytest.approx(norm, rel=1e-5)
    # AdamW, first step: both moments are one gradient after bias correction. Elements whose gradient is rounding noise
    # have no sign worth comparing.
    for name, gradient in gradients.items():
        clipped_gradient = gradient * min(1.0, 1.0 / norm)
        expected = before[name] * (1 - 1e-3 * 0.1) - 1e-3 * clipped_gradient / (clipped_gradient.abs() + 1e-8)
        solid = clipped_gradient.abs() > 1e-5
        assert torch.allclose(one_batch.weights[name][solid], expected[solid], rtol=0, atol=1e-5), name


@pytest.fixture(scope="module")
def two_ranks(
    checkpoint: Path, samples: list[TrainingSample], params: SamplingParams, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Stepped]:
    """One step per way to split the samples over two processes."""
    out = tmp_path_factory.mktemp("ranks")
    text, imaged = samples[:3], samples[3:]
    assert not any(s.images for s in text) and all(s.images for s in imaged)
    splits = {
        "uneven": (samples[:2] + samples[4:], samples[2:4]),
        "none on the second": (samples, []),
        "none on the first": ([], samples),
        "text here and images there": (text, imaged),
        "text alone": (text[:2], text[2:]),
        "text alone on one": (text, []),
    }
    step = {"params": params, "optim": OPTIM, "max_tokens": 150, "algorithm": TIS}
    shares = {name: {"samples": split, "step": step} for name, split in splits.items()}
    run_ranks(rank_main, 2, out / "store", checkpoint, shares, out)
    return {name: torch.load(out / f"{name}.pt", weights_only=False) for name in splits}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["uneven", "none on the second", "none on the first", "text here and images there"])
def test_two_ranks_take_the_same_step_as_one(two_ranks: dict[str, Stepped], one_batch: Stepped, split: str) -> None:
    assert_same_step(two_ranks[split], one_batch)


@pytest.mark.parametrize("split", ["text alone", "text alone on one"])
def test_two_ranks_without_images_take_the_same_step_as_one(
    checkpoint: Path,
    samples: list[TrainingSample],
    params: SamplingParams,
    two_ranks: dict[str, Stepped],
    split: str,
) -> None:
    assert_same_step(two_ranks[split], take_step(checkpoint, samples[:3], params, OPTIM, algorithm=TIS))


def test_on_policy_streams_have_no_gap_to_the_trainer(
    checkpoint: Path, on_policy: list[TrainingSample], params: SamplingParams
) -> None:
    stats = take_step(checkpoint, on_policy, params, OPTIM).stats
    assert stats.num_tokens == sum(int(s.mask_T.sum()) for s in on_policy)
    assert stats.rollout_train_kl < 1e-8
    assert stats.logprob_gap_max < 1e-4
    assert stats.objective["correction_mean"] == pytest.approx(1.0, abs=1e-5)


class Gallery(Env):
    """Answers every turn with an image and a text, and a second message."""

    def __init__(self, sample: Sample, args: object) -> None:
        self.turn = 0

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        self.turn += 1
        return {"turn": self.turn}, False, {}

    def format_observation(self, observation: dict[str, Any]) -> list[Message]:
        shown = {"type": "image", "image": make_image(64 + 32 * observation["turn"], 64, seed=observation["turn"])}
        return [
            {"role": "tool", "content": [shown, {"type": "text", "text": "See."}]},
            {"role": "tool", "content": "Again."},
        ]

    def reward(self, final_text: str) -> float:
        return float(len(final_text) % 2)


def test_images_and_several_messages_in_later_turns_leave_no_gap_to_the_trainer(
    checkpoint: Path, renderer: Renderer
) -> None:
    any_word = tuple(range(30, renderer.tokenizer.vocab_size, 3))  # so that the random model ends its turns
    params = SamplingParams(0.7, any_word, renderer.suppressed_ids)
    episode = Episode(HFEngine(fresh_model(checkpoint)), renderer, Limits(max_turns=3, max_new_tokens=900), params)
    samples = [Sample(str(number), prompt, label="5") for number, prompt in enumerate(PROMPTS[:2])]
    groups = asyncio.run(rollout_groups(episode, samples, Gallery, None, group_size=4, seed=3))
    played = [t for g in groups for t in g.trajectories]
    assert all(t.end_reason is EndReason.MAX_TURNS and len(t.turns) == 3 for t in played)
    assert {len(t.images) for t in played} == {2, 3}  # two later images, and the prompt's where it has one
    images = renderer.images
    stats = take_step(checkpoint, samples_of(groups, renderer.image_token_id, images.merge_size), params, OPTIM).stats
    assert stats.num_tokens == sum(t.num_model_tokens for t in played)
    assert stats.rollout_train_kl < 1e-8 and stats.logprob_gap_max < 1e-4
    assert len(stats.kl_by_turn) == 3 and max(stats.kl_by_turn) < 1e-8


def test_old_new_and_reference_log_probs_are_those_among_the_ids_that_a_token_was_drawn_from(
    checkpoint: Path, renderer: Renderer
) -> None:
    any_word = tuple(range(30, renderer.tokenizer.vocab_size, 3))
    params = SamplingParams(1.2, any_word, renderer.suppressed_ids, top_k=256, top_p=0.9)
    episode = Episode(HFEngine(fresh_model(checkpoint)), renderer, Limits(max_turns=3, max_new_tokens=900), params)
    samples = [Sample(str(number), prompt, label="5") for number, prompt in enumerate(PROMPTS[:2])]
    groups = asyncio.run(rollout_groups(episode, samples, Gallery, None, group_size=4, seed=3))
    images = renderer.images
    taken = samples_of(groups, renderer.image_token_id, images.merge_size)
    penalised = AlgorithmConfig(kl_coef=0.1)
    stats = take_step(checkpoint, taken, params, OPTIM, algorithm=penalised).stats
    assert stats.rollout_train_kl < 1e-10 and stats.logprob_gap_max < 1e-4
    # The reference is the policy itself before its first update.
    assert stats.objective["ref_kl"] == pytest.approx(0, abs=1e-7)
    twice = take_step(checkpoint, taken, params, OPTIM.model_copy(update={"epochs": 2}), algorithm=penalised).stats
    assert twice.rollout_train_kl < 1e-10
    # Over all ids, the same tokens would be those of another policy.
    whole = take_step(checkpoint, [replace(sample, kept_NK=None) for sample in taken], params, OPTIM).stats
    assert whole.rollout_train_kl > 1e-3
    assert whole.entropy > stats.entropy > 0


def test_the_gap_is_reported_turn_by_turn(checkpoint: Path, params: SamplingParams) -> None:
    """Log-probs that are off by 0.1 in the second turn alone, and by 0.3 in the third."""
    ids, mask = [5, 6, 31, 32, 33, 7, 34, 8, 35, 36], [0, 0, 1, 1, 1, 0, 1, 0, 1, 1]
    table = full_logprobs(fresh_model(checkpoint), ids, (), params).detach()
    true_T = np.array([0.0, *(float(table[place - 1, ids[place]]) for place in range(1, len(ids)))])
    off_T = np.array([0, 0, 0, 0, 0, 0, 0.1, 0, 0.3, 0.3])
    logprobs_T = np.where(np.array(mask, dtype=bool), true_T + off_T, 0)
    streams = [trajectory(ids, mask, logprobs_T.tolist(), reward=reward) for reward in (0.0, 1.0)]
    samples = samples_of([group(*streams)])
    stats = take_step(checkpoint, samples, params, OPTIM, algorithm=TIS).stats
    second, third = (np.exp(-gap) - 1 + gap for gap in (0.1, 0.3))
    assert stats.kl_by_turn == pytest.approx((0, second, third), rel=1e-3, abs=1e-9)
    assert stats.rollout_train_kl == pytest.approx((second + 2 * third) / 6, rel=1e-3)
    assert (stats.logprob_gap_mean, stats.logprob_gap_max) == pytest.approx((0.7 / 6, 0.3), rel=1e-3)
    assert stats.row()["rollout_train_kl/turn_3"] == stats.kl_by_turn[2]


@pytest.mark.parametrize(("num_minibatches", "epochs"), [(1, 1), (1, 2), (3, 1)])
def test_the_trainers_log_probs_come_back_by_sample(
    num_minibatches: int, epochs: int, checkpoint: Path, on_policy: list[TrainingSample], params: SamplingParams
) -> None:
    """On-policy samples have the log-probs of the learner's first weights, which a second update must not show."""
    named = [replace(s, key=(number, 0, 0), advantage=0.0 if number % 2 else 1.0) for number, s in enumerate(on_policy)]
    learner = FSDPLearner(fresh_model(checkpoint), params, 1, OptimConfig(lr=0.01, epochs=epochs))
    stats = learner.step([named[part::num_minibatches] for part in range(num_minibatches)])
    assert stats.logprobs.keys() == {(*s.key, 0) for s in named}
    for s in named:
        np.testing.assert_allclose(stats.logprobs[*s.key, s.stream], s.logprobs_T[s.mask_T], atol=2e-5)
    assert "logprobs" not in stats.row()


def test_an_update_on_text_beside_one_on_images_counts_nothing_of_its_filler(
    checkpoint: Path, on_policy: list[TrainingSample], params: SamplingParams
) -> None:
    """Where any update shows images, a micro-batch of text alone gets a filler that shows one."""
    named = [replace(s, key=(number, 0, 0)) for number, s in enumerate(on_policy)]
    text, imaged = named[:3], named[3:]
    assert not any(s.images for s in text) and all(s.images for s in imaged)
    learner = FSDPLearner(PolicyModel.load(checkpoint), params, 1, OPTIM.model_copy(update={"lr": 1e-30}))
    stats = learner.step([text, imaged])
    assert stats.num_tokens == sum(int(s.mask_T.sum()) for s in named)
    assert stats.logprobs.keys() == {(*s.key, 0) for s in named}
    assert stats.rollout_train_kl < 1e-8
    assert stats.objective["ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_the_gap_grows_when_the_trainer_has_other_weights(
    checkpoint: Path, on_policy: list[TrainingSample], params: SamplingParams
) -> None:
    gaps = []
    for noise in (0.01, 0.03):
        model = fresh_model(checkpoint)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + noise * torch.randn_like(parameter))
        gaps.append(FSDPLearner(model, params, 1, OPTIM).step([on_policy]).rollout_train_kl)
    assert 1e-5 < gaps[0] < gaps[1]


def test_a_wrong_temperature_in_the_trainer_shows_in_the_gap(
    checkpoint: Path, on_policy: list[TrainingSample], params: SamplingParams
) -> None:
    wrong = replace(params, temperature=1.0)
    assert take_step(checkpoint, on_policy, wrong, OPTIM).stats.rollout_train_kl > 1e-3


def test_a_gradient_that_is_not_finite_changes_no_weight(
    model: PolicyModel, samples: list[TrainingSample], params: SamplingParams
) -> None:
    learner = FSDPLearner(model, params, 2, OPTIM)
    before = {name: w.clone() for name, w in learner.weights().items()}
    broken = [replace(samples[0], advantage=float("inf")), *samples[1:]]
    stats = learner.step([broken])
    assert (stats.num_updates, stats.num_skipped) == (0, 1)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights().items())
    # The optimizer's state is untouched as well: the next step is an ordinary one.
    assert np.isfinite(learner.step([samples]).grad_norm)
    assert all(weight.isfinite().all() for weight in learner.weights().values())


def test_an_update_that_failed_on_the_way_leaves_no_gradient_to_the_next(
    checkpoint: Path, samples: list[TrainingSample], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LearnerConfig(max_tokens_per_microbatch=60)
    learner, untouched = (FSDPLearner(fresh_model(checkpoint), params, 2, OPTIM, TIS, config) for _ in range(2))
    expected, calls = untouched.step([samples]), iter(range(4))

    def failing(*arguments: Any) -> Any:
        if next(calls, None) == 3:
            raise RuntimeError("no memory")
        return collate(*arguments)

    monkeypatch.setattr("trainer.learner.fsdp_learner.collate", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        learner.step([samples])
    assert learner.step([samples]).grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_in_bfloat16_the_first_update_of_several_has_ratio_one(
    checkpoint: Path, on_policy: list[TrainingSample], params: SamplingParams
) -> None:
    """Old log-probs are rounded as the update's own are: bounds as narrow as GSPO's clip nothing before a change."""
    algorithm = AlgorithmConfig(policy_loss="gspo", clip_low=3e-4, clip_high=4e-4)
    config = LearnerConfig(max_tokens_per_microbatch=150)
    model = fresh_model(checkpoint)
    learner = FSDPLearner(
        model, params, 1, OPTIM.model_copy(update={"lr": 1e-30}), algorithm, config, dtype=torch.bfloat16
    )
    halves = [on_policy[:6], on_policy[6:]]
    assert learner.step(halves).objective["clip_frac"] == 0.0


def test_a_step_without_samples_changes_no_weight(model: PolicyModel, params: SamplingParams) -> None:
    learner = FSDPLearner(model, params, 1, OPTIM)
    before = {name: w.clone() for name, w in learner.weights().items()}
    stats = learner.step([[]])
    assert (stats.num_tokens, stats.loss, stats.grad_norm) == (0, 0.0, 0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights().items())


def test_the_learning_rate_warms_up_and_then_follows_its_schedule(model: PolicyModel, params: SamplingParams) -> None:
    optim = OPTIM.model_copy(update={"lr": 1.0, "warmup_steps": 2, "schedule": "cosine"})
    learner = FSDPLearner(model, params, 4, optim)
    rates = [learner.step([[]]).lr for _ in range(4)]
    cosine = [1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]  # (1 + cos(k pi / 4)) / 2
    assert rates == pytest.approx([0.5 * cosine[0], *cosine[1:]])
