"""What the model card of a reinforcement run says: its environment and the held-out accuracy."""

from __future__ import annotations

from envs.spec import EnvSpec
from trainer.checkpoint.model_card import ModelCard
from trainer.config.run import RunConfig
from trainer.evaluation.curve import Curve, title


def run_card(
    name: str,
    config: RunConfig,
    spec: EnvSpec,
    curve: Curve,
    step: int,
    ending: str,
    sees_images: bool,
) -> ModelCard:
    """Return the card of the weights after a step of a run that has ended."""
    # An evaluation's own main figure: a run without a success has no accuracy to show.
    evaluations = [found for ways in curve.values() for found in ways.values()]
    figure = evaluations[0].main if evaluations else "accuracy"
    rows = [["", "before", f"after step {step}", "problems"]]
    for way, after in curve.get(step, {}).items():
        before = curve.get(0, {}).get(way)
        first = before.estimate(figure) if before else None
        rows.append([title(way), str(first or ""), str(after.estimate(figure) or ""), str(after.num_problems)])
    table = (f"Held-out {title(figure)} [95 % interval]", rows)
    return ModelCard(
        name=name,
        task=f"reinforcement learning in the environment `{spec.id}` (up to {spec.max_turns} turns)",
        tags=("reinforcement-learning",),
        base_model=config.model.model,
        data=tuple(filter(None, (config.data.data, config.data.eval_data))),
        step=step,
        ending=ending,
        tables=(table,) if len(rows) > 1 else (),
        sees_images=sees_images,
    )
