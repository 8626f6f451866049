"""The held-out accuracy of a run over its steps: metrics, the best step, and when to stop.

A curve has an evaluation for each way of playing at each step that was evaluated; step 0 is the policy at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.run import EvaluationConfig
from trainer.evaluation.results import Evaluation
from trainer.evaluation.statistics import Estimate

#: The evaluations of each way, in order; the first way is the one that is trained.
Ways = Mapping[str, Evaluation]
#: Evaluations by step, in order.
Curve = Mapping[int, Ways]


def trained_accuracy(ways: Ways) -> Estimate:
    """Return the accuracy in the way that is trained: with the tools, if there are any."""
    return next(iter(ways.values())).accuracy


def evaluation_metrics(ways: Ways) -> dict[str, float]:
    """Return the metrics of an evaluation, such as `eval/with_tool/accuracy` with the bounds of its 95 % interval."""
    metrics: dict[str, float] = {}
    for way, found in ways.items():
        metrics[f"eval/{way}/accuracy"] = found.accuracy.value
        metrics[f"eval/{way}/accuracy_low"] = found.accuracy.low
        metrics[f"eval/{way}/accuracy_high"] = found.accuracy.high
        metrics[f"eval/{way}/turns"] = found.mean_turns
        if found.second_attempts and found.second_attempts.after_wrong:
            metrics[f"eval/{way}/second_attempt_right_after_wrong"] = found.second_attempts.after_wrong.value
        if found.mean_reward:
            metrics[f"eval/{way}/reward"] = found.mean_reward.value
    return metrics


def best_step(curve: Curve) -> int:
    """Return the step with the highest accuracy of a curve that is not empty; the earliest of several."""
    return max(curve, key=lambda step: (trained_accuracy(curve[step]).value, -step))


def why_stop(curve: Curve, config: EvaluationConfig) -> str:
    """Return the reason why a run should stop after the last evaluation of a curve; empty if it should go on."""
    if not curve or not config.eval_every:
        return ""
    last, best = max(curve), best_step(curve)
    accuracy, highest = (trained_accuracy(curve[step]).value for step in (last, best))
    if config.stop_at_accuracy is not None and accuracy >= config.stop_at_accuracy:
        return f"held-out accuracy {accuracy:.3f} has reached --stop-at-accuracy {config.stop_at_accuracy:g}"
    num_since = sum(step > best for step in curve)
    if 0 < config.patience <= num_since:
        times = f"--patience {config.patience} evaluations"
        return f"{times} without a held-out accuracy above the {highest:.3f} of step {best}"
    return ""


def curve_summary(curve: Curve) -> list[dict[str, Any]]:
    """Return a curve as a summary holds it: step, accuracies and intervals by way."""
    return [
        {
            "step": step,
            "accuracy": {way: found.accuracy.value for way, found in ways.items()},
            "interval": {way: [found.accuracy.low, found.accuracy.high] for way, found in ways.items()},
        }
        for step, ways in curve.items()
    ]
