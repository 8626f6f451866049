"""Claims about the curve of held-out accuracy: the best step, and when a run stops."""

from __future__ import annotations

import pytest

from agents.types import EndReason
from trainer.config.run import EvaluationConfig
from trainer.evaluation.curve import Curve, best_step, curve_summary, evaluation_metrics, why_stop
from trainer.evaluation.results import EvaluatedEpisode, Evaluation, ProblemResult, summarise
from trainer.evaluation.statistics import Intervals

HOW = Intervals(resamples=200)


def evaluation(num_right: int) -> Evaluation:
    """Return the evaluation of ten problems of which some are right, in two turns each."""
    results = [
        ProblemResult(
            n, f"p{n}", {}, (EvaluatedEpisode(float(n < num_right), n < num_right, EndReason.COMPLETED, 2, 9),)
        )
        for n in range(10)
    ]
    return summarise(results, (1,), Intervals())


def curve(**right: int) -> Curve:
    """Return a curve; `s10=3` is 3 right of ten after step 10. Without tools, all are right."""
    return {
        int(step[1:]): {"with_tool": evaluation(count), "without_tool": evaluation(10)} for step, count in right.items()
    }


def test_the_best_step_is_the_earliest_of_the_highest_accuracy_in_the_trained_way() -> None:
    assert best_step(curve(s0=1, s10=4, s20=3, s30=4)) == 10
    assert best_step(curve(s0=4, s10=4)) == 0


@pytest.mark.parametrize(
    ("right", "config", "reason"),
    [
        ({"s0": 1, "s10": 5}, {"stop_at_accuracy": 0.6}, ""),
        ({"s0": 1, "s10": 6}, {"stop_at_accuracy": 0.6}, "held-out accuracy 0.600 has reached --stop-at-accuracy 0.6"),
        ({"s0": 7}, {"stop_at_accuracy": 0.6}, "held-out accuracy 0.700 has reached --stop-at-accuracy 0.6"),
        ({"s0": 1, "s10": 5, "s20": 5}, {"patience": 2}, ""),
        ({"s0": 1, "s10": 5, "s20": 6, "s30": 5}, {"patience": 2}, ""),
        (
            {"s0": 1, "s10": 5, "s20": 5, "s30": 4},
            {"patience": 2},
            "--patience 2 evaluations without a held-out accuracy above the 0.500 of step 10",
        ),
        ({"s0": 9, "s10": 1, "s20": 1}, {}, ""),
    ],
)
def test_a_run_stops_at_an_accuracy_or_when_its_patience_is_over(
    right: dict[str, int], config: dict[str, float], reason: str
) -> None:
    assert why_stop(curve(**right), EvaluationConfig.model_validate({"eval_every": 10, **config})) == reason


def test_without_a_success_best_step_and_patience_go_by_the_mean_reward() -> None:
    def rewarded(reward: float) -> Evaluation:
        return summarise(
            [ProblemResult(0, "p", {}, (EvaluatedEpisode(reward, None, EndReason.COMPLETED, 1, 9),))], (1,), HOW
        )

    found = {step: {"with_tool": rewarded(reward)} for step, reward in {0: -9.0, 10: -4.0, 20: -5.0}.items()}
    assert best_step(found, "mean_reward") == 10 and best_step(found, "accuracy") is None
    config = EvaluationConfig(eval_every=10, patience=1)
    reason = "--patience 1 evaluations without a held-out mean reward above the -4.000 of step 10"
    assert why_stop(found, config, "mean_reward") == reason
    metrics = evaluation_metrics(found[10])
    assert metrics["eval/with_tool/reward"] == -4 and "eval/with_tool/accuracy" not in metrics
    assert metrics["eval/with_tool/reward_low"] <= -4 <= metrics["eval/with_tool/reward_high"]
    (first, *_) = curve_summary(found)
    assert first["accuracy"] == {} and first["mean_reward"] == {"with_tool": -9.0} and first["interval"]["with_tool"]


def test_a_step_whose_episodes_all_broke_is_never_the_best() -> None:
    broken = ProblemResult(0, "p", {}, (EvaluatedEpisode(0.0, None, EndReason.ENV_ERROR, 1, 9),))
    ways = {"with_tool": summarise([broken], (1,), HOW)}
    assert best_step({0: ways}, "mean_reward") is None
    assert why_stop({0: ways}, EvaluationConfig(eval_every=1, patience=1), "mean_reward") == ""
    assert curve_summary({0: ways})[0]["interval"] == {}


def test_nothing_stops_a_run_that_does_not_evaluate_between_steps() -> None:
    assert why_stop(curve(s0=1), EvaluationConfig()) == why_stop({}, EvaluationConfig(eval_every=1)) == ""


def test_metrics_and_summary_have_accuracy_with_its_interval_for_each_way() -> None:
    ways = curve(s10=4)[10]
    low, high = 0.16818, 0.68733  # Wilson's interval of 4 of 10
    metrics = evaluation_metrics(ways)
    assert metrics["eval/with_tool/accuracy"] == metrics["eval/with_tool/reward"] == 0.4
    assert (metrics["eval/with_tool/accuracy_low"], metrics["eval/with_tool/accuracy_high"]) == pytest.approx(
        (low, high), abs=1e-5
    )
    assert metrics["eval/with_tool/turns"] == 2 and metrics["eval/without_tool/accuracy"] == 1.0
    (point,) = curve_summary(curve(s10=4))
    assert point["step"] == 10 and point["accuracy"] == {"with_tool": 0.4, "without_tool": 1.0}
    assert point["interval"]["with_tool"] == pytest.approx([low, high], abs=1e-5)
