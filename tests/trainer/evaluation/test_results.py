"""Claims about the figures of an evaluation: what counts as right, in what share, and against what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
from pydantic import TypeAdapter

from agents.types import EndReason
from envs.spec import EnvSpec
from trainer.evaluation.results import EvaluatedEpisode, Evaluation, ProblemResult, compare, summarise
from trainer.evaluation.statistics import Intervals, pass_at_k, wilson

HOW = Intervals(resamples=200)


def episode(
    right: bool = True, end: EndReason = EndReason.COMPLETED, turns: int = 1, reward: float | None = None
) -> EvaluatedEpisode:
    earned = float(right) if reward is None else reward
    return EvaluatedEpisode(earned, right, end, turns, 10 * turns, ("none",) * turns)


def problem(number: int, *episodes: EvaluatedEpisode, **tags: str) -> ProblemResult:
    return ProblemResult(number, f"p{number}", tags, episodes or (episode(),))


def singles(*right: bool) -> list[ProblemResult]:
    return [problem(number, episode(mark)) for number, mark in enumerate(right)]


def samples(*counts: int, of: int = 4) -> list[ProblemResult]:
    return [
        problem(number, *[episode(True)] * count, *[episode(False)] * (of - count))
        for number, count in enumerate(counts)
    ]


def test_with_one_sample_accuracy_is_a_share_with_wilsons_interval() -> None:
    e = summarise(singles(True, False, False, True), (1,), HOW)
    assert (e.num_problems, e.num_samples, e.accuracy.value) == (4, 1, 0.5)
    assert (e.accuracy.low, e.accuracy.high) == wilson(2, 4)
    assert e.pass_at == {1: e.accuracy}


def test_with_several_samples_problems_weigh_the_same_and_pass_at_k_is_their_mean() -> None:
    e = summarise(samples(0, 1, 2, 4), (1, 2, 4), HOW)
    assert e.accuracy.value == pytest.approx((0 + 0.25 + 0.5 + 1) / 4)
    assert e.pass_at[2].value == pytest.approx(sum(pass_at_k(4, c, 2) for c in (0, 1, 2, 4)) / 4)
    assert e.pass_at[2].value == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)  # 1 - C(4-c, 2) / 6 by hand
    assert e.pass_at[4].value == 0.75
    assert e.accuracy.method == "bootstrap" and e.accuracy.low < e.accuracy.value < e.accuracy.high


def test_broken_episodes_are_wrong_and_shown_and_in_no_mean_reward() -> None:
    broken = [episode(False, end) for end in (EndReason.ENV_ERROR, EndReason.ABORTED, EndReason.INVALID_STREAM)]
    e = summarise([problem(0, *broken, episode())], (1,), HOW)
    assert (e.accuracy.value, e.num_broken, e.num_truncated) == (0.25, 3, 0)
    assert e.mean_reward is not None and e.mean_reward.value == 1.0
    assert summarise([problem(0, *broken)], (1,), HOW).mean_reward is None


def test_truncated_episodes_count_as_they_are_and_are_shown() -> None:
    ends = EndReason.MAX_TURNS, EndReason.TOKEN_BUDGET, EndReason.CONTEXT_FULL
    e = summarise([problem(n, episode(n == 0, end)) for n, end in enumerate(ends)], (1,), HOW)
    assert (e.accuracy.value, e.num_broken, e.num_truncated) == (pytest.approx(1 / 3), 0, 3)


def test_end_reasons_have_count_share_accuracy_and_turns() -> None:
    completed = [problem(0, episode(True, turns=1)), problem(1, episode(False, turns=2))]
    e = summarise([*completed, problem(2, episode(False, EndReason.MAX_TURNS, turns=3))], (1,), HOW)
    assert list(e.ends) == ["completed", "max_turns"]
    one, other = e.ends.values()
    assert (one.num_episodes, one.share, one.accuracy, one.mean_turns) == (2, pytest.approx(2 / 3), 0.5, 1.5)
    assert (other.num_episodes, other.accuracy, other.mean_turns) == (1, 0.0, 3.0)
    assert (e.num_turns, e.mean_turns, e.mean_tokens) == (6, 2.0, 20.0)


def test_tool_outcomes_are_counted_the_most_frequent_first() -> None:
    calls = EvaluatedEpisode(0.0, False, EndReason.COMPLETED, 3, 9, ("ok", "malformed", "ok"))
    assert summarise([problem(0, calls)], (1,), HOW).tool_outcomes == {"ok": 2, "malformed": 1}


def test_the_mean_reward_is_over_valid_episodes_and_may_lie_outside_the_usual_rewards() -> None:
    first = problem(0, episode(reward=3.0), episode(reward=1.0))
    second = problem(1, episode(reward=-2.0), episode(False, EndReason.ENV_ERROR))
    e = summarise([first, second], (1,), HOW)
    assert e.mean_reward is not None
    assert (e.mean_reward.value, e.mean_reward.low, e.mean_reward.high) == (pytest.approx(2 / 3), -2.0, 2.0)
    equal = summarise([problem(0, episode(reward=3.0))], (1,), HOW).mean_reward
    assert equal is not None and 0.0 < equal.low < equal.high == 3.0


def test_equal_rewards_have_an_interval_below_them_too_where_the_entry_declares_no_least_reward() -> None:
    entry = {"id": "e", "entry_point": "m:E", "description": "d", "max_turns": 1}
    results = singles(False, False, False, False)

    def interval(**more: object) -> tuple[float, float]:
        spec = EnvSpec.model_validate({**entry, **more})
        mean = summarise(results, (1,), replace(HOW, reward_bounds=spec.total_bounds)).mean_reward
        assert mean is not None
        return round(mean.low, 2), round(mean.high, 2)

    assert interval() == (0.0, 0.49)
    assert interval(success="none") == interval(success="none", reward_max_val=5.0) == (-0.49, 0.49)
    assert interval(success="none", reward_min_val=-1.0, reward_max_val=5.0) == (-0.49, 2.45)
    assert interval(reward=["answer", "penalties:length"]) == (-0.49, 0.49)


def test_accuracy_by_tag_has_every_value_in_natural_order_with_its_own_interval() -> None:
    results = [problem(n, episode(n % 2 == 0), level=str(n % 3 * 5), family="b" if n else "a") for n in range(6)]
    e = summarise([*results, problem(6, episode())], (1,), HOW)
    assert list(e.by_tag["level"]) == ["0", "5", "10"] and list(e.by_tag["family"]) == ["a", "b"]
    assert (e.by_tag["family"]["b"].num_problems, e.by_tag["family"]["b"].value) == (5, 0.4)
    assert (e.by_tag["family"]["b"].low, e.by_tag["family"]["b"].high) == wilson(2, 5)


def test_the_difference_is_paired_by_problem() -> None:
    first, second = singles(True, True, True, False, False), singles(True, False, False, True, False)
    d = compare(first, second, HOW)
    assert d is not None and d.value == pytest.approx(0.2)
    assert d.low < 0 < d.high


def test_without_a_success_the_difference_is_of_mean_rewards_of_the_problems_that_both_know() -> None:
    def rewarded(*rewards: float | None) -> list[ProblemResult]:
        ends = {True: EndReason.ENV_ERROR, False: EndReason.COMPLETED}
        every = [EvaluatedEpisode(reward or 0.0, None, ends[reward is None], 1, 9) for reward in rewards]
        return [problem(number, each) for number, each in enumerate(every)]

    d = compare(rewarded(3.0, 1.0, None), rewarded(1.0, 2.0, 5.0), HOW)
    assert d is not None and (d.value, d.num_problems) == (0.5, 2)
    assert compare(rewarded(None), rewarded(1.0), HOW) is None


def test_pairing_makes_the_difference_surer_than_its_parts() -> None:
    first = singles(*[n % 2 == 0 for n in range(100)])
    second = singles(*[n % 2 == 0 and n != 0 for n in range(100)])
    d, one = compare(first, second, HOW), summarise(first, (1,), HOW).accuracy
    assert d is not None and d.high - d.low < (one.high - one.low) / 3


def test_a_problem_that_one_way_lacks_is_in_no_pair() -> None:
    d = compare(singles(True, True, True), [problem(2, episode(False)), problem(7, episode(False))], HOW)
    assert d is not None and (d.num_problems, d.value) == (1, 1.0)
    assert compare(singles(True), [problem(3)], HOW) is None


def test_without_discordant_pairs_the_difference_is_not_certain() -> None:
    d = compare(singles(*[True] * 20), singles(*[True] * 20), HOW)
    most = wilson(0, 20)[1]
    assert d is not None and (d.low, d.high) == (-most, most)


def test_several_samples_have_a_paired_difference() -> None:
    d = compare(samples(4, 2, 0), samples(2, 2, 1), HOW)
    assert d is not None and d.value == pytest.approx((0.5 + 0 - 0.25) / 3)


def test_figures_come_back_from_json_as_they_were() -> None:
    """A resumed run reads those of before."""

    def back(results: Sequence[ProblemResult]) -> tuple[Evaluation, Evaluation]:
        e = summarise(results, (1, 2), HOW)
        return e, TypeAdapter(Evaluation).validate_python(json.loads(json.dumps(asdict(e))))

    e, again = back(samples(0, 1, 4))
    assert e == again
