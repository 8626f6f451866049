"""The held-out accuracy, or mean reward, of a run over its steps: metrics, the best step, and when to stop.

A curve has an evaluation for each way of playing at each step that was evaluated; step 0 is the policy at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envs.spec import EnvSpec
from trainer.config.run import EvaluationConfig
from trainer.evaluation.results import Evaluation, Figure, by_environment
from trainer.evaluation.statistics import Estimate

#: The evaluations of each way, in order; the first way is the one that is trained.
Ways = Mapping[str, Evaluation]
#: Evaluations by step, in order.
Curve = Mapping[int, Ways]


def trained(ways: Ways, figure: Figure) -> Estimate | None:
    """Return a figure in the way that is trained: with the tools, if there are any. None where it is not known."""
    return next(iter(ways.values())).estimate(figure)


def evaluation_metrics(ways: Ways) -> dict[str, float]:
    """Return the metrics of an evaluation, such as `eval/with_tool/accuracy` with the bounds of its 95 % interval.

    Those of one environment of a mixture are called `eval/with_tool/geo3k/accuracy`.
    """
    metrics: dict[str, float] = {}
    for way, found in by_environment(ways).items():
        for name, estimate in (("accuracy", found.accuracy), ("reward", found.mean_reward)):
            if estimate:
                metrics[f"eval/{way}/{name}"] = estimate.value
                metrics[f"eval/{way}/{name}_low"] = estimate.low
                metrics[f"eval/{way}/{name}_high"] = estimate.high
        metrics[f"eval/{way}/turns"] = found.mean_turns
    return metrics


def best_step(curve: Curve, figure: Figure = "accuracy") -> int | None:
    """Return the step with the highest figure, the earliest of several; None where no step has it."""
    # A step whose episodes all broke has no mean reward.
    known = {step: found.value for step, ways in curve.items() if (found := trained(ways, figure))}
    # The earliest of equals: what came later cost more and brought nothing.
    return max(known, key=lambda step: (known[step], -step), default=None)


def why_stop(curve: Curve, config: EvaluationConfig, figure: Figure = "accuracy") -> str:
    """Return the reason why a run should stop after the last evaluation of a curve; empty if it should go on.

    The run's patience goes by `figure`.
    """
    if not curve or not config.eval_every:
        return ""
    # The last evaluation alone: an earlier one would have stopped the run.
    accuracy = trained(curve[max(curve)], "accuracy")
    if config.stop_at_accuracy is not None and accuracy and accuracy.value >= config.stop_at_accuracy:
        return f"held-out accuracy {accuracy.value:.3f} has reached --stop-at-accuracy {config.stop_at_accuracy:g}"
    best = best_step(curve, figure)
    if best is None:
        return ""
    highest = trained(curve[best], figure)
    # Evaluations, not steps: patience must not depend on how often the run evaluates.
    num_since = sum(step > best for step in curve)
    if highest and 0 < config.patience <= num_since:
        times = f"--patience {config.patience} evaluations"
        return f"{times} without a held-out {title(figure)} above the {highest.value:.3f} of step {best}"
    return ""


def figure_of(config: EvaluationConfig, spec: EnvSpec) -> Figure:
    """Return the figure that the best step and patience go by; nothing asked for: success where there is one."""
    # Where nobody says what a success is, the reward is all there is to go by.
    by = config.best_by or ("success" if spec.success_rule else "reward")
    if by == "success":
        return "accuracy"
    return "mean_reward"


def title(name: str) -> str:
    """Return the name of a figure, or of a way of playing, in texts.

    >>> title("mean_reward")
    'mean reward'
    """
    return name.replace("_", " ")


def values(ways: Ways, figure: Figure) -> dict[str, float]:
    """Return a figure by way of playing, where it is known."""
    return {way: estimate.value for way, found in by_environment(ways).items() if (estimate := found.estimate(figure))}


def curve_summary(curve: Curve) -> list[dict[str, Any]]:
    """Return a curve as a summary holds it: each step with its figures, and the interval of the main one, by way."""
    return [
        {
            "step": step,
            "accuracy": values(ways, "accuracy"),
            "mean_reward": values(ways, "mean_reward"),
            "interval": {
                way: [estimate.low, estimate.high]
                for way, found in by_environment(ways).items()
                if (estimate := found.estimate(found.main))
            },
        }
        for step, ways in curve.items()
    ]
