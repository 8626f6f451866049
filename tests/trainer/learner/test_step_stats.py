"""Claims about what a step reports of itself and does with its settings, on the tiny network, with numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.model.policy import PolicyModel
from agents.rendering.renderer import Renderer
from agents.types import SamplingParams
from envs.config.plugins import give
from tests.builders import fresh_model, full_logprobs, group, sampling, trajectory
from tests.trainer.steps import samples_of
from trainer.algorithms.policy_loss import PolicyTerms, ppo
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.learner import LearnerConfig, OptimConfig
from trainer.learner.fsdp_learner import FSDPLearner
from trainer.types import ModelTokens, TrainingSample

#: A rate so low that all updates of a step see the same weights.
STILL = OptimConfig(lr=1e-30, warmup_steps=0, weight_decay=0.0)
PLAIN = AlgorithmConfig(correction="none")


@pytest.fixture(scope="module")
def params(renderer: Renderer) -> SamplingParams:
    return sampling(renderer, temperature=0.7)


def streams(*rewards: float, first: int = 20) -> list[TrainingSample]:
    """Return the samples of one group: a prompt of two tokens, and one token more for each stream than for the last."""
    made = []
    for number, reward in enumerate(rewards):
        written = [first + number + place for place in range(number + 2)]
        made.append(trajectory([5, 6, *written], [0, 0] + [1] * len(written), reward=reward))
    return [replace(sample, key=(first, number, 0)) for number, sample in enumerate(samples_of([group(*made)]))]


def learner_of(checkpoint: Path, params: SamplingParams, optim: OptimConfig = STILL, **config: int) -> FSDPLearner:
    return FSDPLearner(fresh_model(checkpoint), params, 10, optim, PLAIN, LearnerConfig(**config))


@pytest.mark.parametrize("epochs", [1, 2])
def test_loss_and_gradient_norm_of_a_step_are_the_means_of_its_updates(
    checkpoint: Path, params: SamplingParams, epochs: int
) -> None:
    parts = [streams(0.0, 1.0), streams(0.0, 0.0, 3.0, first=40)]
    alone = [learner_of(checkpoint, params).step([part]) for part in parts]
    learner = learner_of(checkpoint, params, STILL.model_copy(update={"epochs": epochs}))
    both = learner.step(parts)
    assert (both.num_updates, both.num_skipped, learner.steps_done) == (2 * epochs, 0, 1)
    assert both.loss == pytest.approx(sum(stats.loss for stats in alone) / 2, rel=1e-5)
    assert both.grad_norm == pytest.approx(sum(stats.grad_norm for stats in alone) / 2, rel=1e-5)
    assert alone[0].grad_norm != pytest.approx(alone[1].grad_norm, rel=0.01)


def test_a_minibatch_without_advantages_is_no_update_and_counts_in_no_mean(
    checkpoint: Path, params: SamplingParams
) -> None:
    parts = [streams(0.0, 1.0), streams(2.0, 2.0, first=40), streams(0.0, 0.0, 3.0, first=60)]
    moving = OptimConfig(lr=1e-3, warmup_steps=0)
    three, two = (learner_of(checkpoint, params, moving) for _ in range(2))
    got, expected = three.step(parts), two.step([parts[0], parts[2]])
    assert got.num_updates == expected.num_updates == 2
    assert (got.loss, got.grad_norm) == (expected.loss, expected.grad_norm)
    weights = two.weights()
    assert all(torch.equal(weight, weights[name]) for name, weight in three.weights().items())
    nothing = three.step([parts[1]])
    assert (nothing.num_updates, nothing.loss, nothing.grad_norm) == (0, 0.0, 0.0)


def test_figures_are_over_the_tokens_of_all_updates_and_each_token_is_measured_once(
    checkpoint: Path, params: SamplingParams
) -> None:
    parts = [streams(0.0, 1.0), streams(0.0, 0.0, 3.0, first=40)]
    num_tokens = [2 + 3, 2 + 3 + 4]
    alone = [learner_of(checkpoint, params).step([part]) for part in parts]
    both = learner_of(checkpoint, params, STILL.model_copy(update={"epochs": 2})).step(parts)
    assert [stats.num_tokens for stats in (*alone, both)] == [*num_tokens, sum(num_tokens)]
    for figure in ("entropy", "rollout_train_kl", "logprob_gap_mean"):
        first, second = (getattr(stats, figure) * count for stats, count in zip(alone, num_tokens, strict=True))
        assert getattr(both, figure) == pytest.approx((first + second) / sum(num_tokens), rel=1e-5), figure
    assert both.objective["ratio_mean"] == pytest.approx(1.0, rel=1e-5)
    assert both.objective["correction_mean"] == pytest.approx(1.0, rel=1e-12)
    assert both.logprobs.keys() == {(*sample.key, 0) for part in parts for sample in part}


def test_entropy_is_the_mean_over_model_tokens_under_the_sampling_law(checkpoint: Path, params: SamplingParams) -> None:
    samples, entropies = streams(0.0, 1.0), []
    for sample in samples:
        table = full_logprobs(fresh_model(checkpoint), sample.ids_T.tolist(), (), params).detach()
        rows = table[torch.from_numpy(np.flatnonzero(sample.mask_T) - 1)]
        entropies += (-(rows.exp() * rows.nan_to_num(neginf=0.0)).sum(-1)).tolist()
    stats = learner_of(checkpoint, params).step([samples])
    assert stats.entropy == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)


@pytest.mark.parametrize("max_tokens", [4, 100])
def test_a_sample_without_advantage_is_measured_and_counted_and_has_no_gradient(
    checkpoint: Path, params: SamplingParams, max_tokens: int
) -> None:
    idle = streams(1.0, 1.0, first=60)
    stats = learner_of(checkpoint, params, max_tokens_per_microbatch=max_tokens).step([idle])
    assert (stats.num_tokens, stats.num_updates, stats.grad_norm, stats.loss) == (5, 0, 0.0, 0.0)
    assert stats.entropy > 0
    assert stats.logprobs.keys() == {(*sample.key, 0) for sample in idle}
    taught = streams(0.0, 1.0)
    mixed = learner_of(checkpoint, params, max_tokens_per_microbatch=max_tokens).step([[*taught, *idle]])
    alone = learner_of(checkpoint, params, max_tokens_per_microbatch=max_tokens).step([taught])
    assert (mixed.num_tokens, mixed.num_updates) == (10, 1)
    assert mixed.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)


def test_an_update_that_is_left_out_is_counted_and_the_others_are_taken(
    checkpoint: Path, params: SamplingParams
) -> None:
    broken = [replace(sample, advantage=float("inf")) for sample in streams(0.0, 1.0)]
    learner = learner_of(checkpoint, params, OptimConfig(lr=1e-3, warmup_steps=0))
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    stats = learner.step([broken, streams(0.0, 1.0, first=40), broken])
    assert (stats.num_updates, stats.num_skipped) == (1, 2)
    assert any(not torch.equal(weight, before[name]) for name, weight in learner.weights().items())
    assert all(weight.isfinite().all() for weight in learner.weights().values())


def test_the_optimizer_has_the_settings_that_were_given(checkpoint: Path, params: SamplingParams) -> None:
    optim = OptimConfig(lr=0.5, warmup_steps=0, beta1=0.7, beta2=0.8, weight_decay=0.25)
    (group_,) = learner_of(checkpoint, params, optim).optimizer.param_groups
    assert (group_["lr"], group_["betas"], group_["weight_decay"]) == (0.5, (0.7, 0.8), 0.25)


def test_gradients_are_cut_to_the_norm_that_was_given_after_it_was_measured(
    checkpoint: Path, params: SamplingParams
) -> None:
    """The first moment of AdamW is (1 - beta1) times the gradient that it was given."""
    norms = {}
    for most in (1e-3, 1e9):
        optim = OptimConfig(lr=1e-30, warmup_steps=0, beta1=0.5, max_grad_norm=most)
        learner = learner_of(checkpoint, params, optim)
        stats = learner.step([streams(0.0, 1.0)])
        moments = [state["exp_avg"].double().square().sum().item() for state in learner.optimizer.state.values()]
        norms[most] = 2 * sum(moments) ** 0.5, stats.grad_norm
    assert norms[1e-3][0] == pytest.approx(1e-3, rel=1e-3)
    assert norms[1e9][0] == pytest.approx(norms[1e9][1], rel=1e-4)
    assert norms[1e-3][1] == pytest.approx(norms[1e9][1], rel=1e-5)


@pytest.mark.parametrize(
    ("warmup_steps", "schedule", "rates"),
    [
        (0, "constant", [8.0, 8.0, 8.0, 8.0]),
        (1, "constant", [8.0, 8.0, 8.0, 8.0]),
        (4, "constant", [2.0, 4.0, 6.0, 8.0, 8.0]),
        (0, "cosine", [8.0 * (0.5 + 0.5 * np.cos(np.pi * step / 10)) for step in range(12)]),
    ],
)
def test_the_learning_rate_follows_warm_up_and_schedule_and_reaches_the_optimizer(
    checkpoint: Path, params: SamplingParams, warmup_steps: int, schedule: str, rates: list[float]
) -> None:
    optim = OptimConfig.model_validate({"lr": 8.0, "warmup_steps": warmup_steps, "schedule": schedule})
    learner = learner_of(checkpoint, params, optim)
    for step, rate in enumerate(rates):
        stats = learner.step([[]])
        assert (stats.lr, learner.steps_done) == (pytest.approx(rate), step + 1)
        assert [each["lr"] for each in learner.optimizer.param_groups] == [stats.lr]


def test_a_step_without_samples_has_no_turns_and_no_figures(checkpoint: Path, params: SamplingParams) -> None:
    stats = learner_of(checkpoint, params).step([[], []])
    assert (stats.kl_by_turn, stats.num_tokens, stats.num_updates, stats.num_skipped) == ((), 0, 0, 0)
    assert (stats.loss, stats.entropy, stats.grad_norm, stats.logprob_gap_max) == (0.0, 0.0, 0.0, 0.0)
    assert stats.logprobs == {}


def test_the_ratio_of_a_later_update_is_to_the_weights_before_the_first(
    checkpoint: Path, params: SamplingParams
) -> None:
    samples, moving = streams(0.0, 1.0), OptimConfig(lr=1e-3, warmup_steps=0, weight_decay=0.0)
    one_by_one = learner_of(checkpoint, params, moving)
    before, after = (one_by_one.step([samples]).logprobs for _ in range(2))
    ratios = np.concatenate([np.exp(after[key] - before[key]) for key in before])
    assert abs(ratios.mean() - 1) > 1e-3
    twice = learner_of(checkpoint, params, moving.model_copy(update={"epochs": 2})).step([samples])
    assert twice.objective["ratio_mean"] == pytest.approx((1 + ratios.mean()) / 2, rel=1e-5)


def nll_of_right(tokens: ModelTokens, config: AlgorithmConfig) -> PolicyTerms:
    """PPO, and the likelihood of every token: a term that no advantage multiplies."""
    terms = ppo(tokens, config)
    return replace(terms, loss_N=terms.loss_N - 0.5 * tokens.logprobs_N)


def only_ppo(tokens: ModelTokens, config: AlgorithmConfig) -> PolicyTerms:
    return ppo(tokens, config)


only_ppo.skips_zero_advantages = True  # type: ignore[attr-defined]


def gradient_norm(
    model: PolicyModel, samples: list[TrainingSample], distribution: SamplingParams, term: float
) -> float:
    """Return |gradient| of sum of weight (-A logprob - term logprob), each stream alone in Transformers' forward."""
    for sample in samples:
        table = full_logprobs(model, sample.ids_T.tolist(), (), distribution)
        places = np.flatnonzero(sample.mask_T)
        logprobs_N = table[torch.from_numpy(places - 1), torch.from_numpy(sample.ids_T[places])]
        advantage = torch.tensor(np.float32(sample.advantage))
        (-sample.weight * (advantage + term) * logprobs_N).sum().backward()
    return sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None) ** 0.5


@pytest.mark.parametrize(
    ("loss", "term", "num_rows"), [(nll_of_right, 0.5, 6), (only_ppo, 0.0, 2), ("ppo", 0.0, 2), ("gspo", 0.0, 2)]
)
def test_a_loss_of_ones_own_keeps_its_gradient_on_rows_without_advantage_and_may_say_that_it_has_none(
    checkpoint: Path, params: SamplingParams, loss: Any, term: float, num_rows: int
) -> None:
    groups = [streams(0.0, 1.0), streams(1.0, 1.0, 1.0, 1.0, first=60)]
    together = [replace(s, weight=1 / 19) for part in groups for s in part]
    algorithm = PLAIN.model_copy(update={"policy_loss": loss if isinstance(loss, str) else give(loss)})
    a_row_each = LearnerConfig(max_tokens_per_microbatch=4)
    learner = FSDPLearner(fresh_model(checkpoint), params, 10, STILL, algorithm, a_row_each)
    assert len(learner._split_rows(together)[1]) == num_rows
    assert learner.step([together]).grad_norm == pytest.approx(
        gradient_norm(fresh_model(checkpoint), together, params, term), rel=1e-4
    )
    assert learner.step([groups[1]]).num_updates == int(term > 0)


@pytest.mark.parametrize("setting", ["kl_coef", "entropy_coef"])
def test_a_regulariser_keeps_its_gradient_on_rows_without_advantage(
    checkpoint: Path, params: SamplingParams, setting: str
) -> None:
    idle = streams(1.0, 1.0, first=60)
    algorithm = PLAIN.model_copy(update={setting: 0.5})
    optim = OptimConfig(lr=1e-3, warmup_steps=0, weight_decay=0.0)
    learner = FSDPLearner(fresh_model(checkpoint), params, 10, optim, algorithm, path=checkpoint)
    learner.step([streams(0.0, 1.0)])  # away from the reference
    assert learner.step([idle]).grad_norm > 0


def test_a_loss_that_is_not_finite_is_never_stepped_though_its_gradient_is_finite(
    checkpoint: Path, params: SamplingParams
) -> None:
    def shifted(tokens: ModelTokens, config: AlgorithmConfig) -> PolicyTerms:
        terms = ppo(tokens, config)
        return replace(terms, loss_N=terms.loss_N + math.inf)

    algorithm = PLAIN.model_copy(update={"policy_loss": give(shifted)})
    learner = FSDPLearner(fresh_model(checkpoint), params, 10, OptimConfig(lr=1e-3, warmup_steps=0), algorithm)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    stats = learner.step([streams(0.0, 1.0)])
    assert (stats.num_updates, stats.num_skipped, stats.loss, stats.grad_norm) == (0, 1, 0.0, 0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights().items())


def test_figures_of_a_step_are_those_of_the_updates_that_it_took(checkpoint: Path, params: SamplingParams) -> None:
    broken = [replace(sample, advantage=float("inf")) for sample in streams(0.0, 1.0)]
    good = streams(0.0, 1.0, first=40)
    got, expected = (learner_of(checkpoint, params).step(parts) for parts in ([broken, good], [good]))
    assert (got.loss, got.grad_norm, got.num_updates) == (expected.loss, expected.grad_norm, 1)
